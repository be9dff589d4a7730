"""Guards that need more than one batch, and their memory of a stream, which is small and JSON.

The window is two halves; a full newer half replaces the older one. So it holds between half a window and a whole one,
and its memory is counts, whatever the number of images.

Drift is judged by a self-starting CUSUM (Page 1954, Hawkins 1987): a batch is compared with all batches before it, in
units of their deviations. Two series are watched: the mean entropy of the merged model's answers, in both directions,
and the distance (chi-square) of its class histogram from the one so far, upwards. What one batch adds is bounded, so
that no single odd batch raises the alarm; the sum is bounded, so that the alarm ends when the stream returns. While it
lasts the reference is frozen; resetting the stream accepts the new level.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mergestream.functional.metrics import collapsed_counts
from mergestream.functional.scores import entropy
from mergestream.serving.guards import findings as codes
from mergestream.serving.guards.batch_guards import BatchTensors
from mergestream.serving.guards.findings import Finding, GuardSettings

FEWEST_TO_COMPARE = 16  # images; with fewer, chi-square is far from its distribution
MOST_A_BATCH_ADDS = 4.0
Counts = tuple[int, ...]


@dataclass(frozen=True)
class Cusum:
    """One watched series: its level so far, squared deviations, and the two sums."""

    batches: int = 0
    images: int = 0
    level: float = 0.0
    squares: float = 0.0
    up: float = 0.0
    down: float = 0.0

    def exceeds(self, limit: float) -> bool:
        return max(self.up, self.down) > limit

    def counted(self, off: float, settings: GuardSettings) -> "Cusum":
        """off: how many standard deviations the batch lay above the level."""
        bounded = max(-MOST_A_BATCH_ADDS, min(MOST_A_BATCH_ADDS, off))
        most = 2 * settings.drift_limit
        up = min(most, max(0.0, self.up + bounded - settings.drift_slack))
        down = min(most, max(0.0, self.down - bounded - settings.drift_slack))
        return replace(self, up=up, down=down)


def level_shift(series: Cusum, value: float, images: int, settings: GuardSettings) -> Cusum:
    """One more batch of a series of means, such as the answers' mean entropy."""
    if not series.batches:
        return Cusum(1, images, value)
    off = (value - series.level) / math.sqrt(1 / images + 1 / series.images)
    if _settled(series, settings) and series.squares > 0:
        series = series.counted(off / math.sqrt(series.squares / (series.batches - 1)), settings)
    if series.exceeds(settings.drift_limit):
        return series
    total = series.images + images
    level = series.level + (value - series.level) * images / total
    return replace(series, batches=series.batches + 1, images=total, level=level, squares=series.squares + off**2)


def mixture_shift(series: Cusum, reference: Counts, counts: Counts, settings: GuardSettings) -> tuple[Cusum, Counts]:
    """One more batch's histogram [C] against the reference [C], which it joins unless the alarm stands."""
    images, classes = sum(counts), len(counts)
    if not series.batches:
        return Cusum(1, images), counts
    off = chi_square(counts, reference) / (classes - 1)
    if _settled(series, settings) and series.level > 0:
        # Streams that come in runs of one class are always off: their own level is the unit.
        series = series.counted((off / series.level - 1) * math.sqrt((classes - 1) / 2), settings)
        series = replace(series, down=0.0)
    if series.exceeds(settings.drift_limit):
        return series, reference
    level = series.level + (off - series.level) / series.batches
    grown = replace(series, batches=series.batches + 1, images=series.images + images, level=level)
    return grown, _sum(reference, counts)


def _settled(series: Cusum, settings: GuardSettings) -> bool:
    """Whether the reference is good enough to measure by: batches may be single images."""
    return series.batches >= settings.drift_after and series.images >= settings.fewest


def _sum(one: Counts, other: Counts) -> Counts:
    return tuple(np.add(one, other).tolist())


def chi_square(counts: Sequence[int], reference: Sequence[int]) -> float:
    """How far counts [C] lie from those expected by a reference [C]; about C - 1 where both are of one source."""
    now, before = np.asarray(counts, dtype=float), np.asarray(reference, dtype=float)
    expected = (before + 0.5) / (before.sum() + 0.5 * len(before))
    spread = now.sum() * (1 + now.sum() / before.sum())
    return float((((now - now.sum() * expected) ** 2) / (spread * expected)).sum())


@dataclass(frozen=True)
class HalfWindow:
    """Counts of half a window: images, each expert's votes [K][C], the model's own [C], images in dispute."""

    images: int = 0
    votes: tuple[Counts, ...] = ()
    predicted: Counts = ()
    disputed: int = 0

    def plus(self, other: "HalfWindow") -> "HalfWindow":
        if not self.images or not other.images:
            return other if not self.images else self
        votes = tuple(map(_sum, self.votes, other.votes))
        predicted, disputed = _sum(self.predicted, other.predicted), self.disputed + other.disputed
        return HalfWindow(self.images + other.images, votes, predicted, disputed)


@dataclass(frozen=True)
class Memory:
    """What the guards carry from batch to batch of one stream."""

    older: HalfWindow = field(default_factory=HalfWindow)
    newer: HalfWindow = field(default_factory=HalfWindow)
    certainty: Cusum = field(default_factory=Cusum)
    mixture: Cusum = field(default_factory=Cusum)
    classes: Counts = ()  # predictions per class in the reference
    pending: Counts = ()  # predictions since, until they are enough to compare

    def to_json(self) -> dict[str, Any]:
        parts = {name: vars(getattr(self, name)) for name in ("older", "newer", "certainty", "mixture")}
        return {**vars(self), **parts}


def remember(memory: Memory, tensors: BatchTensors, settings: GuardSettings) -> Memory:
    """The memory with one more batch in it."""
    counts = _histogram(tensors.logits.argmax(dim=-1).cpu().numpy(), len(tensors.classes))
    chosen = () if tensors.experts is None else tensors.experts.argmax(dim=-1).cpu().numpy()  # [K,B]
    votes = tuple(_histogram(own, len(tensors.classes)) for own in chosen)
    batch = HalfWindow(len(tensors.logits), votes, counts, _disputed(tensors, settings))
    older, newer = memory.older, memory.newer.plus(batch)
    if newer.images >= settings.window // 2:
        older, newer = newer, HalfWindow()
    certainty = level_shift(memory.certainty, float(entropy(tensors.logits[None])[0]), len(tensors.logits), settings)
    later = replace(memory, older=older, newer=newer, certainty=certainty)
    pending = _sum(memory.pending, counts) if memory.pending else counts
    if sum(pending) < FEWEST_TO_COMPARE or len(tensors.classes) < 2:
        return replace(later, pending=pending)
    mixture, classes = mixture_shift(memory.mixture, memory.classes, pending, settings)
    return replace(later, mixture=mixture, classes=classes, pending=())


def look_at_stream(memory: Memory, tensors: BatchTensors, settings: GuardSettings) -> list[Finding]:
    """Findings about the stream so far."""
    window = memory.older.plus(memory.newer)
    enough = window.images >= settings.fewest and bool(window.votes)
    findings = [_collapse(window, tensors.classes), _disagreement(window, settings)] if enough else []
    return [finding for finding in (*findings, *_drift(memory, settings)) if finding is not None]


def _collapse(window: HalfWindow, classes: Sequence[str]) -> Finding | None:
    lost = collapsed_counts(np.array(window.votes), np.array(window.predicted), classes)
    if not lost:
        return None
    named = ", ".join(f"'{each['class']}' ({each['share']:.0%}, experts {each['experts']:.0%})" for each in lost)
    return Finding(
        codes.COLLAPSE,
        codes.ALARM,
        f"In the last {window.images} images the merged model has all but given up {named}.",
        {"images": window.images, "lost": lost},
    )


def _disagreement(window: HalfWindow, settings: GuardSettings) -> Finding | None:
    share = window.disputed / window.images
    if len(window.votes) < 2 or share < settings.disagreement:
        return None
    return Finding(
        codes.DISAGREEMENT,
        codes.WARNING,
        f"On {share:.0%} of the last {window.images} images the confident experts contradict each other.",
        {"images": window.images, "share": share, "limit": settings.disagreement},
    )


def _drift(memory: Memory, settings: GuardSettings) -> list[Finding]:
    limit, findings = settings.drift_limit, []
    certainty, mixture = memory.certainty, memory.mixture
    if certainty.exceeds(limit):
        way = "less certain" if certainty.up >= certainty.down else "more certain"
        sentence = f"The merged model has become {way} than on the {certainty.images} images this stream began with."
        numbers = {"up": certainty.up, "down": certainty.down, "reference": certainty.level, "limit": limit}
        findings.append(Finding(codes.ENTROPY_DRIFT, codes.ALARM, sentence, numbers))
    if mixture.exceeds(limit):
        sentence = f"The mixture of classes has moved away from that of the first {mixture.images} images."
        findings.append(Finding(codes.CLASS_DRIFT, codes.ALARM, sentence, {"up": mixture.up, "limit": limit}))
    return findings


def _histogram(predictions: np.ndarray, classes: int) -> Counts:
    return tuple(np.bincount(predictions, minlength=classes).tolist())


def _disputed(tensors: BatchTensors, settings: GuardSettings) -> int:
    """Images on which at least two experts are confident and no class has more than half of their votes."""
    if tensors.experts is None:
        return 0
    confidence, votes = (each.cpu().numpy() for each in torch.softmax(tensors.experts, dim=-1).max(dim=-1))  # [K,B]
    ballots = (votes[..., None] == np.arange(len(tensors.classes))) & (confidence >= settings.sure)[..., None]
    per_class = ballots.sum(axis=0)  # [B,C]
    cast = per_class.sum(axis=-1)
    return int(((cast >= 2) & (2 * per_class.max(axis=-1) <= cast)).sum())
