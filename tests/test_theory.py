"""The paper's theory as checks: the decomposition's identity, planted truths, and missing data."""

import numpy as np
import pytest

from mergestream.bench.claims.claim_finding import FAILS, HOLDS, UNKNOWN
from mergestream.bench.claims.theory_checks import (
    DIVERSE,
    LOCAL,
    PRIORS,
    WEAKER,
    DriftPoint,
    TargetAnswers,
    check_drift,
    check_theory,
    error_parts,
)

N, C = 640, 4
COUNTS = {"a": [70, 60, 20, 10], "b": [70, 50, 40, 10]}


def softmax(logits: np.ndarray) -> np.ndarray:
    exponents = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponents / exponents.sum(axis=-1, keepdims=True)


def planted(seeds: int = 3, weaker: float = 0.5, surer: float = 1.0, shared: float = 0.0) -> TargetAnswers:
    """Experts whose noise is their own or shared, surer of common classes; a mean with weaker logits."""
    random = np.random.RandomState(0)
    labels = random.randint(0, C, N)
    strength = 4 - surer * labels[:, None]  # class 0 is the commonest
    signal = strength * np.eye(C)[labels]
    own, common = random.normal(size=(seeds, 2, N, C)), random.normal(size=(seeds, 1, N, C))
    logits = signal + (1 - shared) * own + shared * common
    merged = softmax(weaker * logits.mean(axis=1))
    return TargetAnswers("t", ("a", "b"), softmax(logits), merged, labels, (32,) * (N // 32))


@pytest.mark.parametrize("seeds", [1, 2, 5])
def test_the_parts_add_up_to_the_error_of_the_averaged_answers(seeds: int) -> None:
    parts = error_parts([planted(seeds), planted(seeds, shared=0.5)])
    total = parts.bias + parts.variance / 2 + 0.5 * parts.covariance
    assert parts.averaged == pytest.approx(total, abs=1e-12)
    assert (parts.variance == pytest.approx(0, abs=1e-12)) == (seeds == 1)


def test_the_covariance_of_two_experts_is_the_one_by_definition() -> None:
    answers = planted()
    deviations = answers.alone - answers.alone.mean(axis=0)
    by_definition = (deviations[:, 0] * deviations[:, 1]).sum(axis=-1).mean()
    assert error_parts([answers]).covariance == pytest.approx(by_definition)
    same = planted(shared=1.0)
    parts = error_parts([same])
    assert parts.covariance == pytest.approx(parts.variance)


def findings(answers: TargetAnswers) -> dict[str, str]:
    return {each.claim: each.verdict for each in check_theory([answers], COUNTS, "here")}


def test_planted_truths_are_seen() -> None:
    assert findings(planted()) == {DIVERSE: HOLDS, LOCAL: HOLDS, WEAKER: HOLDS, PRIORS: HOLDS}
    turned = findings(planted(weaker=1.5, surer=-1.0))
    assert turned[WEAKER] == turned[PRIORS] == FAILS
    assert findings(planted(seeds=1))[DIVERSE] == UNKNOWN


def test_a_class_that_the_target_lacks_is_left_out() -> None:
    whole = planted()
    labels = np.where(whole.labels == 2, 0, whole.labels)
    part = TargetAnswers("t", whole.experts, whole.alone, whole.merged, labels, whole.sizes)
    assert set(findings(part)) == {DIVERSE, LOCAL, WEAKER, PRIORS}


def test_drift_predicts_failure_where_it_does() -> None:
    random = np.random.RandomState(0)
    angles = random.uniform(1, 30, 40)

    def points(failures: np.ndarray) -> list[DriftPoint]:
        return [
            DriftPoint("pacs", "vit", str(i), 0, *pair) for i, pair in enumerate(zip(angles, failures, strict=True))
        ]

    assert check_drift(points(angles / 100 + random.normal(0, 0.02, 40))).verdict == HOLDS
    assert check_drift(points(-angles)).verdict == FAILS
    assert "8 targets or more" in check_drift(points(angles)[:7]).reason
    assert check_drift(points(np.zeros(40))).verdict == UNKNOWN
