"""Guards of one batch: pure functions from its tensors and the settings to findings.

Those that need more than one batch (collapse, disagreement, drift) are in stream_guards.py.
Shapes: K experts in use, B images, C classes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mergestream.serving.guards import findings as codes
from mergestream.serving.guards.findings import Finding, GuardSettings

MOST_NAMED = 20  # images that a sentence or a list of positions names


@dataclass(frozen=True)
class Seen:
    """Tensors of one batch. `experts` [K,B,C] and `entropy` [K] are None if the experts were not run."""

    images: Tensor  # prepared [B,c,H,W]
    logits: Tensor  # the method's own answer [B,C]
    experts: Tensor | None
    entropy: Tensor | None
    names: tuple[str, ...]
    classes: tuple[str, ...]


def near_uniform_entropies(seen: Seen, settings: GuardSettings) -> Finding | None:
    """No expert is surer about this batch than a guess among C classes."""
    if seen.entropy is None or len(seen.classes) < 2:
        return None
    lowest = float(seen.entropy.min()) / math.log(len(seen.classes))
    if lowest < settings.near_uniform:
        return None
    return Finding(
        codes.NEAR_UNIFORM,
        codes.WARNING,
        f"Every expert's entropy is at least {lowest:.0%} of log C: none of them recognises this batch.",
        {"lowest_share_of_log_c": lowest, "limit": settings.near_uniform},
    )


def equal_entropies(seen: Seen, settings: GuardSettings) -> Finding | None:
    """Entropy cannot tell the experts apart, so its coefficients are those of the mean."""
    if seen.entropy is None or len(seen.names) < 2:
        return None
    span, mean = float(seen.entropy.max() - seen.entropy.min()), float(seen.entropy.mean())
    if span > settings.equal_within * mean:
        return None
    return Finding(
        codes.EQUAL,
        codes.WARNING,
        f"The experts' entropies differ by {span:.2g} nats only: they do not say whom to trust.",
        {"span": span, "mean": mean, "limit": settings.equal_within},
    )


def saturated_expert(seen: Seen, settings: GuardSettings) -> Finding | None:
    """An expert so certain that its entropy is 0 takes every coefficient, right or wrong."""
    if seen.experts is None or len(seen.classes) < 2:
        return None
    best = seen.experts.topk(2, dim=-1).values
    shares = ((best[..., 0] - best[..., 1]) >= settings.saturated).float().mean(dim=-1).tolist()  # [K]
    certain = {name: share for name, share in zip(seen.names, shares, strict=True) if share >= 0.5}
    if not certain:
        return None
    return Finding(
        codes.SATURATED,
        codes.ALARM,
        f"{', '.join(certain)}: probabilities of 1 on half of the images or more, which no honest fit gives. Is the "
        f"head's scale damaged? Switch that expert off until its site has looked.",
        {"shares": certain, "limit_nats": settings.saturated},
    )


def blank_pictures(seen: Seen, settings: GuardSettings) -> Finding | None:
    positions = _positions(_ranges(seen.images) <= settings.blank)
    if not positions:
        return None
    return Finding(
        codes.BLANK,
        codes.WARNING,
        f"{len(positions)} of {len(seen.images)} pictures are of one colour: {_listed(positions)}.",
        {"pictures": len(positions), "positions": positions[:MOST_NAMED]},
    )


def structureless_pictures(seen: Seen, settings: GuardSettings) -> Finding | None:
    noise = (neighbour_correlation(seen.images) < settings.structure) & (_ranges(seen.images) > settings.blank)
    positions = _positions(noise)
    if not positions:
        return None
    return Finding(
        codes.STRUCTURELESS,
        codes.WARNING,
        f"{len(positions)} of {len(seen.images)} pictures are noise, pixel by pixel: {_listed(positions)}.",
        {"pictures": len(positions), "positions": positions[:MOST_NAMED], "limit": settings.structure},
    )


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


def _ranges(images: Tensor) -> Tensor:
    """The widest range of a channel, per image [B]."""
    flat = images.float().flatten(2)
    return (flat.amax(dim=-1) - flat.amin(dim=-1)).amax(dim=-1)


def _positions(chosen: Tensor) -> list[int]:
    positions: list[int] = chosen.nonzero().flatten().tolist()
    return positions


def _listed(positions: Sequence[int]) -> str:
    return ", ".join(map(str, positions[:MOST_NAMED])) + (", …" if len(positions) > MOST_NAMED else "")


def abstained(logits: Tensor, settings: GuardSettings) -> list[int]:
    """Positions of images whose highest probability is too low to decide."""
    if settings.abstain_below is None:
        return []
    return _positions(torch.softmax(logits, dim=-1).amax(dim=-1) < settings.abstain_below)


def abstention(logits: Tensor, settings: GuardSettings) -> list[Finding]:
    """The finding about undecided images, for the method and for the fallback."""
    positions = abstained(logits, settings)
    if not positions:
        return []
    sentence = f"{len(positions)} of {len(logits)} pictures are left undecided: {_listed(positions)}."
    numbers = {"pictures": len(positions), "positions": positions[:MOST_NAMED], "limit": settings.abstain_below}
    return [Finding(codes.ABSTAINED, codes.INFO, sentence, numbers)]


BATCH_GUARDS: tuple[Callable[[Seen, GuardSettings], Finding | None], ...] = (
    near_uniform_entropies,
    equal_entropies,
    saturated_expert,
    blank_pictures,
    structureless_pictures,
)


def look_at_batch(seen: Seen, settings: GuardSettings) -> list[Finding]:
    """Run all guards of one batch, in a fixed order."""
    findings = (guard(seen, settings) for guard in BATCH_GUARDS)
    return [finding for finding in findings if finding is not None]
