"""How good answers are: metrics of one run, and intervals that resample whole batches."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Report = dict[str, Any]
LEVEL = 0.95
# With fewer batches than this a bootstrap over batches alone is far too narrow; one batch has no width at all.
FEW_BATCHES = 10


CONFIDENCES = (0.0, *(round(0.3 + 0.05 * step, 2) for step in range(14)), 0.98, 0.99)


def summarise(probabilities: Tensor, labels: Tensor, classes: Sequence[str]) -> Report:
    """Metrics of probabilities [N,C] (fp32) against labels [N]. A class that never occurs has no recall (None)."""
    from torchmetrics.functional.classification import binary_auroc, multiclass_calibration_error

    count = len(classes)
    matrix = confusion(probabilities.argmax(dim=-1), labels, count)
    recall, specificity = class_rates(matrix)
    truth = torch.nn.functional.one_hot(labels, count).float()
    present = labels.unique().tolist()
    aurocs = [float(binary_auroc(probabilities[:, c], (labels == c).int())) for c in present if len(present) > 1]
    report: Report = {
        "accuracy": float(np.trace(matrix) / matrix.sum()),
        "balanced_accuracy": float(np.nanmean(recall)),
        "auroc": float(np.mean(aurocs)) if aurocs else None,  # one class against the rest, mean over classes
        "nll": float(-probabilities.gather(1, labels[:, None]).clamp_min(1e-12).log().mean()),
        "brier": float(((probabilities - truth) ** 2).sum(dim=-1).mean()),
        "aurc": float(risk_coverage(probabilities, labels)[1].mean()),  # area under the risk-coverage curve
        "ece": float(multiclass_calibration_error(probabilities, labels, count, n_bins=15)),
        "recall": {name: _or_none(value) for name, value in zip(classes, recall, strict=True)},
        "specificity": {name: _or_none(value) for name, value in zip(classes, specificity, strict=True)},
        "confusion": matrix.tolist(),
        "images": len(labels),
    }
    if count == 2:  # the second class is the finding
        report["sensitivity"] = report["recall"][classes[1]]
        report["specificity_binary"] = report["specificity"][classes[1]]
    return report


def risk_coverage(probabilities: Tensor, labels: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Coverage [N] and the error among the most confident share of that size [N]: what abstention would buy.

    Images of one confidence count with their mean error, so that the curve does not depend on their order.
    """
    confidence, said = probabilities.max(dim=-1)
    _, block, sizes = np.unique(-confidence.numpy(), return_inverse=True, return_counts=True)
    wrong = (said != labels).numpy().astype(float)
    errors = np.repeat(np.bincount(block, weights=wrong) / sizes, sizes)
    answered = np.arange(1, len(labels) + 1)
    return answered / len(labels), np.cumsum(errors) / answered


def collapsed_classes(experts: Tensor, said: Tensor, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Classes that a model has given up: every expert predicts one on 5 % of the images or more, the model on less
    than a fifth of the experts' mean share. experts: predictions [K,N], said: the model's [N].
    """
    count, images = len(classes), len(said)
    theirs = np.stack([np.bincount(each, minlength=count) for each in experts.numpy()])  # [K,C]
    ours = np.bincount(said.numpy(), minlength=count)
    # In whole numbers, so that exactly 5 % and exactly a fifth fall on the right side.
    lost = (20 * theirs.min(axis=0) >= images) & (5 * len(theirs) * ours < theirs.sum(axis=0))
    return [
        {"class": classes[int(c)], "share": float(ours[c] / images), "experts": float(theirs[:, c].mean() / images)}
        for c in np.flatnonzero(lost)
    ]


def risk_by_confidence(probabilities: Tensor, labels: Tensor) -> list[list[float]]:
    """Rows [confidence, coverage, risk]: how many answers are at least so sure, and the error among those."""
    confidence, answers = probabilities.max(dim=-1)
    wrong = answers != labels
    rows = []
    for threshold in CONFIDENCES:
        sure = confidence >= threshold
        if bool(sure.any()):
            rows.append([threshold, float(sure.float().mean()), float(wrong[sure].float().mean())])
    return rows


def summarise_subgroups(
    probabilities: Tensor, labels: Tensor, classes: Sequence[str], subgroups: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Report]]:
    """The main metrics of every part of every partition, such as those of each scanner."""
    found: dict[str, dict[str, Report]] = {}
    for kind, values in subgroups.items():
        names = np.asarray(values)
        found[kind] = {}
        for name in sorted(set(values)):
            mine = torch.from_numpy(names == name)
            report = summarise(probabilities[mine], labels[mine], classes)
            found[kind][name] = {key: report[key] for key in ("accuracy", "balanced_accuracy", "auroc", "images")}
    return found


def confusion(predictions: Tensor, labels: Tensor, count: int) -> np.ndarray:
    """Counts [C,C]: truth by row, prediction by column."""
    flat = labels.cpu().numpy() * count + predictions.cpu().numpy()
    return np.bincount(flat, minlength=count * count).reshape(count, count)


def class_rates(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Recall (sensitivity) and specificity of every class [..., C]; NaN where a class has no (or only) samples."""
    hits = np.diagonal(matrix, axis1=-2, axis2=-1).astype(float)
    positives, predicted = matrix.sum(axis=-1), matrix.sum(axis=-2)
    negatives = matrix.sum(axis=(-2, -1))[..., None] - positives
    with np.errstate(invalid="ignore", divide="ignore"):
        return hits / positives, (negatives - (predicted - hits)) / negatives


def batch_confusions(predictions: Tensor, labels: Tensor, batches: Sequence[np.ndarray], count: int) -> np.ndarray:
    """One confusion matrix per batch [T,C,C]; predictions and labels are indexed by sample."""
    return np.stack([confusion(predictions[batch], labels[batch], count) for batch in map(torch.as_tensor, batches)])


def score_of(matrix: np.ndarray, metric: str) -> np.ndarray:
    """Accuracy or balanced accuracy of confusion matrices [..., C, C] -> [...]."""
    if metric == "accuracy":
        return np.trace(matrix, axis1=-2, axis2=-1) / matrix.sum(axis=(-2, -1))
    if metric == "balanced_accuracy":
        return np.nanmean(class_rates(matrix)[0], axis=-1)
    raise ValueError(metric)


def mean_with_interval(
    runs: Sequence[np.ndarray], metric: str, *, targets: Sequence[str] | None = None, resamples: int = 1000
) -> tuple[float, float, float]:
    """Mean of a metric over targets, with the 95 % percentile interval of a bootstrap over each run's batches.

    runs: per-batch confusion matrices [T,C,C], one array per run. Batches are the unit because one merged model answers
    a whole batch, so its errors are not independent; where a run has few batches, images are resampled inside them as
    well. Runs of one of `targets` share its images, whatever their seed or pool: they are averaged first, and more of
    them do not narrow the interval. Without `targets` every run is a target of its own.
    """
    scores = np.array([score_of(matrices.sum(axis=0), metric) for matrices in runs])
    return target_mean(scores, targets), *percentiles(
        by_target(_resampled(runs, metric, resamples), targets).mean(axis=0)
    )


def target_mean(values: Sequence[float] | np.ndarray, targets: Sequence[str] | None) -> float:
    """The mean over targets of the mean over each one's runs: a target with more runs counts no more."""
    if targets is None:
        return float(np.mean(values))
    _, place = np.unique(np.asarray(targets), return_inverse=True)
    return float(np.mean(np.bincount(place, weights=np.asarray(values)) / np.bincount(place)))


def intervals(
    probabilities: Tensor,
    labels: Tensor,
    classes: Sequence[str],
    batches: Sequence[np.ndarray],
    *,
    resamples: int = 200,
) -> dict[str, tuple[float, float]]:
    """95 % intervals of every number in a summary, by resampling one run's batches (positions in the arrays).

    Classes are named as in 'recall.round'. Where a class is absent from a resample, its numbers are left out of it.
    """
    random = np.random.RandomState(0)
    drawn: dict[str, list[float]] = {}
    for _ in range(resamples):
        picked = np.concatenate([batches[t] for t in random.randint(len(batches), size=len(batches))])
        for name, value in _numbers(summarise(probabilities[picked], labels[picked], classes)).items():
            drawn.setdefault(name, []).append(value)
    return {name: percentiles(np.array(values)) for name, values in drawn.items()}


def _numbers(report: Report) -> dict[str, float]:
    """The numbers of a summary by name, those of classes as 'recall.<class>'; absent ones are left out."""
    flat = {name: value for name, value in report.items() if isinstance(value, float)}
    for group in ("recall", "specificity"):
        flat |= {f"{group}.{name}": value for name, value in report[group].items() if value is not None}
    return flat


def difference_with_interval(
    ours: Sequence[np.ndarray],
    theirs: Sequence[np.ndarray],
    metric: str,
    *,
    targets: Sequence[str] | None = None,
    across: bool = False,
    resamples: int = 1000,
) -> tuple[float, float, float]:
    """Mean difference of paired runs (same target, seed and batches), resampling the same batches of both.

    `across` resamples whole targets too: what another draw of such sites might have shown.
    """
    scores = [np.array([score_of(m.sum(axis=0), metric) for m in runs]) for runs in (ours, theirs)]
    gaps = _resampled(ours, metric, resamples) - _resampled(theirs, metric, resamples)
    resampled = by_target(gaps, targets)
    drawn = _across_targets(resampled) if across else resampled.mean(axis=0)
    return target_mean(scores[0] - scores[1], targets), *percentiles(drawn)


def by_target(resampled: np.ndarray, targets: Sequence[str] | None) -> np.ndarray:
    """Resampled scores of runs [R,resamples] -> of targets [G,resamples].

    A target's runs are taken to err together: their resamples are averaged in sorted order, which leaves the width of
    one run. Targets are independent of each other, so each one's order is shuffled again.
    """
    names, place = np.unique(np.arange(len(resampled)) if targets is None else np.asarray(targets), return_inverse=True)
    random = np.random.RandomState(2)
    groups = []
    for group in range(len(names)):
        mine = resampled[place == group]
        together = np.sort(mine, axis=1).mean(axis=0)
        groups.append(mine[0] if len(mine) == 1 else together[random.permutation(len(together))])
    return np.stack(groups)


def _across_targets(resampled: np.ndarray) -> np.ndarray:
    """Means [resamples] over targets drawn with replacement, each draw with a resample of its own."""
    random = np.random.RandomState(1)
    count, resamples = resampled.shape
    picked = random.randint(count, size=(count, resamples))
    places = np.stack([random.permutation(resamples) for _ in range(count)])
    return resampled[picked, places].mean(axis=0)


def _resampled(runs: Sequence[np.ndarray], metric: str, resamples: int) -> np.ndarray:
    """Scores [R,resamples] under bootstrap resamples of batches; equal numbers of batches give equal resamples."""
    random = np.random.RandomState(0)
    scores = []
    for matrices in runs:
        picks = random.multinomial(len(matrices), np.full(len(matrices), 1 / len(matrices)), size=resamples)
        drawn = (
            np.tensordot(picks, matrices, axes=1) if len(matrices) >= FEW_BATCHES else _images(random, picks, matrices)
        )
        scores.append(score_of(drawn, metric))
    return np.stack(scores)


def _images(random: np.random.RandomState, picks: np.ndarray, matrices: np.ndarray) -> np.ndarray:
    """Confusions [resamples,C,C] when the images inside each picked batch are drawn again, too."""
    classes, sizes = matrices.shape[-1], matrices.sum(axis=(1, 2))
    generator = np.random.default_rng(random.randint(2**31))
    cells = [generator.multinomial(picks[:, t] * size, matrices[t].reshape(-1) / size) for t, size in enumerate(sizes)]
    return np.sum(cells, axis=0).reshape(-1, classes, classes)


def percentiles(values: np.ndarray) -> tuple[float, float]:
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def worst(values: dict[str, float]) -> tuple[str, float]:
    """The target with the lowest value."""
    name = min(values, key=values.__getitem__)
    return name, values[name]


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
