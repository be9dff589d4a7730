"""Estimated quality without labels: against simulations whose truth is known, and in the service."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import engines
import mergestream as ms
from mergestream.functional import conformal, label_free
from mergestream.runtime.errors import InputError, MergestreamError, PoolError
from mergestream.runtime.json_record import parsed
from mergestream.serving.audit.replay import compare
from mergestream.serving.engine.recomputation import recompute_step
from mergestream.serving.options import ServeOptions
from mergestream.serving.quality.declared_prevalence import parse_prevalence, shares_of
from mergestream.serving.quality.quality_gauges import QualityGauges
from mergestream.serving.quality.quality_monitor import QualitySettings
from mergestream.serving.quality.step_sums import MOST_CHUNKS, StepSums, total_of, with_step

HOME, ABROAD = np.array([0.45, 0.45, 0.1]), np.array([0.1, 0.1, 0.8])


def simulated(random: np.random.Generator, mix: np.ndarray, images: int) -> tuple[np.ndarray, np.ndarray]:
    """Calibrated answers of a classifier at home [N,C] and labels [N]; `mix`: the classes' shares where images are."""
    labels = random.choice(3, size=images, p=mix)
    centres = np.array([[0.0, 1.6], [1.4, -0.8], [0.9, 0.3]])  # the third class is hard to tell
    points = centres[labels] + random.normal(size=(images, 2))
    joint = HOME * np.exp(-0.5 * np.square(points[:, None] - centres).sum(axis=2))
    return joint / joint.sum(axis=1, keepdims=True), labels


def sums(probabilities: np.ndarray, threshold: float | None = None) -> StepSums:
    return StepSums.of(probabilities, threshold, None)


def test_expected_accuracy_of_calibrated_answers_lies_in_its_interval() -> None:
    random, inside = np.random.default_rng(0), 0
    for _ in range(400):
        probabilities, labels = simulated(random, HOME, 200)
        total = sums(probabilities)
        estimate = label_free.expected_accuracy(total.confidence, total.variance, total.images)
        inside += estimate.low <= (probabilities.argmax(axis=1) == labels).mean() <= estimate.high
    assert 0.93 * 400 <= inside <= 0.995 * 400  # 95 %, and half an image more on both sides


def test_overconfident_answers_are_overestimated_as_the_page_says() -> None:
    probabilities, labels = simulated(np.random.default_rng(1), HOME, 4000)
    sharper = probabilities**3 / (probabilities**3).sum(axis=1, keepdims=True)
    total = sums(sharper)
    estimate = label_free.expected_accuracy(total.confidence, total.variance, total.images)
    assert estimate.low > (probabilities.argmax(axis=1) == labels).mean() + 0.05


def test_the_threshold_reproduces_accuracy_at_home_and_follows_a_harder_stream() -> None:
    random = np.random.default_rng(2)
    at_home, labels = simulated(random, HOME, 4000)
    threshold = label_free.accuracy_threshold(at_home.max(axis=1), at_home.argmax(axis=1) == labels)
    assert (at_home.max(axis=1) >= threshold).mean() == (at_home.argmax(axis=1) == labels).mean()
    abroad, labels = simulated(random, ABROAD, 4000)
    estimate = label_free.thresholded_accuracy(int((abroad.max(axis=1) >= threshold).sum()), 4000)
    truth, before = (abroad.argmax(axis=1) == labels).mean(), (at_home.max(axis=1) >= threshold).mean()
    assert truth < estimate.value < before  # it sees that the stream is harder, and not how much
    assert label_free.accuracy_threshold(np.array([0.6, 0.9]), np.array([True, True])) == 0.6
    assert label_free.accuracy_threshold(np.array([0.6, 0.9]), np.array([False, False])) > 0.9


@given(st.integers(0, 500), st.integers(1, 500))
def test_intervals_hold_their_estimate_and_stay_between_0_and_1(count: int, total: int) -> None:
    count = min(count, total)
    for estimate in (
        label_free.thresholded_accuracy(count, total),
        label_free.expected_accuracy(count, 0.25 * total, total),
        label_free.mean_probability(count, count, total),
    ):
        assert 0 <= estimate.low <= estimate.value + 1e-12
        assert estimate.value - 1e-12 <= estimate.high <= 1


def test_a_prevalence_is_far_only_where_it_is_sure_and_matters() -> None:
    assert label_free.is_far(0.2, 0.02, 500)
    assert label_free.is_far(0.0, 0.02, 5000)
    assert not label_free.is_far(0.2, 0.02, 5)  # one image of five
    assert not label_free.is_far(0.021, 0.02, 10**6)  # sure, but it does not matter
    random, far = np.random.default_rng(3), 0
    for _ in range(300):
        probabilities, _ = simulated(random, HOME, 300)
        far += any(label_free.is_far(*pair, 300) for pair in zip(probabilities.mean(axis=0), HOME, strict=True))
    assert far == 0


def coverage(mix: np.ndarray | None, random: np.random.Generator, share: float = 0.9) -> float:
    """How often the set holds the true class abroad, by limits from 150 labelled images at home."""
    held, repeats = [], 60
    for _ in range(repeats):
        probabilities, labels = simulated(random, HOME, 150)
        card = label_free.validation_summary(probabilities, labels, "abc")
        counts = list(card["images"].values())
        chosen = np.array(counts) / 150 if mix is None else mix
        limits = conformal.score_limits(list(card["scores"].values()), counts, chosen.tolist(), share)
        abroad, truth = simulated(random, ABROAD, 400)
        # The set alone, without the most probable class, which would only help.
        held.append((1 - abroad[np.arange(400), truth] <= np.array(limits)[truth]).mean())
    return float(np.mean(held))


def test_prediction_sets_hold_the_true_class_under_label_shift_and_only_with_the_correction() -> None:
    random = np.random.default_rng(4)
    assert coverage(ABROAD, random) >= 0.9 - 0.01
    assert coverage(None, random) < 0.85  # the same limits without the correction


@given(st.integers(0, 2**32 - 1), st.floats(0.5, 0.99))
def test_limits_follow_the_definition_of_weighted_quantiles(seed: int, least_share: float) -> None:
    random = np.random.default_rng(seed)
    counts = random.integers(0, 12, 3)
    counts[random.integers(3)] += 1
    scores, mix = [random.random(count) for count in counts], random.dirichlet(np.ones(3))
    limits = conformal.score_limits([own.tolist() for own in scores], counts.tolist(), mix.tolist(), least_share)
    for label, limit in enumerate(limits):
        if not counts[label]:
            assert limit == math.inf
            continue
        ratios = [share * counts.sum() / count if count else 0 for share, count in zip(mix, counts, strict=True)]
        # Podkopaev and Ramdas, equation by equation; a class without images counts as infinitely far.
        points = [(score, ratios[c]) for c in range(3) for score in scores[c]]
        points += [(math.inf, share * counts.sum()) for share, count in zip(mix, counts, strict=True) if not count]
        points += [(math.inf, ratios[label])]
        total, reached, expected = sum(weight for _, weight in points), 0.0, math.inf
        for score, weight in sorted(points):
            reached += weight
            if reached >= least_share * total * (1 - 1e-9):
                expected = score
                break
        assert limit == expected


def test_a_grid_never_lies_below_the_scores_it_stands_for() -> None:
    scores = np.random.default_rng(5).random(1234)
    grid = conformal.score_grid(scores)
    assert len(grid) == conformal.MOST_SCORES
    for level in np.linspace(0.01, 1, 57):
        index = math.ceil(level * len(grid) - 1e-9) - 1
        assert np.quantile(scores, level, method="inverted_cdf") <= grid[index] + 1e-12
    assert conformal.score_grid(np.array([0.2, 0.1])) == [0.1, 0.2]
    assert conformal.score_grid(np.array([])) == []
    assert conformal.prediction_sets(np.array([[0.4, 0.6]]), [0.0, 0.0]).tolist() == [[False, True]]


def test_a_window_sums_single_images_like_batches_and_has_an_end() -> None:
    probabilities, _ = simulated(np.random.default_rng(6), HOME, 64)
    singles, batches = (), ()
    for row in probabilities:
        singles = with_step(singles, sums(row[None], 0.5))
    for half in np.split(probabilities, 2):
        batches = with_step(batches, sums(half, 0.5))
    assert len(singles) == len(batches) == 2
    one, other = total_of(singles), total_of(batches)
    assert one is not None
    assert other is not None
    assert one.sure == other.sure
    assert one.probability == pytest.approx(other.probability)
    assert parsed(StepSums, json.loads(json.dumps(asdict(one)))) == one
    for _ in range(MOST_CHUNKS + 5):
        batches = with_step(batches, sums(probabilities, None))
    assert len(batches) == MOST_CHUNKS
    assert total_of(()) is None


def test_a_declared_prevalence_is_read_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    assert parse_prevalence("melanoma=0.02, nevus=0.98") == {"melanoma": 0.02, "nevus": 0.98}
    file = tmp_path / "site.yaml"
    file.write_text("melanoma: 0.02\n")
    declared = parse_prevalence(str(file))
    assert declared is not None
    assert shares_of(declared, ["nevus", "melanoma"]) == pytest.approx((0.98, 0.02))
    for text, sentence in (
        ("melanoma", "write name=value"),
        ("melanoma=2", "between 0 and 1"),
        ("x.yaml", "cannot be"),
    ):
        with pytest.raises(InputError, match=sentence):
            parse_prevalence(text)
    for wrong, sentence in (
        ({"nevus": 0.3}, "leaves out melanoma, scar"), ({"nevus": 0.9, "scar": 0.3}, "add up to 1.2"),
        ({"nevos": 1.0}, "nevus"),
    ):  # fmt: skip
        with pytest.raises(MergestreamError, match=sentence):
            shares_of(wrong, ["nevus", "melanoma", "scar"])
    options = ServeOptions(Path("pool"), declared_prevalence="site.yaml").absolute()  # for replicas elsewhere
    assert options.declared_prevalence == str(Path("site.yaml").absolute())
    file.write_text("- 1")
    with pytest.raises(InputError, match="must map classes to shares"):
        parse_prevalence(str(file))
    file.write_text("melanoma: 0.02\n" + "#" * 2**16 + "\nscar: 0.3\n")  # a part of it would be other shares
    with pytest.raises(InputError, match="cannot be read: it has more than 65,536 bytes"):
        parse_prevalence(str(file))


def with_cards(pool: ms.ExpertPool, temperature: float = 2.0) -> ms.ExpertPool:
    """The pool with label-free numbers in its cards."""
    images = dict.fromkeys(pool.classes, 20)
    scores = {name: np.linspace(0.3, 0.95, 20).round(4).tolist() for name in pool.classes}
    card = {"confidence_threshold": 0.4, "images": images, "scores": scores}
    for name in pool.names:
        pool = pool.annotate(name, metrics={"validation": {"label_free": card}}, temperature=temperature)
    return pool


def declared_for(pool: ms.ExpertPool) -> dict[str, float]:
    return dict(zip(pool.classes, [0.92, *[0.02] * (len(pool.classes) - 1)], strict=True))


def test_the_service_estimates_survive_a_restart_and_replay_is_bit_exact(tmp_path: Path) -> None:
    pool = with_cards(engines.small_pool())
    settings = QualitySettings(declared_for(pool), 0.9)
    with engines.Service(tmp_path, pool, quality=settings) as service:
        answers = [service.engine.answer("ward", engines.batch(number, 16)) for number in range(8)]
        single = service.engine.answer("ward", engines.batch(9, 3), single=True)
        (before,) = service.engine.streams()
    probabilities = np.concatenate([np.array(answer.probabilities) for answer in (*answers, single)])
    cooler = probabilities**0.5 / (probabilities**0.5).sum(axis=1, keepdims=True)  # the cards' temperature is 2
    quality: dict[str, Any] = before["quality"].model_dump()
    assert quality["images"] == 131
    assert quality["accuracy"]["by_confidence"]["value"] == pytest.approx(cooler.max(axis=1).mean(), abs=1e-5)
    assert quality["accuracy"]["by_threshold"]["value"] == pytest.approx((cooler.max(axis=1) >= 0.4).mean())
    assert [each["value"] for each in quality["classes"]] == pytest.approx(cooler.mean(axis=0), abs=1e-5)
    assert quality["classes"][0]["far"]  # noise is not 92 % of the first class
    assert all(len(sets) == len(answer.predictions) for answer in answers if (sets := answer.prediction_sets))
    assert all(top in chosen for top, chosen in zip(answers[0].predictions, answers[0].prediction_sets, strict=True))
    assert [len(sets) > 0 for sets in single.prediction_sets or ()] == [True] * 3
    assert answers[0].of(2).prediction_sets == answers[0].prediction_sets[2:3]
    assert quality["prediction_sets"]["prevalence"] == "declared"
    for number in (0, 5):
        body = service.steps()[number]
        assert compare(body, recompute_step(body, engines.batch(number, 16), pool)) == ()
    with engines.Service(tmp_path, pool, quality=settings) as again:
        assert again.engine.streams()[0]["quality"].model_dump() == quality
        names = {sample.name for metric in QualityGauges(again.engine.streams).collect() for sample in metric.samples}
        assert len(names) == 5
        again.engine.reset("ward")
        assert again.engine.streams()[0]["quality"] is None
        assert not [s for metric in QualityGauges(again.engine.streams).collect() for s in metric.samples]


def test_without_declaration_or_cards_there_is_less_and_sets_are_refused(tmp_path: Path) -> None:
    pool = engines.small_pool()
    with pytest.raises(PoolError, match="--prediction-sets needs the scores"):
        engines.Service(tmp_path / "a", pool, quality=QualitySettings(coverage=0.9))
    with pytest.raises(InputError, match="prediction_sets"):
        QualitySettings(coverage=1.5)
    with engines.Service(tmp_path / "b", pool) as service:
        answer = service.engine.answer("ward", engines.batch(0))
        quality = service.engine.streams()[0]["quality"].model_dump()
    assert answer.prediction_sets is None
    assert "prediction_sets" not in service.steps()[0]
    assert quality["accuracy"]["by_threshold"] is None
    assert {each["declared"] for each in quality["classes"]} == {None}
    # Estimated shares of the classes: at the start those at home, later those of the stream.
    with engines.Service(tmp_path / "c", with_cards(pool), quality=QualitySettings(coverage=0.8)) as service:
        assert service.engine.answer("ward", engines.batch(0)).prediction_sets is not None
        assert service.engine.streams()[0]["quality"].prediction_sets.prevalence == "estimated"


def test_calibrated_methods_are_not_calibrated_twice(tmp_path: Path) -> None:
    pool = with_cards(engines.small_pool(), temperature=3.0)
    with engines.Service(tmp_path, pool, "merge_and_fit") as service:
        answer = service.engine.answer("ward", engines.batch(0, 16))
        accuracy = service.engine.streams()[0]["quality"].accuracy
    assert accuracy.by_threshold is None  # the cards' thresholds are of one model, not of averaged answers
    estimate = accuracy.by_confidence.value
    assert estimate == pytest.approx(np.array(answer.probabilities).max(axis=1).mean(), abs=1e-5)
