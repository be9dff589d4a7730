"""A summary of a pool's drift in a few sentences."""

from collections.abc import Sequence

from mergestream.bench.drift.drift_figures import GUIDES, HALF
from mergestream.bench.drift.pool_drift import Drift, LayerDrift


def describe_drift(drift: Drift) -> list[str]:
    """Where experts agree, where they differ, and what averaging them loses."""
    notes = list(drift.notes)
    if not drift.pairs:
        return [f"One expert ({drift.experts[0]}): there is no pair to compare.", *_from_base(drift), *notes]
    opening = f"{len(drift.experts)} experts, {len(drift.pairs)} pairs, {drift.network}, {len(drift.layers)} layers."
    kinds = [_kind(drift, "block", "Encoder blocks"), _kind(drift, "head", "The head")]
    return [opening, *kinds, *_guides(drift), _lost(drift), *_from_base(drift), *notes]


def _kind(drift: Drift, kind: str, subject: str) -> str:
    layers = drift.of_kind(kind)
    angle, ratio = drift.mean(kind, "mean_angle"), drift.mean(kind, "mean_norm_ratio")
    if not layers or angle is None:
        return f"{subject}: no angle, since there is no such layer or it is all zero."
    angles = [layer.whole.mean_angle for layer in layers if layer.whole.mean_angle is not None]
    span = f" (from {min(angles):.1f} to {max(angles):.1f})" if len(angles) > 1 else ""
    return (
        f"{subject}: {angle:.1f} degrees apart on average{span}, norms differ by a factor of {ratio:.2f}; averaging "
        f"loses {drift.mean(kind, 'measured_loss'):.1f} % of the signal there (implied by the angle: "
        f"{drift.mean(kind, 'implied_loss'):.1f} %)."
    )


def _guides(drift: Drift) -> list[str]:
    sentences = []
    for guide in GUIDES:
        above = [layer for layer in drift.layers if (layer.whole.mean_angle or 0) > guide]
        sentences.append(f"Layers more than {guide} degrees apart: {_names(above)}.")
    biases = [layer for layer in drift.layers if layer.biases and (layer.biases.mean_angle or 0) > GUIDES[0]]
    return [*sentences, f"Biases more than {GUIDES[0]} degrees apart: {_names(biases)}."]


def _lost(drift: Drift) -> str:
    layers = [layer for layer in drift.layers if (layer.whole.measured_loss or 0) >= HALF]
    return f"Layers whose mean loses half of its signal or more: {_names(layers)}."


def _from_base(drift: Drift) -> list[str]:
    if not drift.has_base:
        return ["The pool has no base/, so drift from the shared start is not measured."]
    sentences = []
    for kind, subject in (("block", "encoder blocks"), ("head", "the head")):
        bases = [layer.whole.from_base for layer in drift.of_kind(kind) if layer.whole.from_base is not None]
        moved = [norm for base in bases for norm in base.relative_norms if norm is not None]
        angles = [base.mean_angle for base in bases if base.mean_angle is not None]
        apart = f", in directions {_mean(angles):.0f} degrees apart" if angles else ""
        if moved:
            sentences.append(
                f"From the shared start {subject} moved by {100 * _mean(moved):.1f} % of the start's norm{apart}."
            )
    return sentences


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _names(layers: Sequence[LayerDrift], shown: int = 6) -> str:
    names = [layer.name for layer in layers]
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return (", ".join(names[:shown]) + more) or "none"
