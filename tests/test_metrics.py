"""Metrics against scikit-learn and closed forms; intervals against what they promise."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

from mergestream.functional.intervals import mean_with_interval
from mergestream.functional.metrics import (
    batch_confusions,
    class_rates,
    confusion,
    risk_by_confidence,
    score_of,
    summarise,
)

NAMES = ("a", "b", "c", "d")


def sample(count: int = 300, classes: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count,), generator=generator)
    noise = torch.randn(count, classes, generator=generator)
    return torch.softmax(noise + 1.5 * torch.nn.functional.one_hot(labels, classes), -1), labels


@pytest.mark.parametrize("classes", [2, 4])
def test_summary_equals_scikit_learn(classes: int) -> None:
    p, y = sample(classes=classes)
    report = summarise(p, y, NAMES[:classes])
    guess = p.argmax(-1)
    assert report["accuracy"] == pytest.approx(sk.accuracy_score(y, guess))
    assert report["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(y, guess))
    assert report["nll"] == pytest.approx(sk.log_loss(y, p), rel=1e-5)
    one_hot = np.eye(classes)[y]
    assert report["auroc"] == pytest.approx(sk.roc_auc_score(one_hot, p, average="macro"), rel=1e-5)
    assert report["brier"] == pytest.approx(((p.numpy() - one_hot) ** 2).sum(1).mean(), rel=1e-5)
    assert report["confusion"] == sk.confusion_matrix(y, guess).tolist()
    assert list(report["recall"].values()) == pytest.approx(sk.recall_score(y, guess, average=None).tolist())


def test_binary_sensitivity_and_specificity() -> None:
    y = torch.tensor([0, 0, 0, 0, 1, 1])
    guess = torch.tensor([0, 0, 0, 1, 1, 0])
    p = torch.nn.functional.one_hot(guess, 2).float() * 0.8 + 0.1
    report = summarise(p, y, ("normal", "finding"))
    assert report["sensitivity"] == pytest.approx(1 / 2)
    assert report["specificity"]["finding"] == pytest.approx(3 / 4)


def test_ece_of_a_known_case() -> None:
    p = torch.tensor([[0.8, 0.2]] * 10)
    y = torch.tensor([0] * 6 + [1] * 4)  # says 0.8, is right 0.6 of the time
    assert summarise(p, y, ("a", "b"))["ece"] == pytest.approx(0.2, abs=1e-6)


@pytest.mark.parametrize("classes", [2, 4])
def test_calibration_in_the_large_by_numpy(classes: int) -> None:
    p, y = sample(classes=classes)
    report = summarise(p, y, NAMES[:classes])
    expected = [p.numpy()[:, c].astype(float).mean() - np.mean(y.numpy() == c) for c in range(classes)]
    assert list(report["calibration_by_class"].values()) == pytest.approx(expected)
    assert report["calibration_in_the_large"] == pytest.approx(max(map(abs, expected)))
    assert sum(expected) == pytest.approx(0, abs=1e-6)
    sure = torch.tensor([[0.7, 0.3]] * 10)  # says 30 %, and there are 10 % of it
    assert summarise(sure, torch.tensor([0] * 9 + [1]), ("a", "b"))["calibration_by_class"]["b"] == pytest.approx(0.2)


def test_an_absent_class_has_no_recall_and_does_not_pull_the_mean() -> None:
    p = torch.eye(3)[[0, 1, 2, 0]] * 0.9 + 0.03
    y = torch.tensor([0, 1, 1, 0])
    report = summarise(p, y, NAMES[:3])
    assert report["recall"]["c"] is None
    assert report["balanced_accuracy"] == pytest.approx((1 + 0.5) / 2)
    one_class = summarise(p[[0, 3]], torch.tensor([0, 0]), NAMES[:3])
    assert one_class["auroc"] is None
    assert one_class["accuracy"] == 1


def test_batch_confusions_add_up() -> None:
    p, y = sample()
    batches = np.array_split(np.random.RandomState(0).permutation(len(y)), 9)
    matrices = batch_confusions(p.argmax(-1), y, batches, 4)
    assert (matrices.sum(0) == confusion(p.argmax(-1), y, 4)).all()
    assert [m.sum() for m in matrices] == [len(b) for b in batches]
    assert score_of(matrices.sum(0), "accuracy") == pytest.approx(float((p.argmax(-1) == y).float().mean()))
    assert class_rates(matrices.sum(0))[0].shape == (4,)


def test_interval_covers_as_often_as_it_says() -> None:
    """Batches that share their fate: intervals over images would be far too narrow, those over batches are not."""
    random = np.random.RandomState(0)
    hits = 0
    for _ in range(200):
        good = random.binomial(30, random.beta(6, 3, size=25))  # batches of 30, overdispersed, true mean 2/3
        matrices = np.array([[[g, 30 - g], [0, 0]] for g in good])
        _, low, high = mean_with_interval([matrices], "accuracy", resamples=400)
        hits += low <= 2 / 3 <= high
    assert 175 <= hits <= 199


def test_risk_by_confidence_counts_answers_that_are_sure_enough() -> None:
    probabilities = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.45, 0.55]])
    rows = {row[0]: row[1:] for row in risk_by_confidence(probabilities, torch.tensor([0, 1, 1, 1]))}
    assert rows[0.0] == [1.0, 0.25]
    assert rows[0.6] == [0.75, pytest.approx(1 / 3)]
    assert rows[0.8] == [0.5, 0.0]
    assert 0.95 not in rows  # nobody is so sure
