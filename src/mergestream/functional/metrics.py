"""Metrics of one run: predicted probabilities against labels."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Report = dict[str, Any]
CONFIDENCES = (0.0, *(round(0.3 + 0.05 * step, 2) for step in range(14)), 0.98, 0.99)


def summarise(probabilities: Tensor, labels: Tensor, classes: Sequence[str]) -> Report:
    """Compute all metrics of probabilities [N,C] (fp32) for labels [N]. An absent class has no recall (None)."""
    from torchmetrics.functional.classification import binary_auroc, multiclass_calibration_error

    count = len(classes)
    matrix = confusion(probabilities.argmax(dim=-1), labels, count)
    recall, specificity = class_rates(matrix)
    truth = torch.nn.functional.one_hot(labels, count).float()
    present = labels.unique().tolist()
    aurocs = [float(binary_auroc(probabilities[:, c], (labels == c).int())) for c in present if len(present) > 1]
    excess = calibration_in_the_large(probabilities, labels)
    report: Report = {
        "accuracy": float(np.trace(matrix) / matrix.sum()),
        "balanced_accuracy": float(np.nanmean(recall)),
        "auroc": float(np.mean(aurocs)) if aurocs else None,  # one class against the rest, mean over classes
        "nll": float(-probabilities.gather(1, labels[:, None]).clamp_min(1e-12).log().mean()),
        "brier": float(((probabilities - truth) ** 2).sum(dim=-1).mean()),
        "aurc": float(risk_coverage(probabilities, labels)[1].mean()),  # area under the risk-coverage curve
        "ece": float(multiclass_calibration_error(probabilities, labels, count, n_bins=15)),
        "calibration_in_the_large": float(np.abs(excess).max()),
        "calibration_by_class": dict(zip(classes, excess.tolist(), strict=True)),
        "recall": {name: _or_none(value) for name, value in zip(classes, recall, strict=True)},
        "specificity": {name: _or_none(value) for name, value in zip(classes, specificity, strict=True)},
        "confusion": matrix.tolist(),
        "images": len(labels),
    }
    if count == 2:  # the second class is the finding
        report["sensitivity"] = report["recall"][classes[1]]
        report["specificity_binary"] = report["specificity"][classes[1]]
    return report


def calibration_in_the_large(probabilities: Tensor, labels: Tensor) -> np.ndarray:
    """Mean predicted probability less observed share of every class [C]: above 0, the class is predicted too much."""
    shares = np.bincount(labels.numpy(), minlength=probabilities.shape[1]) / len(labels)
    return np.asarray(probabilities.double().mean(dim=0).numpy() - shares)


def risk_coverage(probabilities: Tensor, labels: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Coverage [N], and the error among the most confident share of that size [N].

    Images of equal confidence count with their mean error, so that their order does not matter.
    """
    confidence, predictions = probabilities.max(dim=-1)
    _, block, sizes = np.unique(-confidence.numpy(), return_inverse=True, return_counts=True)
    wrong = (predictions != labels).numpy().astype(float)
    errors = np.repeat(np.bincount(block, weights=wrong) / sizes, sizes)
    answered = np.arange(1, len(labels) + 1)
    return answered / len(labels), np.cumsum(errors) / answered


def collapsed_classes(experts: Tensor, model: Tensor, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Find classes that a model no longer predicts, from predictions of the experts [K,N] and the model [N].

    Every expert predicts such a class on at least 5 % of the images, the model on less than a fifth of their mean.
    """
    count = len(classes)
    theirs = np.stack([np.bincount(each, minlength=count) for each in experts.numpy()])  # [K,C]
    return collapsed_counts(theirs, np.bincount(model.numpy(), minlength=count), classes)


def collapsed_counts(theirs: np.ndarray, ours: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
    """The same, from the predictions per class of the experts [K,C] and the model [C]."""
    images = ours.sum()
    # Whole numbers, so that exactly 5 % and exactly a fifth are decided exactly.
    lost = (20 * theirs.min(axis=0) >= images) & (5 * len(theirs) * ours < theirs.sum(axis=0))
    return [
        {"class": classes[int(c)], "share": float(ours[c] / images), "experts": float(theirs[:, c].mean() / images)}
        for c in np.flatnonzero(lost)
    ]


def risk_by_confidence(probabilities: Tensor, labels: Tensor) -> list[list[float]]:
    """Rows [confidence, coverage, risk]: the share of answers at least that confident, and their error."""
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
    """The main metrics per subgroup, such as each scanner, by kind of subgroup."""
    reports: dict[str, dict[str, Report]] = {}
    for kind, values in subgroups.items():
        names = np.asarray(values)
        reports[kind] = {}
        for name in sorted(set(values)):
            mine = torch.from_numpy(names == name)
            report = summarise(probabilities[mine], labels[mine], classes)
            reports[kind][name] = {key: report[key] for key in ("accuracy", "balanced_accuracy", "auroc", "images")}
    return reports


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


def _or_none(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
