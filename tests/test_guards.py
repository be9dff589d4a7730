"""Guard rails: each fires on what it is for, stays silent where it should, and the safe choice answers as it says."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import mergestream as ms
from conftest import CLASSES, PREPROCESSING, HandWritten, make_experts
from engines import Service, batch, small_pool, tensor_of
from mergestream.data.datasets import phantom
from mergestream.data.intake.pictures import Picture, sha256_of_pixels
from mergestream.functional.scores import entropy
from mergestream.pool.expert_card import require_schema
from mergestream.runtime.errors import CheckpointError, UnknownNameError
from mergestream.runtime.json_record import parsed
from mergestream.serving.engine.answers import source_risk
from mergestream.serving.engine.lineup import Lineup
from mergestream.serving.engine.stream_state import StreamState, encoded
from mergestream.serving.guards.batch_guards import BatchTensors, look_at_batch, neighbour_correlation
from mergestream.serving.guards.findings import BATCH_CODES, GuardSettings
from mergestream.serving.guards.stream_guards import Cusum, HalfWindow, Memory, chi_square, look_at_stream, remember

SETTINGS = GuardSettings()
NAMES, FOUR = ("lyon", "brest", "turin"), ("round", "spiculated", "ring", "divided")


def smooth_images(count: int, seed: int = 0) -> Tensor:
    """Pictures with content: sums of low waves."""
    random = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.linspace(0, 3, 16), torch.linspace(0, 3, 16), indexing="ij")
    phases = 6 * torch.rand(count, 3, 1, 1, generator=random)
    return torch.sin(x + phases) + torch.cos(y - phases)


def tensors(experts: Tensor, logits: Tensor | None = None, images: Tensor | None = None) -> BatchTensors:
    logits = experts.mean(dim=0) if logits is None else logits
    images = smooth_images(len(logits)) if images is None else images
    return BatchTensors(images, logits, experts, entropy(experts), NAMES[: len(experts)], FOUR)


def honest(images: int = 32, seed: int = 0, scale: float = 3.0) -> Tensor:
    """Logits [3,B,4] of experts that mostly agree and are differently sure."""
    random = torch.Generator().manual_seed(seed)
    truth = torch.randint(0, 4, (images,), generator=random)
    signal = scale * torch.nn.functional.one_hot(truth, 4).float()
    noise = torch.randn(3, images, 4, generator=random)
    return torch.stack([1.3 * signal, signal, 0.7 * signal]) + noise


def codes(findings: Any) -> list[str]:
    return [finding.code for finding in findings]


def run(
    batches: list[BatchTensors], settings: GuardSettings = SETTINGS, memory: Memory | None = None
) -> list[list[str]]:
    memory, findings_by_batch = memory or Memory(), []
    for each in batches:
        memory = remember(memory, each, settings)
        findings_by_batch.append(codes(look_at_stream(memory, each, settings)))
    return findings_by_batch


def test_honest_batches_are_passed_over() -> None:
    for seed in range(20):
        assert look_at_batch(tensors(honest(seed=seed)), SETTINGS) == []


# --- one batch --------------------------------------------------------------------------------------------------------


@given(st.floats(0.5, 0.999), st.integers(2, 40))
def test_near_uniform_at_the_very_limit(share: float, classes: int) -> None:
    """Entropies are closed forms of the settings: just above the limit it speaks, just below it does not."""
    images = torch.zeros(3, 2, classes)
    entropies = torch.tensor([1.0, share, 1.0]) * math.log(classes)
    batch_ = BatchTensors(smooth_images(2), images[0], images, entropies, NAMES, tuple(map(str, range(classes))))
    for limit, speaks in ((share * 0.999, True), (share * 1.001, False)):
        settings = replace(SETTINGS, near_uniform=limit)
        assert ("near_uniform_entropies" in codes(look_at_batch(batch_, settings))) == speaks


def test_equal_entropies() -> None:
    same = honest()[:1].repeat(3, 1, 1)
    assert "equal_entropies" in codes(look_at_batch(tensors(same), SETTINGS))
    assert "equal_entropies" not in codes(look_at_batch(tensors(same[:1]), SETTINGS))  # one expert has no equal
    nearly = BatchTensors(smooth_images(2), same[0], same, torch.tensor([0.5, 0.501, 0.502]), NAMES, FOUR)
    assert "equal_entropies" in codes(look_at_batch(nearly, SETTINGS))
    apart = replace(nearly, entropy=torch.tensor([0.5, 0.51, 0.52]))
    assert look_at_batch(apart, SETTINGS) == []


def test_a_head_multiplied_by_100_is_named() -> None:
    logits = honest()
    logits[1] *= 100
    findings = look_at_batch(tensors(logits), SETTINGS)
    assert codes(findings) == ["saturated_expert"]
    assert list(findings[0].numbers["shares"]) == ["brest"]
    assert findings[0].severity == "alarm"


def test_black_pictures_and_noise_are_named_by_position() -> None:
    images = smooth_images(6)
    images[2] = -2.1
    images[4] = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(0))
    findings = look_at_batch(tensors(honest(6), images=images), SETTINGS)
    assert {finding.code: finding.numbers["positions"] for finding in findings} == {
        "blank_pictures": [2],
        "structureless_pictures": [4],
    }


@given(st.integers(2, 20), st.integers(2, 20), st.floats(0.1, 100), st.floats(-5, 5))
def test_neighbour_correlation_is_one_on_a_ramp_whatever_its_scale(h: int, w: int, scale: float, shift: float) -> None:
    ramp = (torch.arange(h)[:, None] + torch.arange(w)).expand(1, 3, h, w) * scale + shift
    reference = np.mean(
        [np.sum(a * b) / (np.linalg.norm(a) * np.linalg.norm(b)) for a, b in _neighbours(ramp[0].double().numpy())]
    )
    assert float(neighbour_correlation(ramp)[0]) == pytest.approx(float(reference), abs=1e-3)
    assert neighbour_correlation(torch.zeros(2, 3, 1, 5)).tolist() == [1, 1]


def _neighbours(image: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    centred = image - image.mean(axis=(1, 2), keepdims=True)
    return [(centred[..., 1:], centred[..., :-1]), (centred[:, 1:], centred[:, :-1])]


def test_white_noise_has_no_structure() -> None:
    noise = torch.rand(64, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    assert float(neighbour_correlation(noise).abs().max()) < 0.1
    assert float(neighbour_correlation(smooth_images(8)).min()) > 0.5


def test_without_experts_only_what_can_be_known_is_said() -> None:
    blind = replace(tensors(honest()), experts=None, entropy=None)
    assert look_at_batch(blind, SETTINGS) == []
    assert run([blind] * 30) == [[]] * 30


# --- a stream ---------------------------------------------------------------------------------------------------------


def test_a_model_that_calls_everything_one_class() -> None:
    batches = [honest(seed=seed) for seed in range(12)]
    one_class = torch.tensor([9.0, 0, 0, 0]).expand(32, 4)
    findings_by_batch = run([tensors(experts, one_class) for experts in batches])
    assert findings_by_batch[0] == findings_by_batch[1] == findings_by_batch[2] == []
    assert all("class_collapse" in each for each in findings_by_batch[3:])
    assert not any("class_collapse" in each for each in run([tensors(experts) for experts in batches]))


def test_the_window_forgets() -> None:
    good = [tensors(honest(seed=seed)) for seed in range(20)]
    bad = [replace(each, logits=torch.tensor([9.0, 0, 0, 0]).expand(32, 4)) for each in good[:6]]
    findings_by_batch = run([*bad, *good])
    assert "class_collapse" in findings_by_batch[5]
    assert not any("class_collapse" in each for each in findings_by_batch[5 + 2 * 128 // 32 + 1 :])


def test_confident_experts_without_a_majority() -> None:
    sure = 9 * torch.nn.functional.one_hot(torch.tensor([[0] * 32, [1] * 32, [2] * 32]), 4).float()
    findings_by_batch = run([tensors(sure)] * 6)
    assert all("confident_disagreement" in each for each in findings_by_batch[3:])
    sure[2] = sure[0]  # two against one
    assert not any("confident_disagreement" in each for each in run([tensors(sure)] * 6))
    unsure = sure / 9
    assert not any("confident_disagreement" in each for each in run([tensors(unsure)] * 6))


def test_drift_of_certainty_is_seen_both_ways_and_ends_when_the_stream_comes_back() -> None:
    home = [tensors(honest(seed=seed)) for seed in range(60)]
    for scale, way in ((1.2, "less certain"), (6.0, "more certain")):
        away = [tensors(honest(seed=100 + seed, scale=scale)) for seed in range(10)]
        findings_by_batch = run([*home, *away, *home])
        assert not any("entropy_drift" in each for each in findings_by_batch[:60])
        first = next(i for i, each in enumerate(findings_by_batch) if "entropy_drift" in each)
        assert 62 <= first <= 66, "no single batch, and no long wait"
        assert "entropy_drift" not in findings_by_batch[-1]
        memory = Memory()
        for each in [*home, *away]:
            memory = remember(memory, each, SETTINGS)
        sentences = [f.sentence for f in look_at_stream(memory, away[-1], SETTINGS) if f.code == "entropy_drift"]
        assert way in sentences[0]
        assert memory.certainty.images < 32 * 66  # the reference stands still


def with_mixture(shares: list[float], seed: int) -> BatchTensors:
    random = np.random.default_rng(seed)
    truth = torch.from_numpy(random.choice(4, 32, p=shares))
    logits = 4 * torch.nn.functional.one_hot(truth, 4).float()
    return tensors(torch.stack([logits, 0.9 * logits, 0.8 * logits]))


def test_drift_of_the_mixture_of_classes() -> None:
    home = [with_mixture([0.4, 0.3, 0.2, 0.1], seed) for seed in range(60)]
    away = [with_mixture([0.1, 0.1, 0.1, 0.7], 100 + seed) for seed in range(10)]
    findings_by_batch = run([*home, *away])
    assert not any("class_drift" in each for each in findings_by_batch[:60])
    assert "class_drift" in findings_by_batch[-1]


@pytest.mark.parametrize("images", [1, 8, 32])
def test_streams_that_do_not_drift_rarely_raise_an_alarm(images: int) -> None:
    """100 streams of 100 batches of independent images, by the same recursion on bare numbers."""
    random, alarms = np.random.default_rng(0), 0
    settings = replace(SETTINGS, watch_experts=False)
    for _ in range(100):
        memory = Memory()
        for values in torch.from_numpy(random.exponential(1.0, (100, images, 4))).float():
            each = BatchTensors(torch.zeros(images, 3, 2, 2), 4 * values, None, None, NAMES, FOUR)
            memory = remember(memory, each, settings)
            findings = codes(look_at_stream(memory, each, settings))
            if findings:
                alarms += 1
                break
    assert alarms <= 2


@given(st.lists(st.integers(0, 50), min_size=2, max_size=6).filter(lambda c: sum(c) > 0))
def test_chi_square_of_equal_shares_is_near_zero(counts: list[int]) -> None:
    assert chi_square(counts, [1000 * each for each in counts]) < 0.1
    assert chi_square(counts, counts) >= 0


def test_chi_square_has_its_mean() -> None:
    random = np.random.default_rng(0)
    shares = [0.5, 0.3, 0.15, 0.05]
    values = [chi_square(random.multinomial(32, shares), random.multinomial(500, shares)) for _ in range(4000)]
    assert np.mean(values) == pytest.approx(3, abs=0.15)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 7))
def test_a_window_is_the_sum_of_its_batches(labels: list[int], cut: int) -> None:
    """However a stream is cut into batches, its counts are the same; and they are read back as they were."""
    logits = 5 * torch.nn.functional.one_hot(torch.tensor(labels), 4).float()
    experts = torch.stack([logits, logits.roll(1, 0)])
    wide = replace(SETTINGS, window=10_000, fewest=1)
    memory = Memory()
    for start in range(0, len(labels), cut):
        part = slice(start, start + cut)
        memory = remember(memory, tensors(experts[:, part], logits[part], smooth_images(len(labels[part]))), wide)
    whole = remember(Memory(), tensors(experts, logits, smooth_images(len(labels))), wide)
    assert memory.newer == whole.newer
    assert parsed(Memory, json.loads(json.dumps(asdict(memory)))) == memory


def test_a_damaged_memory_is_refused() -> None:
    lineup = Lineup(small_pool(), "mean", {})
    state = encoded(StreamState.start(lineup).content)
    for damaged in ({}, {**asdict(Memory()), "certainty": {"other": 1}}, {**asdict(Memory()), "older": None}):
        with pytest.raises(CheckpointError):
            StreamState.from_content({**state, "guards": damaged}, lineup)
    assert HalfWindow().plus(HalfWindow()) == HalfWindow()
    assert Cusum().counted(99.0, SETTINGS).up == 4.0 - SETTINGS.drift_slack


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bad",
    [
        {"fallback": "mean"},
        {"fallback_on": ("entropy_drift",)},
        {"near_uniform": 1.5},
        {"equal_within": -0.1},
        {"window": 10, "fewest": 6},
        {"drift_after": 1},
        {"abstain_below": 2},
        {"drift_limit": math.nan},
        {"watch_experts": "yes"},
    ],
)
def test_bad_settings(bad: dict[str, Any]) -> None:
    with pytest.raises(ms.MergestreamError):
        GuardSettings(**bad)


def test_settings_are_read_back() -> None:
    settings = GuardSettings(fallback="expert:lyon", fallback_on=BATCH_CODES, abstain_below=0.6)
    assert GuardSettings(**json.loads(json.dumps(asdict(settings)))) == settings


# --- through the engine -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool() -> ms.ExpertPool:
    return small_pool()


@pytest.mark.parametrize("choice", ["ensemble", "uniform", "expert:brest"])
def test_the_safe_choice_answers_and_says_so(choice: str, pool: ms.ExpertPool, tmp_path: Path) -> None:
    images, plain = tensor_of(batch(1)), ms.create_method("entropy_adaptive", pool, momentum=0.7)
    method = {
        "ensemble": ms.create_method("ensemble", pool),
        "uniform": ms.create_method("mean", pool),
        "expert:brest": ms.create_method("single_expert", pool, expert="brest"),
    }[choice]
    guards = GuardSettings(fallback=choice, fallback_on=("blank_pictures",), structure=-1, abstain_on=())
    black = [replace_pixels(each, 0) for each in batch(1)]
    with Service(tmp_path, pool, options={"momentum": 0.7}, guards=guards) as service:
        plain.step(images)
        service.engine.answer("lyon", batch(1))
        answer = service.engine.answer("lyon", black)
        step = method.step(torch.zeros_like(images))
        assert answer.probabilities == tuple(map(tuple, torch.softmax(step.logits, dim=-1).tolist()))
        expected = step.encoder_coefficients
        named = None if expected is None else dict(zip(pool.names, expected.tolist(), strict=True))
        assert answer.encoder_coefficients == named
        assert (answer.weights_sha256 is None) == (choice == "ensemble")
        assert answer.head_expert is None
        fallback = answer.findings[-1]
        assert (fallback.code, fallback.numbers) == ("fallback", {"choice": choice, "because": ["blank_pictures"]})
        body = service.steps()[-1]
        assert body["fallback"] == choice
        assert body["state_before"]["method"] == body["state_after"]["method"]  # no evidence moves no average
        again = service.engine.answer("lyon", batch(2))
        coefficients = plain.step(tensor_of(batch(2))).encoder_coefficients.tolist()
        assert again.encoder_coefficients == dict(zip(pool.names, coefficients, strict=True))


def replace_pixels(picture: Any, value: int) -> Any:
    pixels = np.full_like(picture.pixels, value)
    return replace(picture, pixels=pixels, pixels_sha256=sha256_of_pixels(pixels))


def test_equal_experts_fall_back_by_default(tmp_path: Path) -> None:
    expert = make_experts(HandWritten)["lyon"]
    twins = ms.ExpertPool.from_modules({"a": expert, "b": expert}, classes=CLASSES, preprocessing=PREPROCESSING)
    with Service(tmp_path, twins, guards=GuardSettings(abstain_on=())) as service:
        answer = service.engine.answer("lyon", batch(0))
    assert "equal_entropies" in codes(answer.findings)
    assert answer.findings[-1].numbers == {"choice": "ensemble", "because": ["equal_entropies"]}


def test_a_safe_choice_that_is_off_is_replaced_by_the_ensemble(pool: ms.ExpertPool, tmp_path: Path) -> None:
    guards = GuardSettings(fallback="expert:brest", fallback_on=("structureless_pictures",), abstain_on=())
    with Service(tmp_path, pool, guards=guards) as service:
        service.engine.switch("brest", on=False)
        answer = service.engine.answer("lyon", batch(0))
        assert answer.findings[-1].numbers["choice"] == "ensemble"
        assert "switched off" in answer.findings[-1].sentence
    unknown = GuardSettings(fallback="expert:nobody")
    with pytest.raises(UnknownNameError, match="nobody"):
        Service(tmp_path / "other", pool, guards=unknown)


def test_abstention_has_the_source_risk_beside_it(pool: ms.ExpertPool, tmp_path: Path) -> None:
    rows = [[0.5, 0.9, 0.1], [0.7, 0.6, 0.04], [0.9, 0.2, 0.0]]
    known = {"validation": {"accuracy": 0.875, "risk_by_confidence": rows}}
    assert source_risk(known, 0.6) == {"error": 0.125, "coverage": 0.6, "risk": 0.04}
    assert source_risk(known, 0.95) == {"error": 0.125, "coverage": None, "risk": None}
    tables = ([1, 2], [["high", 0.9, 0.1], [0.5, 0.9, 0.1]], [[0.5, 0.9, None]], [[[], 1, 1]], "rows", {"0.5": 1})
    for unknown in ({}, {"validation": None}, {"validation": {"accuracy": None, "risk_by_confidence": None}}):
        assert source_risk(unknown, 0.6) == {"error": None, "coverage": None, "risk": None}
    for table in tables:  # a card with one is not read
        card = {**pool.cards[0].to_json(), "metrics": {"validation": {"risk_by_confidence": table}}}
        with pytest.raises(CheckpointError):
            require_schema("expert", card, "lyon")
    annotated = pool.annotate("lyon", metrics=known)
    guards = GuardSettings(fallback="none", abstain_on=(), abstain_below=0.5)
    with Service(tmp_path, annotated, guards=guards) as service:
        answer = service.engine.answer("lyon", batch(0, 12))
        undecided = [i for i, row in enumerate(answer.probabilities) if max(row) < 0.5]
        assert undecided
        assert [i for i, said in enumerate(answer.predictions) if said is None] == undecided
        assert service.steps()[-1]["abstained"] == undecided
        assert answer.abstention is not None
        assert answer.abstention["pictures"] == len(undecided)
        assert answer.abstention["source_validation"]["lyon"]["risk"] == 0.1
        assert answer.abstention["source_validation"]["brest"]["risk"] is None
        assert "risk_by_confidence" in answer.abstention["note"]


# --- trained experts --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_on_the_phantom_silent_at_home_and_awake_elsewhere(tmp_path: Path) -> None:
    """The defaults on trained experts: home data of other patients, noise, black, a damaged head."""
    from mergestream.bench.demo import FULL, MICRO, NETWORK
    from mergestream.training import train_base, train_expert

    classes = phantom.CLASSES
    train_base(
        tmp_path / "pool" / "base", NETWORK, MICRO, phantom.archive(1000, seed=0), classes,
        replace(FULL.base, steps=300, validate_every=100),
    )  # fmt: skip
    training, home = phantom.load(images=400), phantom.load(images=640, seed=7)
    for name in training.domains[:3]:
        recipe = replace(FULL.expert, steps=200, validate_every=20)
        train_expert(tmp_path / "pool" / name, tmp_path / "pool" / "base", training[name], recipe)
    pool = ms.ExpertPool.load(tmp_path / "pool")

    def finding_codes(pool: ms.ExpertPool, batches: list[Tensor], method: str = "entropy_adaptive") -> list[set[str]]:
        folder = tmp_path / f"service{len(list(tmp_path.iterdir()))}"
        with Service(folder, pool, method, guards=GuardSettings()) as service:
            pictures = [[Picture(image.numpy(), "0" * 64, "0" * 64) for image in images] for images in batches]
            return [set(codes(service.engine.answer("lyon", each).findings)) for each in pictures]

    for name in pool.names:
        at_home = [home[name].batch(np.arange(start, start + 32)) for start in range(0, 640, 32)]
        assert finding_codes(pool, at_home) == [set()] * 20, name
    noise = torch.randint(0, 256, (32, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert finding_codes(pool, [noise])[0] >= {"structureless_pictures"}
    assert finding_codes(pool, [torch.zeros_like(noise)])[0] >= {"blank_pictures"}
    damaged = {name: pool.network([float(k == i) for i in range(3)]) for k, name in enumerate(pool.names)}
    with torch.no_grad():
        for parameter in damaged["brest"].get_submodule("head").parameters():
            parameter.mul_(100)
    broken = ms.ExpertPool.from_modules(damaged, classes=classes, preprocessing=pool.preprocessing)
    assert finding_codes(broken, at_home[:1])[0] >= {"saturated_expert"}
