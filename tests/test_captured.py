"""Captured steps against eager ones, without a GPU: a 'graph' here is the recorded function, run again."""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import mergestream as ms
from conftest import make_images, make_pool
from graphs import RECORDED, Late
from mergestream.functional import merging
from mergestream.methods import METHODS, Batch, base, capture, fading_window, fused_correction
from mergestream.methods.capture import MOST_RECORDED, Recorder
from mergestream.methods.correction import Correction, LongRun
from mergestream.methods.spelling import create_from_text
from mergestream.pool import runner
from mergestream.pool.execution import Execution, Recording, patch_product, patches_as_products
from mergestream.runtime.errors import InputError
from mergestream.runtime.messages import log_once
from mergestream.testing.small_pools import full_pool
from test_training_graph import HostTraffic


@pytest.fixture(autouse=True)
def nothing_logged(graphs_here: None) -> None:
    log_once.cache_clear()


def eager(pool: ms.ExpertPool) -> ms.ExpertPool:
    return pool.to(execution=Execution(capture=False))


def assert_same(one: Any, two: Any, rtol: float = 1e-3, atol: float = 1e-4) -> None:
    for field in ("logits", "encoder_coefficients", "head_coefficients", "entropy", "scores", "consistency"):
        mine, theirs = getattr(one, field), getattr(two, field)
        assert (mine is None) == (theirs is None), field
        if mine is not None:
            torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)
    assert one.head_expert == two.head_expert


SIZES = (6, 6, 6, 3, 6, 2, 6, 1)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("entropy_adaptive", {}),
    ("entropy_adaptive", {"momentum": 0.7}),
    ("entropy_adaptive", {"views": ()}),
    ("entropy_adaptive", {"views": ("hflip", "vflip"), "head": "select"}),
    ("entropy_adaptive", {"refresh_every": 3, "momentum": 0.5}),
    ("entropy_adaptive", {"score": "max_softmax", "weighting": "softmax", "temperature": (0.5, 1.0, 2.0)}),
    ("entropy_adaptive", {"recalibrate_bn": True}),
    ("entropy_adaptive", {"recalibrate_bn": "window"}),
    ("mean", {"recalibrate_bn": "window"}),
    ("entropy_adaptive", {"score_images": 2, "refresh_every": 2}),
    ("t3_js", {"gamma": 20.0}),
    ("image_weights", {}),
    ("surgery", {}),
    ("t3a", {"base": "surgery"}),
    ("merge_and_fit", {}),
    ("merge_and_fit", {"memory": 20, "correct": False}),
    ("merge_and_fit", {"temperature": (0.5, 1.0, 2.0), "views": ()}),
    ("merge_and_fit", {"ask_first": 6, "ask_every": 2}),
    ("merge_once", {"ask_first": 6, "ask_drift": 0.0}),
    ("merge_once", {"ask_first": 6, "ask_drift": 0.5}),
    ("corrected", {}),
    ("corrected", {"anchor": "experts"}),
    ("corrected", {"base": "mean", "memory": 20}),
    ("lame", {"k": 3}),
    ("lame", {"base": "ensemble"}),
    ("t3a", {"supports": 3}),
    ("label_shift", {"window": 9}),
    ("prior_roid", {"base": "entropy_adaptive(refresh_every=2)"}),
    ("ensemble", {}),
    ("auto", {"choice": "entropy_adaptive(refresh_every=2)"}),
    ("ensemble", {"average": "probabilities"}),
    ("mean", {}),
    ("single_expert", {"expert": "brest"}),
    ("select_expert", {}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{n}-{i}" for i, (n, _) in enumerate(CASES)])
def test_captured_steps_equal_eager_ones(name: str, options: dict[str, Any]) -> None:
    pool = make_pool("resnet" if "recalibrate_bn" in options else "vit")
    fast, slow = ms.create_method(name, pool, **options), ms.create_method(name, eager(pool), **options)
    for seed, size in enumerate(SIZES):
        images = make_images(size, seed=seed)
        ask_experts = seed % 3 > 0  # by turns with the experts' logits and without: each kind has graphs of its own
        mine, theirs = fast.step(images, with_experts=ask_experts), slow.step(images, with_experts=ask_experts)
        assert_same(mine, theirs)
        assert (mine.expert_logits is None) == (theirs.expert_logits is None) == (not ask_experts)
        if mine.expert_logits is not None:
            torch.testing.assert_close(mine.expert_logits, theirs.expert_logits, rtol=1e-3, atol=1e-4)
    fast.settle()
    assert RECORDED  # they were not simply eager
    for key, value in slow.state_dict()["state"].items():
        mine = fast.state_dict()["state"][key]
        if isinstance(value, Tensor):
            size = max(1.0, float(value.abs().max()))  # sums of many products are rounded as their largest is
            torch.testing.assert_close(mine, value, rtol=1e-4, atol=3e-5 * size)
        else:
            assert mine == value


# Why a method, or an option of it, keeps the eager step.
GRADIENTS, ON_THE_HOST, OF_THE_BATCH = "gradients", "decisions on the host", "learns its weights from each batch"
EAGER = {
    ("adamerging", ""): GRADIENTS,
    ("tent", ""): GRADIENTS,
    ("sar", ""): GRADIENTS,
    ("dawin", ""): ON_THE_HOST,  # clusters
    ("fisher", "statistics=target"): OF_THE_BATCH,
    ("regmean", "statistics=target"): OF_THE_BATCH,
    ("regmean_pp", "statistics=target"): OF_THE_BATCH,
    ("mean", "recalibrate_bn=True"): OF_THE_BATCH,
    ("entropy_adaptive", "head_rows=seen"): ON_THE_HOST,
    ("entropy_adaptive", "refresh_drift=0.1"): ON_THE_HOST,
}
EVERY = [*dict.fromkeys((name, "") for name in METHODS), *(case for case in EAGER if case[1])]


@pytest.mark.parametrize(("name", "option"), EVERY, ids=[" ".join(case) for case in EVERY])
def test_every_method_is_captured_or_listed_as_eager(name: str, option: str) -> None:
    needed = {"single_expert": "expert=brest", "merge_once": "ask_first=6"}  # the latter is eager while it asks
    text, pool = f"{name}({option or needed.get(name, '')})", full_pool("resnet" if "bn" in option else "vit")
    for each in pool.names if option == "head_rows=seen" else ():
        pool = pool.annotate(each, class_counts=dict.fromkeys(pool.classes, 9))
    fast, slow = (create_from_text(text, each, inside="a test") for each in (pool, eager(pool)))
    for seed in range(4):
        mine, theirs = fast.step(make_images(6, seed=seed)), slow.step(make_images(6, seed=seed))
        assert_same(mine, theirs)
    assert (mine.graph is None) == ((name, option) in EAGER)


def test_smaller_batches_are_padded_not_recorded() -> None:
    pool = make_pool("vit")
    method = ms.create_method("entropy_adaptive", pool)
    for size in (8, 8, *range(1, 8), 8):
        method.step(make_images(size, seed=size))
    assert len(RECORDED) == 2  # one of eight, and one that is padded to eight


def test_there_are_never_many_graphs() -> None:
    method = ms.create_method("ensemble", make_pool("vit"))
    for size in (*range(1, 20), *range(1, 20)):
        method.step(make_images(size))
    assert len(RECORDED) <= MOST_RECORDED


def test_known_logits_are_used_and_padded() -> None:
    pool = make_pool("vit")
    fast, slow = ms.create_method("entropy_adaptive", pool), ms.create_method("entropy_adaptive", eager(pool))
    for seed, size in enumerate((5, 5, 5, 2, 3)):
        images = make_images(size, seed=seed)
        shared_logits = pool.logits_of_views(Batch(pool.prepare(images)), ("original", "hflip"))
        shared_logits["original"] = shared_logits["original"] * 1.5  # told apart from what the pool would compute
        assert_same(fast.step(images, expert_logits=shared_logits), slow.step(images, expert_logits=shared_logits))


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_replayed_step_counts_its_forwards(name: str, options: dict[str, Any]) -> None:
    pool = make_pool("resnet" if "recalibrate_bn" in options else "vit")
    fast, slow = (ms.create_method(name, each, **options) for each in (pool, eager(pool)))
    replayed = 0
    for seed, size in enumerate(SIZES):
        before = dict(pool.passes)
        one, two = (method.step(make_images(size, seed=seed)) for method in (fast, slow))
        counted = [(step.expert_forwards, step.merged_forwards, step.backwards) for step in (one, two)]
        assert counted[0] == counted[1]
        images = one.graph or size  # padding runs through the networks too
        assert pool.passes["expert"] - before["expert"] == images * one.expert_forwards
        replayed += one.graph is not None
    assert replayed


def broken(images: Tensor, place: int) -> Tensor:
    images = images.float().clone()
    images[place] = torch.nan
    return images


@pytest.mark.parametrize("patience", [0, 3])
def test_a_batch_that_is_not_finite_is_refused_and_leaves_no_trace(
    patience: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Late, "patience", patience)
    pool = make_pool("vit")
    good = [pool.prepare(make_images(4, seed=seed)) for seed in range(5)]
    fast = ms.create_method("entropy_adaptive", pool, momentum=0.5)
    slow = ms.create_method("entropy_adaptive", eager(pool), momentum=0.5)
    for images in good[:3]:
        fast.step(images)
        slow.step(images)
    fast.step(broken(good[0], 2))
    with pytest.raises(InputError, match=r"gave NaN or Inf for image 2 of this batch \(1 in all\)"):
        fast.settle()
    for images in good[3:]:
        assert_same(fast.step(images), slow.step(images))
    fast.settle()
    assert fast.state_dict()["state"]["batches"] == slow.state_dict()["state"]["batches"]


@pytest.mark.parametrize(("place", "owner"), [(1, "Expert 'lyon'"), (3, "The merged model")])
def test_an_image_that_is_not_finite_is_named_also_where_experts_see_a_part(place: int, owner: str) -> None:
    pool = make_pool("vit")
    method = ms.create_method("entropy_adaptive", pool, score_images=2)
    for seed in range(3):
        method.step(pool.prepare(make_images(4, seed=seed)))
    method.step(broken(pool.prepare(make_images(4)), place))
    with pytest.raises(InputError, match=f"{owner} gave NaN or Inf for image {place} of this batch"):
        method.settle()


def test_what_is_found_out_later_says_which_batch_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Late, "patience", 10**6)
    pool = make_pool("vit")
    method = ms.create_method("entropy_adaptive", pool)
    for seed in range(2):
        method.step(pool.prepare(make_images(4, seed=seed)))
    method.step(broken(pool.prepare(make_images(4)), 1))
    for seed in range(2):
        step = method.step(pool.prepare(make_images(4, seed=seed)))
        assert torch.isfinite(step.logits).all()
    with pytest.raises(InputError, match="image 1 of the batch 2 before this one"):
        method.settle()


def test_what_a_refused_batch_merged_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool("vit")
    method = ms.create_method("entropy_adaptive", pool, refresh_every=3, momentum=0.5)
    good = [pool.prepare(make_images(4, seed=seed)) for seed in range(9)]
    for images in good:
        method.step(images)
    monkeypatch.setattr(Late, "patience", 1)
    method.step(broken(good[0], 0))  # scored, and merged with coefficients that are none
    with pytest.raises(InputError, match="of this batch"):
        method.settle()
    for images in good:
        assert torch.isfinite(method.step(images).logits).all()
    method.settle()


def test_the_host_never_runs_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Late, "patience", 10**6)
    pool = make_pool("vit")
    method = ms.create_method("entropy_adaptive", pool)
    for seed in range(3 * capture.MOST_UNCHECKED):
        method.step(make_images(2, seed=seed))
        assert method.graphs is not None
        assert len(method.graphs._unchecked) <= capture.MOST_UNCHECKED


def test_drift_makes_the_next_batch_scored_again() -> None:
    pool = make_pool("vit")
    method = ms.create_method("entropy_adaptive", pool, refresh_every=1000, refresh_drift=1e-6)
    scored = [method.step(make_images(4, seed=seed)).entropy is not None for seed in range(12)]
    assert scored[0]
    assert any(scored[1:]), "the merged model's entropy moved, and nobody noticed"
    calm = ms.create_method("entropy_adaptive", pool, refresh_every=1000, refresh_drift=50.0)
    scored = [calm.step(make_images(4, seed=seed)).entropy is not None for seed in range(6)]
    assert not any(scored[1:])


def test_a_step_is_taken_again_after_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alarm arrives while the next step runs; images of another kind come in the middle of the stream."""
    monkeypatch.setattr(Late, "patience", 10**6)
    pool, replays = make_pool("vit"), []
    monkeypatch.setattr(capture.Graphs, "_replay", noted(capture.Graphs._replay, replays))
    fast, slow = (ms.create_method("merge_once", each, ask_first=12, ask_drift=0.3) for each in (pool, eager(pool)))
    usual, other = ([make_images(6, seed=seed) for seed in range(start, start + 8)] for start in (0, 20))
    asked = []
    for images in [*usual, *(images // 16 for images in other), *usual]:
        passes = pool.passes["expert"]
        mine, theirs = fast.step(images), slow.step(images)
        assert_same(mine, theirs)
        assert mine.expert_forwards == theirs.expert_forwards
        assert pool.passes["expert"] - passes == 6 * mine.expert_forwards
        asked.append(mine.expert_forwards > 0)
    again = [number for number in range(3, len(asked)) if asked[number] and not asked[number - 1]]
    assert asked[:3] == [True, True, False]
    assert again
    assert len(replays) == len(asked) + len(again)
    fast.settle()
    for key, value in slow.state_dict()["state"].items():
        torch.testing.assert_close(fast.state_dict()["state"][key], value, rtol=1e-3, atol=1e-3)


def noted(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        calls.append(arguments)
        return function(*arguments)

    return call


def test_the_merged_weights_are_those_that_answered() -> None:
    whole = make_pool("vit")
    for name in whole.names:
        method = ms.create_method("entropy_adaptive", whole.without(name))
        for seed in range(3):
            step = method.step(make_images(4, seed=seed))
        expected = method.pool.merge(step.encoder_coefficients, step.head_coefficients)
        torch.testing.assert_close(method.merged_weights(), expected)


def test_two_living_methods_never_share() -> None:
    whole = make_pool("vit")
    pools = [whole.without(name) for name in whole.names]
    fast = [ms.create_method("entropy_adaptive", pool, momentum=0.5) for pool in pools]
    slow = [ms.create_method("entropy_adaptive", eager(pool), momentum=0.5) for pool in pools]
    for seed in range(4):
        for one, two in zip(fast, slow, strict=True):
            images = make_images(4, seed=seed)
            assert_same(one.step(images), two.step(images))


def test_what_cannot_be_captured_is_eager_and_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(_: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(base, "recorder_for", lambda _: Recorder(refuses, Late))
    pool = make_pool("vit")
    slow = ms.create_method("entropy_adaptive", eager(pool))
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            fast = ms.create_method("entropy_adaptive", pool)
            for seed in range(3):
                assert_same(fast.step(make_images(4, seed=seed)), slow.step(make_images(4, seed=seed)))
    assert sum("cannot be captured" in message for message in caplog.messages) == 1


def test_bad_input_is_refused_as_ever() -> None:
    method = ms.create_method("entropy_adaptive", make_pool("vit"))
    for _ in range(3):
        with pytest.raises(InputError, match=r"\[B,c,H,W\]"):
            method.step(torch.zeros(3, 16, 16, dtype=torch.uint8))
        method.step(make_images(2))


def test_it_may_begin_in_inference_mode_and_go_on_outside() -> None:
    method = ms.create_method("entropy_adaptive", make_pool("vit"), momentum=0.5)
    for seed in range(3):
        with torch.inference_mode():
            method.step(make_images(4, seed=seed))
    for seed in range(3):
        method.step(make_images(4, seed=seed))


def test_a_state_is_taken_up_in_the_middle() -> None:
    pool = make_pool("vit")
    one = ms.create_method("entropy_adaptive", pool, momentum=0.5)
    for seed in range(3):
        one.step(make_images(4, seed=seed))
    two = ms.create_method("entropy_adaptive", pool, momentum=0.5)
    two.load_state_dict(one.state_dict())
    assert_same(one.step(make_images(4, seed=9)), two.step(make_images(4, seed=9)))


def test_patches_are_products_inside_the_block_alone() -> None:
    convolution = torch.nn.Conv2d(3, 8, 4, stride=4)
    images = torch.rand(2, 3, 14, 17)
    before = convolution(images)
    with patches_as_products([torch.nn.Sequential(convolution)]):
        inside = convolution(images)
        assert convolution.forward.__func__ is patch_product
    assert convolution.forward.__func__ is torch.nn.Conv2d.forward
    torch.testing.assert_close(before, inside, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("entropy_adaptive", {}),
        ("entropy_adaptive", {"momentum": 0.5}),
        ("entropy_adaptive", {"views": ("brightness",)}),
        ("entropy_adaptive", {"score_images": 2}),
        ("t3_js", {}),
        ("merge_and_fit", {}),
        ("merge_and_fit", {"correct": False}),
        ("merge_once", {}),
    ],
    ids=str,
)
def test_a_recorded_step_touches_nothing_of_the_host(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tensors that only claim to lie on a GPU, where there is no kernel to launch nor a stream to launch it on."""
    monkeypatch.setattr(merging.weighted_sums, "kernel_can_run", lambda *_: False)
    monkeypatch.setattr(fused_correction, "can_run", lambda _: False)
    monkeypatch.setattr(runner, "looked_up", lambda *_: None)
    monkeypatch.setattr(Recording, "side_by_side", lambda _, tasks, device: [task() for task in tasks])
    monkeypatch.setattr(Recording, "both", lambda _, first, second, device: (first(), second()))
    from mergestream.networks import preprocessing

    pool = make_pool("vit")
    method: Any = ms.create_method(name, pool, **options)
    caches = (preprocessing._columns, fading_window._of_whole_batch)
    for cache in caches:
        cache.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        there = pool._with(bank=torch.empty(pool.bank.shape, device="cuda"))
        method.pool, method._temperature = there, torch.empty(len(pool), device="cuda")
        method._rows = there.rows
        if name.startswith("merge_"):
            mix = torch.empty(len(pool.classes), device="cuda")
            method._coefficients, method._correction = (
                torch.empty_like(method._temperature),
                Correction(LongRun(mix, mix, 0.0)),
            )
            method._head = replace(method._head, device=there.device)
        state = method.start()
        state = replace(state, asked=method.ask_first) if name == "merge_once" else state
        images = torch.empty(4, 3, 20, 20, dtype=torch.uint8, device="cuda")

        def step() -> None:
            with there.recording():
                method.advance(Batch(there.prepare(images)), state)

        step()
        with HostTraffic() as traffic:
            step()
    for cache in caches:
        cache.cache_clear()
    assert traffic.seen == []


def test_a_step_that_is_kept_keeps_no_large_state_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mergestream.methods.recorded_step.LARGE", 100)
    method = ms.create_method("merge_and_fit", make_pool("vit"))
    steps = [method.step(make_images(8, seed=seed)) for seed in range(3)]
    assert RECORDED
    assert method.state.head.sums.numel() > 1000
    assert steps[-1].logits.untyped_storage().nbytes() < 1000


class Launches(TorchDispatchMode):
    """Counts operations that a device would launch: all but views and new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        # What is empty, or shares the first argument's memory, launches nothing.
        view = bool(args) and isinstance(args[0], Tensor) and torch._C._is_alias_of(args[0], result)
        if "empty" not in str(function) and not (view and not function._schema.name.endswith("_")):
            self.names.append(str(function))
        return result


class OneLaunch:
    """Stands in for the kernel of the correction."""

    @staticmethod
    def can_run(_: Tensor) -> bool:
        return True

    @staticmethod
    def answered(answers: list[Tensor], *others: Tensor) -> tuple[Tensor, Tensor]:
        return torch.stack(answers), others[-1].clone()


@pytest.mark.parametrize(
    ("name", "options", "most"),
    [("mean", {}, 15), ("merge_once", {"ask_first": 6}, 60), ("merge_and_fit", {}, 250), ("entropy_adaptive", {}, 90)],
)
def test_a_step_launches_few_operations_beside_its_networks(
    name: str, options: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each costs a microsecond or two in a graph, even if it does nothing."""
    monkeypatch.setattr(fused_correction, "_kernel", lambda: OneLaunch)
    pool = make_pool("vit")
    method = ms.create_method(name, pool, **options)
    for seed in range(4):
        step = method.step(make_images(6, seed=seed))
    assert step.graph == 6
    with Launches() as network:
        pool.expert(0)(pool.prepare(make_images(6)))
    with Launches() as whole:
        RECORDED[-1]()
    forwards = step.merged_forwards + len(pool) * (step.expert_forwards > 0)
    assert len(whole.names) - forwards * len(network.names) <= most
