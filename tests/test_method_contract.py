"""One contract over the whole method table: a new method is tested before it has tests."""

import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch

import mergestream as ms
from conftest import (
    CLASSES,
    FACTORIES,
    NAMES,
    make_base,
    make_experts,
    make_images,
    make_pool,
    micro_resnet,
    micro_vit,
    with_statistics,
)
from mergestream.bench.evaluation import describe_run
from mergestream.bench.records import run_hash
from mergestream.data.streams import Stream
from mergestream.methods import METHODS
from mergestream.methods.adapted_norms import AdaptedNorms
from mergestream.methods.merge_and_fit import MergeAndFit
from mergestream.methods.wrapper import Wrapper
from mergestream.testing import RULES, check_method
from mergestream.testing.method_case import STREAM, MethodCase
from mergestream.testing.pool_rules import CARD_FIELDS, COUNTS
from mergestream.testing.small_pools import full_pool

# Options a method cannot do without, and variants of it that must keep the contract too.
VARIANTS: dict[str, list[dict]] = {
    "single_expert": [{"expert": "brest"}],
    "mean": [{}, {"coefficients": [0.5, 0.3, 0.2]}, {"recalibrate_bn": True}, {"recalibrate_bn": "window"}],
    "ensemble": [{}, {"average": "probabilities"}, {"views": ("hflip",)}],
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
        {"steps": 2, "learning_rate": 0.01, "recalibrate_bn": "window"},
    ],
    "fisher": [{}, {"fisher": "mergelm"}, {"statistics": "target"}, {"fisher": "mergelm", "statistics": "target"}],
    "regmean": [
        {},
        {"ratio": 1.0, "ridge": 0.1, "convolutions": False},
        {"statistics": "target"},
        {"statistics": "target", "examples": 6, "recalibrate_bn": True},
        {"statistics": "target", "recalibrate_bn": "window"},
    ],
    "regmean_pp": [{}, {"statistics": "target"}, {"statistics": "target", "ratio": 0.9, "convolutions": False}],
    "select_expert": [{}, {"score": "max_softmax"}],
    "merge_and_fit": [
        {},
        {"correct": False, "views": (), "memory": 16},
        {"temperature": [0.5, 1.0, 2.0], "views": ("hflip", "brightness")},
        {"ask_first": 4, "ask_every": 2},
    ],
    "merge_once": [{}, {"ask_first": 4, "ask_drift": 0.0}, {"ask_first": 4, "ask_drift": 1e-6}],
    "corrected": [
        {},
        {"base": "mean", "anchor": 0.5, "home": "uniform", "memory": 16},
        {"base": "entropy_adaptive(views=(), refresh_every=2)", "anchor": "experts"},
        {"base": "regmean"},
    ],
    "auto": [{}, {"choice": "entropy_adaptive(momentum=0.5, views=())"}, {"choice": "mean"}],
    "lame": [{}, {"base": "ensemble", "k": 2}],
    "t3a": [{}, {"base": "entropy_adaptive(views=())", "supports": 2, "unit_prototypes": True}],
    "label_shift": [{}, {"base": "ensemble", "method": "bbse", "window": 7, "home": "uniform"}],
    "prior_roid": [{}, {"base": "lame(ensemble)"}],
    "tent": [{}, {"learning_rate": 0.05, "momentum": 0.5}, {"recalibrate_bn": False}],
    "sar": [
        {},
        {"margin": 2.0, "radius": 0.5, "learning_rate": 0.05, "frozen_blocks": 0},
        {"margin": 0.9, "reset_below": 0.5, "recalibrate_bn": False},
    ],
    "dawin": [{}, {"groups": 1}, {"groups": 2, "temperature": 2.0}, {"recalibrate_bn": True}],
    "t3_js": [{}, {"gamma": 20.0, "temperature": [0.5, 1.0, 2.0]}, {"recalibrate_bn": True}],
    "image_weights": [{}, {"epsilon": 0.1, "temperature": [0.5, 1.0, 2.0]}],
    "surgery": [{}, {"before": 100}, {"recalibrate_bn": True}, {"recalibrate_bn": "window"}],
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
        {"recalibrate_bn": "window"},
        {"recalibrate_bn": "window", "refresh_every": 2, "momentum": 0.5},
        {"refresh_every": 2, "momentum": 0.5},
        {"refresh_every": 100, "refresh_drift": 1e-3},
        {"temperature": [0.5, 1.0, 2.0], "head_sharpness": 4.0},
        {"score_images": 2, "score": "entropy_agreement"},
        {"score_images": 2, "recalibrate_bn": "window"},
    ],
}
CASES = [(name, options) for name in METHODS for options in VARIANTS.get(name, [{}])]
IDS = [f"{name}-{'-'.join(f'{k}={v}' for k, v in options.items())}" for name, options in CASES]
every_method = pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
# Checked by tests of their own below: one with options that read cards, one slow.
CARDS, CARRIED = "card values are in the provenance", "the state is carried to fewer and more experts"


def networks_for(name: str, options: dict) -> list[str]:
    """Every method on every network as it is by default; its variants on one, those about BatchNorm on one with it."""
    if options == VARIANTS.get(name, [{}])[0]:
        return [each for each in FACTORIES if name != "regmean_pp" or each != "hand_written"]  # it needs known blocks
    return ["resnet" if "recalibrate_bn" in options else "vit"]


LOG_PROBABILITIES = ("image_weights",)  # as logits
ALMOST = ("image_weights", "surgery")  # one expert is given back up to rounding
# Not averages of the experts: K equal experts are not given back unless they never moved from the base.
SUMS = ("task_arithmetic", "ties", "adamerging")

# Each image is its own mirror image, so that a head fitted to both is fitted to one answer.
SYMMETRIC = [torch.cat([batch[..., :8], batch[..., :8].flip(-1)], dim=-1) for batch in STREAM]


def averages(name: str, options: dict) -> bool:
    return name not in SUMS or (name == "task_arithmetic" and options.get("lambda") == "1/K")


@cache
def pool_of_equals(moved: bool) -> ms.ExpertPool:
    """K times the same expert, whose base is itself or another network."""
    expert = make_experts(micro_vit, ("a",))["a"]
    base = make_base(micro_vit, seed=7) if moved else expert
    return with_statistics(ms.ExpertPool.from_modules(dict.fromkeys(NAMES, expert), classes=CLASSES, base=base))


def unshifted(step: ms.Step) -> torch.Tensor:
    """What the merged network itself answered, before the stream's mix of classes moved its bias."""
    return step.logits if step.class_shift is None else step.logits - step.class_shift


def test_every_method_has_cases() -> None:
    assert {name for name, _ in CASES} == set(METHODS) == set(ms.list_methods())
    assert all(METHODS[name].name == name for name in METHODS)


@every_method
def test_contract(name: str, options: dict) -> None:
    # Statistics of the target are measured block by block, so that no network runs as a whole.
    blocks = ("networks run through the pool",) if name == "regmean_pp" and "statistics" in options else ()
    networks = networks_for(name, options)
    check_method(METHODS[name], options=options, networks=networks, except_for=(CARDS, CARRIED, *blocks))


@pytest.mark.slow
@every_method
def test_a_state_is_carried_to_fewer_and_more_experts_and_back(name: str, options: dict) -> None:
    if name == "regmean_pp" and "statistics" not in options:
        pytest.skip("The statistics of its sites belong to one set of experts.")
    RULES[CARRIED](MethodCase(METHODS[name], options, networks_for(name, options)[0]))


@every_method
def test_identical_experts_give_that_expert(name: str, options: dict) -> None:
    if options.get("base_head") == "zero":
        pytest.skip("a base without a head is never the expert")
    if issubclass(METHODS[name], Wrapper | AdaptedNorms | MergeAndFit):
        pytest.skip("it changes answers by what the stream says")
    for moved in (False, True) if averages(name, options) else (False,):
        pool = pool_of_equals(moved)
        method = ms.create_method(name, pool, **options)
        for batch in SYMMETRIC if options.get("views") else STREAM:
            alone = pool.expert_logits(0, batch)
            logits = unshifted(method.step(batch))
            if options.get("average") == "probabilities" or name in LOG_PROBABILITIES:
                alone = torch.log_softmax(alone, dim=-1)
            assert torch.equal(logits.argmax(-1), alone.argmax(-1))
            torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


@every_method
def test_one_expert_is_that_expert(name: str, options: dict) -> None:
    if not averages(name, options):
        pytest.skip("lambda of one task vector is no expert")
    if issubclass(METHODS[name], Wrapper | AdaptedNorms | MergeAndFit):
        pytest.skip("it changes answers by what the stream says")
    pool = full_pool("vit", ("brest",))
    options = {key: 1.0 if key == "temperature" else value for key, value in options.items()}
    options = {key: [1.0] if key == "coefficients" else value for key, value in options.items()}
    method = ms.create_method(name, pool, **options)
    for batch in SYMMETRIC if options.get("views") else STREAM:
        alone = pool.expert_logits(0, batch)
        logits = unshifted(method.step(batch))
        torch.testing.assert_close(torch.softmax(logits, -1), torch.softmax(alone, -1), rtol=1e-4, atol=1e-6)
        if "average" not in options and "momentum" not in str(options) and name not in ALMOST:
            assert torch.equal(logits, alone)


@pytest.mark.parametrize("name", METHODS)
def test_another_card_is_another_provenance_or_the_same_bits(name: str) -> None:
    """Also with the options that read cards."""
    options = dict(VARIANTS.get(name, [{}])[0])
    options |= {"temperature": "card"} if "temperature" in METHODS[name].option_names() else {}
    options |= {"coefficients": "samples"} if name == "mean" else {}
    options |= {"statistics": "target"} if name == "regmean_pp" else {}
    RULES[CARDS](MethodCase(METHODS[name], options))


@pytest.mark.parametrize("field", ["temperature", "mean_probability"])
def test_a_card_that_changes_answers_changes_the_run_hash(field: str) -> None:
    """The defect that made `bench --out` return stale runs."""
    pool = full_pool("vit")
    for expert in pool.names:
        pool = pool.annotate(expert, class_counts=dict(reversed(COUNTS.items())) | {CLASSES[0]: 7}, temperature=0.7)
    other = pool.annotate(NAMES[0], **CARD_FIELDS[field])
    methods = [ms.create_method("merge_and_fit", each, temperature="card") for each in (pool, other)]
    logits = [[method.step(batch).logits for batch in STREAM][-1] for method in methods]
    assert not torch.equal(*logits)
    data = ms.DomainData("test", "nice", CLASSES, STREAM[0], torch.zeros(5, dtype=torch.long))
    hashes = {run_hash(describe_run(method, data, Stream("given", (np.arange(5),)))) for method in methods}
    assert len(hashes) == 2


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


@pytest.mark.slow
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
