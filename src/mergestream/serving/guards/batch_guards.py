"""Guards of one batch: pure functions from its tensors and the settings to findings.

Those that need more than one batch (collapse, disagreement, drift) are in stream_guards.py.
Shapes: K experts in use, B images, C classes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mergestream.serving.guards import findings as codes
from mergestream.serving.guards.findings import Finding, GuardSettings, Severity

RESIZED_NOISE = 0.15  # white noise that is made smaller has a correlation of 0.25
MOST_NAMED = 20  # images that a sentence or a list of positions names
Abstained = dict[int, list[str]]  # undecided images by position, in order: codes of the reasons


@dataclass(frozen=True)
class BatchTensors:
    """Tensors of one batch. `experts` [K,B,C] and `entropy` [K] are None if the experts were not run."""

    images: Tensor  # prepared [B,c,H,W]
    logits: Tensor  # the method's own answer [B,C]
    experts: Tensor | None
    entropy: Tensor | None
    names: tuple[str, ...]
    classes: tuple[str, ...]
    received: Tensor | None = None  # correlation of neighbouring pixels [B] before the images were resized


def near_uniform_entropies(tensors: BatchTensors, settings: GuardSettings) -> Finding | None:
    """No expert is surer about this batch than a guess among C classes."""
    if tensors.entropy is None or len(tensors.classes) < 2:
        return None
    lowest = float(tensors.entropy.min()) / math.log(len(tensors.classes))
    if lowest < settings.near_uniform:
        return None
    return Finding(
        codes.NEAR_UNIFORM,
        codes.WARNING,
        f"Every expert's entropy is at least {lowest:.0%} of log C: none of them recognises this batch.",
        {"lowest_share_of_log_c": lowest, "limit": settings.near_uniform},
    )


def equal_entropies(tensors: BatchTensors, settings: GuardSettings) -> Finding | None:
    """Entropy cannot tell the experts apart, so its coefficients are those of the mean."""
    if tensors.entropy is None or len(tensors.names) < 2:
        return None
    span, mean = float(tensors.entropy.max() - tensors.entropy.min()), float(tensors.entropy.mean())
    if span > settings.equal_within * mean:
        return None
    return Finding(
        codes.EQUAL,
        codes.WARNING,
        f"The experts' entropies differ by {span:.2g} nats only: they do not say whom to trust.",
        {"span": span, "mean": mean, "limit": settings.equal_within},
    )


def saturated_expert(tensors: BatchTensors, settings: GuardSettings) -> Finding | None:
    """An expert so certain that its entropy is 0 takes every coefficient, right or wrong."""
    if tensors.experts is None or len(tensors.classes) < 2:
        return None
    best = tensors.experts.topk(2, dim=-1).values
    shares = ((best[..., 0] - best[..., 1]) >= settings.saturated).float().mean(dim=-1).tolist()  # [K]
    certain = {name: share for name, share in zip(tensors.names, shares, strict=True) if share >= 0.5}
    if not certain:
        return None
    return Finding(
        codes.SATURATED,
        codes.ALARM,
        f"{', '.join(certain)}: probabilities of 1 on half of the images or more, which no honest fit gives. Is the "
        f"head's scale damaged? Switch that expert off until its site has looked.",
        {"shares": certain, "limit_nats": settings.saturated},
    )


def blank(tensors: BatchTensors, settings: GuardSettings) -> Tensor:
    """Which images [B] are of one colour."""
    flat = tensors.images.float().flatten(2)
    ranges = flat.amax(dim=-1) - flat.amin(dim=-1)  # [B,c]
    return ranges.amax(dim=-1) <= settings.blank


def structureless(tensors: BatchTensors, settings: GuardSettings) -> Tensor:
    """Which images [B] are noise, pixel by pixel: as prepared, or as received and nearly so as prepared."""
    prepared, noise = neighbour_correlation(tensors.images), settings.structure
    chosen = prepared < noise
    if tensors.received is not None:
        chosen |= (tensors.received.to(prepared.device) < noise) & (prepared < noise + RESIZED_NOISE)
    return chosen & ~blank(tensors, settings)


# Guards of single images: a test, and what the chosen images are.
IMAGE_GUARDS: dict[str, tuple[Callable[[BatchTensors, GuardSettings], Tensor], str]] = {
    codes.BLANK: (blank, "of one colour"),
    codes.STRUCTURELESS: (structureless, "noise, pixel by pixel"),
}


def odd_images(code: str, tensors: BatchTensors, settings: GuardSettings) -> Finding | None:
    chosen, what = IMAGE_GUARDS[code]
    positions = _positions(chosen(tensors, settings))
    if not positions:
        return None
    limit = {"limit": settings.structure} if code == codes.STRUCTURELESS else {}
    return _about_images(code, codes.WARNING, what, positions, len(tensors.images), limit)


def neighbour_correlation(images: Tensor) -> Tensor:
    """Correlation [B] of pixels with their right and lower neighbours, channels centred; 1 for images of one pixel."""
    if min(images.shape[-2:]) < 2:
        return torch.ones(len(images), device=images.device)
    centred = images.float()
    centred = centred - centred.mean(dim=(-2, -1), keepdim=True)
    across = _correlation(centred[..., 1:], centred[..., :-1])
    down = _correlation(centred[..., 1:, :], centred[..., :-1, :])
    return (across + down) / 2


def _correlation(one: Tensor, other: Tensor) -> Tensor:
    lengths = one.flatten(1).norm(dim=1) * other.flatten(1).norm(dim=1)
    return (one * other).flatten(1).sum(dim=1) / lengths.clamp_min(1e-12)


def _positions(chosen: Tensor) -> list[int]:
    positions: list[int] = chosen.nonzero().flatten().tolist()
    return positions


def _about_images(
    code: str, severity: Severity, what: str, positions: list[int], images: int, numbers: dict[str, Any]
) -> Finding:
    named = positions[:MOST_NAMED]
    listed = ", ".join(map(str, named)) + (", …" if len(positions) > MOST_NAMED else "")
    sentence = f"{len(positions)} of {images} pictures are {what}: {listed}."
    return Finding(code, severity, sentence, {"pictures": len(positions), "positions": named, **numbers})


def abstained(tensors: BatchTensors, logits: Tensor, findings: Sequence[Finding], settings: GuardSettings) -> Abstained:
    """Undecided images, by the findings in `abstain_on` and by their highest probability."""
    reasons: dict[int, list[str]] = {}
    for code in (finding.code for finding in findings if finding.code in settings.abstain_on):
        own = IMAGE_GUARDS[code][0](tensors, settings) if code in IMAGE_GUARDS else torch.ones(len(logits))
        for position in _positions(own):
            reasons.setdefault(position, []).append(code)
    if settings.abstain_below is not None:
        for position in _positions(torch.softmax(logits, dim=-1).amax(dim=-1) < settings.abstain_below):
            reasons.setdefault(position, []).append(codes.LOW_CONFIDENCE)
    return dict(sorted(reasons.items()))


def abstention(undecided: Abstained, images: int, settings: GuardSettings) -> list[Finding]:
    """The finding about undecided images, for the method and for the fallback."""
    if not undecided:
        return []
    because = sorted({code for reasons in undecided.values() for code in reasons})
    numbers = {"limit": settings.abstain_below, "because": because}
    return [_about_images(codes.ABSTAINED, codes.INFO, "left undecided", list(undecided), images, numbers)]


def look_at_batch(tensors: BatchTensors, settings: GuardSettings) -> list[Finding]:
    """Run all guards of one batch, in a fixed order."""
    of_batch = (guard(tensors, settings) for guard in (near_uniform_entropies, equal_entropies, saturated_expert))
    of_images = (odd_images(code, tensors, settings) for code in IMAGE_GUARDS)
    return [finding for finding in (*of_batch, *of_images) if finding is not None]
