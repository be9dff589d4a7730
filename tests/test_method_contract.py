"""One contract over the whole method table: a new method is tested before it has tests."""

import io
import subprocess
import sys
from functools import cache

import pytest
import torch

import mergestream as ms
from conftest import (
    CLASSES,
    NAMES,
    has_blocks,
    make_base,
    make_experts,
    make_images,
    make_pool,
    micro_resnet,
    micro_vit,
    with_statistics,
)
from mergestream.bench.evaluation import precompute
from mergestream.methods import METHODS, Method

# Options a method cannot do without, and variants of it that must keep the contract too.
VARIANTS: dict[str, list[dict]] = {
    "single_expert": [{"expert": "brest"}],
    "mean": [{}, {"coefficients": [0.5, 0.3, 0.2]}, {"recalibrate_bn": True}],
    "ensemble": [{}, {"average": "probabilities"}],
    "task_arithmetic": [{}, {"lambda": "1/K"}, {"lambda": [0.5, 0.3, 0.1]}, {"base_head": "zero"}],
    "ties": [
        {},
        {"merge": "sum", "trim_scope": "tensor"},
        {"merge": "max", "trim_scope": "encoder_head_separately", "keep": 0.5},
        {"lambda": "1/K", "base_head": "zero", "recalibrate_bn": True},
    ],
    "adamerging": [
        {},
        {"granularity": "layer", "learning_rate": 0.05},
        {"lambda": "1/K", "steps": 2, "learning_rate": 0.01, "clamp": False},
        {"base_head": "zero", "recalibrate_bn": True},
    ],
    "fisher": [{}, {"fisher": "mergelm"}, {"statistics": "target"}, {"fisher": "mergelm", "statistics": "target"}],
    "regmean": [
        {},
        {"ratio": 1.0, "ridge": 0.1, "convolutions": False},
        {"statistics": "target"},
        {"statistics": "target", "examples": 6, "recalibrate_bn": True},
    ],
    "regmean_pp": [{}, {"statistics": "target"}, {"statistics": "target", "ratio": 0.9, "convolutions": False}],
    "select_expert": [{}, {"score": "max_softmax"}],
    "prior_adaptive": [
        {},
        {"anchor": 0.5, "home": "uniform", "memory": 16, "before": 4, "head": "entropy_gap", "refit": False},
        {"even_heads": False, "restore": True, "momentum": 0.5, "refit": False, "match_scale": False},
        {"refresh_every": 2, "recalibrate_bn": True, "temperature": 1.0, "views": ()},
        {"match_scale": False, "momentum": 0.5, "refit_before": 64, "views": ()},
    ],
    "entropy_adaptive": [
        {},
        {"head": "shared"},
        {"head": "select"},
        {"encoder": "uniform"},
        {"momentum": 0.7},
        {"views": ("hflip", "brightness")},
        {"views": ()},
        {"score": "max_softmax", "weighting": "softmax", "encoder_sharpness": 5.0},
        {"recalibrate_bn": True},
        {"refresh_every": 2, "momentum": 0.5},
        {"refresh_every": 100, "refresh_drift": 1e-3},
        {"temperature": [0.5, 1.0, 2.0], "head_sharpness": 4.0},
    ],
}
CASES = [(name, options) for name in METHODS for options in VARIANTS.get(name, [{}])]
IDS = [f"{name}-{'-'.join(f'{k}={v}' for k, v in options.items())}" for name, options in CASES]
every_method = pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)

# Not averages of the experts: K equal experts are not given back unless they never moved from the base.
SUMS = ("task_arithmetic", "ties", "adamerging")

STREAM = [make_images(5, seed=1), make_images(5, seed=2), make_images(2, seed=3), make_images(1, seed=4)]


def averages(name: str, options: dict) -> bool:
    return name not in SUMS or (name == "task_arithmetic" and options.get("lambda") == "1/K")


def hears_views(name: str, options: dict) -> bool:
    """Whether its head is fitted to other views than the batch itself, which even one expert answers otherwise."""
    return name == "prior_adaptive" and bool(options.get("refit", True) and options.get("views", ("hflip",)))


def create(name: str, pool: ms.ExpertPool, options: dict) -> Method:
    if name == "regmean_pp" and not has_blocks(pool):
        pytest.skip("regmean_pp refuses networks without known blocks, as another test shows")
    return ms.create_method(name, pool, **options)


@cache
def pool_of_equals(moved: bool) -> ms.ExpertPool:
    """K times the same expert, whose base is itself or another network."""
    expert = make_experts(micro_vit, ("a",))["a"]
    base = make_base(micro_vit, seed=7) if moved else expert
    return with_statistics(ms.ExpertPool.from_modules(dict.fromkeys(NAMES, expert), classes=CLASSES, base=base))


@cache
def pool_in_order(*names: str) -> ms.ExpertPool:
    experts = make_experts(micro_vit)
    chosen = {name: experts[name] for name in names}
    return with_statistics(ms.ExpertPool.from_modules(chosen, classes=CLASSES, base=make_base(micro_vit)))


def answers(method: Method) -> list[ms.Step]:
    return [method.step(batch) for batch in STREAM]


def same(first: ms.Step, second: ms.Step) -> bool:
    fields = ("logits", "encoder_coefficients", "head_coefficients", "entropy", "scores", "consistency", "lambdas")
    pairs = [(getattr(first, field), getattr(second, field)) for field in fields]
    return all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)


def unshifted(step: ms.Step) -> torch.Tensor:
    """What the merged network itself answered, before the stream's mix of classes moved its bias."""
    return step.logits if step.class_shift is None else step.logits - step.class_shift


def test_every_method_has_cases() -> None:
    assert {name for name, _ in CASES} == set(METHODS) == set(ms.list_methods())
    assert all(METHODS[name].name == name for name in METHODS)


@every_method
def test_a_stream_with_a_last_small_batch_and_a_batch_of_one(pool: ms.ExpertPool, name: str, options: dict) -> None:
    steps = answers(create(name, pool, options))
    for batch, step in zip(STREAM, steps, strict=True):
        assert step.logits.shape == (len(batch), len(CLASSES))
        assert step.logits.dtype == torch.float32
        assert torch.isfinite(step.logits).all()
        assert step.seconds > 0
        for coefficients in (step.encoder_coefficients, step.head_coefficients):
            if coefficients is not None:
                assert coefficients.shape == (len(pool),)
                assert coefficients.dtype == torch.float32
                assert (coefficients >= 0).all()
                assert coefficients.sum().item() == pytest.approx(1, abs=1e-6)
        if step.head_expert is not None:
            assert step.head_expert in pool.names


@every_method
def test_reset_and_repeat_gives_the_same_bits(pool: ms.ExpertPool, name: str, options: dict) -> None:
    method = create(name, pool, options)
    first = answers(method)
    method.reset()
    assert all(map(same, first, answers(method)))


@every_method
def test_the_pool_is_untouched(pool: ms.ExpertPool, name: str, options: dict) -> None:
    before, base = pool.fingerprint(), pool.base_fingerprint()
    answers(create(name, pool, options))
    assert pool.fingerprint() == before
    assert pool.base_fingerprint() == base


@every_method
def test_state_dict_continues_in_the_middle_of_a_stream(pool: ms.ExpertPool, name: str, options: dict) -> None:
    method = create(name, pool, options)
    for batch in STREAM[:1]:
        method.step(batch)
    buffer = io.BytesIO()
    torch.save(method.state_dict(), buffer)
    rest = [method.step(batch) for batch in STREAM[1:]]
    buffer.seek(0)
    resumed = ms.create_method(name, pool, **options)
    resumed.step(make_images(3, seed=9))
    resumed.load_state_dict(torch.load(buffer, weights_only=True))
    assert all(map(same, rest, [resumed.step(batch) for batch in STREAM[1:]]))


@every_method
@pytest.mark.parametrize("moved", [False, True], ids=["base_is_the_expert", "base_is_another"])
def test_identical_experts_give_that_expert(name: str, options: dict, moved: bool) -> None:
    if moved and not averages(name, options):
        pytest.skip("a sum of K equal task vectors is no expert")
    if options.get("base_head") == "zero":
        pytest.skip("a base without a head is never the expert")
    if hears_views(name, options):
        pytest.skip("its head is fitted to views as well")
    pool = pool_of_equals(moved)
    method = ms.create_method(name, pool, **options)
    for batch in STREAM:
        alone = pool.expert_logits(0, batch)
        logits = unshifted(method.step(batch))
        if options.get("average") == "probabilities":
            alone = torch.log_softmax(alone, dim=-1)
        assert torch.equal(logits.argmax(-1), alone.argmax(-1))
        torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


@every_method
def test_one_expert_is_that_expert(name: str, options: dict) -> None:
    if not averages(name, options):
        pytest.skip("lambda of one task vector is no expert")
    if hears_views(name, options):
        pytest.skip("its head is fitted to views as well")
    pool = pool_in_order("brest")
    options = {key: 1.0 if key == "temperature" else value for key, value in options.items()}
    options = {key: [1.0] if key == "coefficients" else value for key, value in options.items()}
    method = ms.create_method(name, pool, **options)
    for batch in STREAM:
        alone = pool.expert_logits(0, batch)
        logits = unshifted(method.step(batch))
        torch.testing.assert_close(torch.softmax(logits, -1), torch.softmax(alone, -1), rtol=1e-4, atol=1e-6)
        if "average" not in options and "momentum" not in options and name != "prior_adaptive":
            assert torch.equal(logits, alone)


@every_method
def test_permuting_the_experts_permutes_the_coefficients_and_no_prediction(name: str, options: dict) -> None:
    order = [2, 0, 1]
    moved = {key: [value[k] for k in order] if isinstance(value, list) else value for key, value in options.items()}
    first = ms.create_method(name, pool_in_order(*NAMES), **options)
    second = ms.create_method(name, pool_in_order(*(NAMES[k] for k in order)), **moved)
    for one, other in zip(answers(first), answers(second), strict=True):
        assert torch.equal(one.logits.argmax(-1), other.logits.argmax(-1))
        torch.testing.assert_close(one.logits, other.logits, rtol=1e-4, atol=1e-4)
        assert one.head_expert == other.head_expert
        for field in ("encoder_coefficients", "head_coefficients", "entropy", "scores", "consistency", "lambdas"):
            mine, theirs = getattr(one, field), getattr(other, field)
            assert (mine is None) == (theirs is None)
            if mine is not None:
                torch.testing.assert_close(mine[order], theirs, rtol=1e-5, atol=1e-6)


@every_method
def test_options_are_read_back_and_rebuild_the_method(pool: ms.ExpertPool, name: str, options: dict) -> None:
    method = create(name, pool, options)
    again = ms.create_method(name, pool, **method.options())
    assert again.options() == method.options()
    assert all(map(same, answers(method), answers(again)))
    for key in options:
        assert key in method.label()


@every_method
def test_precomputed_expert_logits_change_nothing(vit_pool: ms.ExpertPool, name: str, options: dict) -> None:
    method = ms.create_method(name, vit_pool, **options)
    images = torch.cat(STREAM)
    data = ms.DomainData("test", "nice", CLASSES, images, torch.zeros(len(images), dtype=torch.long))
    known = precompute(vit_pool, data, options.get("views", ("hflip",)))
    live = method.step(images)
    method.reset()
    given = method.step(images, expert_logits=known)
    torch.testing.assert_close(live.logits, given.logits, rtol=1e-5, atol=1e-5)


@every_method
def test_a_step_hands_out_the_experts_logits_when_asked_and_answers_the_same(
    vit_pool: ms.ExpertPool, name: str, options: dict
) -> None:
    asked, plain = (ms.create_method(name, vit_pool, **options) for _ in range(2))
    for images in STREAM:
        mine, theirs = asked.step(images, with_experts=True), plain.step(images)
        assert torch.equal(mine.logits, theirs.logits)
        assert theirs.expert_logits is None
        assert mine.expert_logits is not None
        assert torch.equal(mine.expert_logits, vit_pool.logits(images))


@every_method
def test_bad_batches_are_refused_and_leave_the_state(vit_pool: ms.ExpertPool, name: str, options: dict) -> None:
    method = ms.create_method(name, vit_pool, **options)
    method.step(STREAM[0])
    expected = method.step(STREAM[1])
    method.reset()
    method.step(STREAM[0])
    poisoned = torch.full((2, 3, 16, 16), float("nan"))
    for bad in (
        torch.zeros(0, 3, 16, 16),
        torch.zeros(2, 1, 16, 16),
        torch.zeros(3, 16, 16),
        torch.zeros(2, 3, 17, 17),
    ):
        with pytest.raises(ms.MergestreamError):
            method.step(bad)
    with pytest.raises(ms.MergestreamError, match="NaN or Inf for image 0"):
        method.step(poisoned)
    assert same(expected, method.step(STREAM[1]))


@pytest.mark.parametrize("factory", [micro_vit, micro_resnet], ids=["vit", "batchnorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_coefficients_e_k_return_expert_k_bit_for_bit(factory, dtype: torch.dtype) -> None:
    experts = {name: module.to(dtype) for name, module in make_experts(factory).items()}
    with torch.no_grad():  # zeros of both signs, which 0 * x would lose
        for module in experts.values():
            next(module.parameters()).flatten()[:4] = torch.tensor([0.0, -0.0, -0.0, 0.0], dtype=dtype)
    pool = ms.ExpertPool.from_modules(experts, preprocessing=ms.Preprocessing(size=(16, 16)))
    batch = pool.prepare(make_images())
    for k, (name, module) in enumerate(experts.items()):
        e_k = [float(j == k) for j in range(len(experts))]
        network = pool.network(encoder=e_k, head=e_k)
        for key, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                mine = network.state_dict()[key]
                assert mine.dtype == dtype
                assert torch.equal(mine.view(torch.uint8), tensor.view(torch.uint8)), key
        with torch.no_grad():
            assert torch.equal(network(batch), module(batch))
            assert torch.equal(pool.forward(pool.merge(e_k), batch), pool.logits(batch)[pool.index(name)])


def test_state_continues_bit_for_bit_in_a_new_process(tmp_path) -> None:
    pool = make_pool("vit")
    pool.save(tmp_path / "pool")
    method = ms.create_method(
        "entropy_adaptive", ms.ExpertPool.load(tmp_path / "pool", network=micro_vit()), momentum=0.8
    )
    for batch in STREAM[:2]:
        method.step(batch)
    torch.save(method.state_dict(), tmp_path / "state.pt")
    torch.save(torch.cat(STREAM[2:]), tmp_path / "images.pt")
    expected = method.step(torch.cat(STREAM[2:]))
    script = f"""
import sys; sys.path.insert(0, {str(tmp_path)!r}); sys.path.insert(0, {str(__file__.rsplit("/", 1)[0])!r})
import torch, mergestream as ms
from conftest import micro_vit
pool = ms.ExpertPool.load({str(tmp_path / "pool")!r}, network=micro_vit())
method = ms.create_method("entropy_adaptive", pool, momentum=0.8)
method.load_state_dict(torch.load({str(tmp_path / "state.pt")!r}, weights_only=True))
step = method.step(torch.load({str(tmp_path / "images.pt")!r}))
torch.save([step.logits, step.encoder_coefficients, step.head_coefficients], {str(tmp_path / "answer.pt")!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    logits, encoder, head = torch.load(tmp_path / "answer.pt")
    assert torch.equal(logits, expected.logits)
    assert torch.equal(encoder, expected.encoder_coefficients)
    assert torch.equal(head, expected.head_coefficients)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("entropy_adaptiv", {}, "Did you mean 'entropy_adaptive'"),
        ("entropy_adaptive", {"momentun": 0.5}, "Did you mean 'momentum'"),
        ("entropy_adaptive", {"head": "gap"}, "choice for 'head'"),
        ("entropy_adaptive", {"views": ("hflipp",)}, "Did you mean 'hflip'"),
        ("entropy_adaptive", {"momentum": 1.0}, "momentum"),
        ("entropy_adaptive", {"temperature": 0.0}, "temperature"),
        ("entropy_adaptive", {"temperature": [1.0, 2.0]}, "one per expert"),
        ("entropy_adaptive", {"refresh_every": 0}, "refresh_every"),
        ("entropy_adaptive", {"refresh_drift": -0.1}, "refresh_drift"),
        ("single_expert", {}, "needs the option 'expert'"),
        ("single_expert", {"expert": "lion"}, "Did you mean 'lyon'"),
        ("mean", {"coefficients": [0.5, 0.5, 0.5]}, "sum to 1"),
        ("mean", {"coefficients": [1.0]}, "Expected 3 coefficients"),
        ("mean", {"coefficients": "samples"}, "class_counts"),
    ],
)
def test_wrong_names_and_options_are_refused(vit_pool: ms.ExpertPool, name: str, options: dict, message: str) -> None:
    with pytest.raises(ms.MergestreamError, match=message):
        ms.create_method(name, vit_pool, **options)


def test_state_of_another_pool_or_method_is_refused(vit_pool: ms.ExpertPool) -> None:
    method = ms.create_method("entropy_adaptive", vit_pool)
    with pytest.raises(ms.MergestreamError, match="another options"):
        ms.create_method("entropy_adaptive", vit_pool, momentum=0.5).load_state_dict(method.state_dict())
    with pytest.raises(ms.MergestreamError, match="another pool"):
        ms.create_method("entropy_adaptive", make_pool("vit", seed=5)).load_state_dict(method.state_dict())
