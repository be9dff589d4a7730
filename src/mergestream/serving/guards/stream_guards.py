"""Guards that need more than one batch, and their memory of a stream, which is small and JSON.

The window is two halves; a full newer half replaces the older one. So it holds between half a window and a whole one,
and its memory is counts, whatever the number of images.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch

from mergestream.functional.metrics import collapsed_classes
from mergestream.functional.scores import entropy
from mergestream.runtime.errors import CheckpointError
from mergestream.serving.guards.batch_guards import Seen
from mergestream.serving.guards.drift_alarm import Cusum, level_shift, mixture_shift
from mergestream.serving.guards.findings import (
    ALARM,
    CLASS_DRIFT,
    COLLAPSE,
    DISAGREEMENT,
    ENTROPY_DRIFT,
    WARNING,
    Finding,
    GuardSettings,
)

FEWEST_TO_COMPARE = 16  # images; with fewer, chi-square is far from its distribution


@dataclass(frozen=True)
class Half:
    """Counts of half a window: images, each expert's votes [K][C], the model's own [C], images in dispute."""

    images: int = 0
    votes: tuple[tuple[int, ...], ...] = ()
    said: tuple[int, ...] = ()
    disputed: int = 0

    def plus(self, other: "Half") -> "Half":
        if not self.images or not other.images:
            return other if not self.images else self
        votes = np.add(self.votes, other.votes) if self.votes else np.empty((0, 0), dtype=int)
        said = np.add(self.said, other.said)
        return Half(
            self.images + other.images,
            tuple(map(tuple, votes.tolist())),
            tuple(said.tolist()),
            self.disputed + other.disputed,
        )


@dataclass(frozen=True)
class Memory:
    """What the guards carry from batch to batch of one stream."""

    older: Half = field(default_factory=Half)
    newer: Half = field(default_factory=Half)
    certainty: Cusum = field(default_factory=Cusum)
    mixture: Cusum = field(default_factory=Cusum)
    classes: tuple[int, ...] = ()  # predictions per class in the reference
    pending: tuple[int, ...] = ()  # predictions since, until they are enough to compare

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Memory":
        try:
            older, newer = _half(value["older"]), _half(value["newer"])
            certainty, mixture = Cusum(**value["certainty"]), Cusum(**value["mixture"])
            return cls(older, newer, certainty, mixture, tuple(value["classes"]), tuple(value["pending"]))
        except (KeyError, TypeError) as error:
            raise CheckpointError(f"This is not a memory of the guards: {error!r}.") from error


def _half(value: Mapping[str, Any]) -> Half:
    return Half(value["images"], tuple(map(tuple, value["votes"])), tuple(value["said"]), value["disputed"])


def remember(memory: Memory, seen: Seen, settings: GuardSettings) -> Memory:
    """The memory with one more batch in it."""
    said = _histogram(seen.logits.argmax(dim=-1), len(seen.classes))
    batch = Half(len(seen.logits), _votes(seen), said, _disputed(seen, settings))
    older, newer = memory.older, memory.newer.plus(batch)
    if newer.images >= settings.window // 2:
        older, newer = newer, Half()
    later = replace(memory, older=older, newer=newer, certainty=_certainty(memory, seen, settings))
    pending = tuple(np.add(memory.pending, said).tolist()) if memory.pending else said
    if sum(pending) < FEWEST_TO_COMPARE or len(seen.classes) < 2:
        return replace(later, pending=pending)
    mixture, classes = mixture_shift(memory.mixture, memory.classes, pending, settings)
    return replace(later, mixture=mixture, classes=classes, pending=())


def look_at_stream(memory: Memory, seen: Seen, settings: GuardSettings) -> list[Finding]:
    """Findings about the stream so far."""
    window = memory.older.plus(memory.newer)
    enough = window.images >= settings.fewest and bool(window.votes)
    findings = [_collapse(window, seen.classes), _disagreement(window, settings)] if enough else []
    return [finding for finding in (*findings, *_drift(memory, settings)) if finding is not None]


def _collapse(window: Half, classes: Sequence[str]) -> Finding | None:
    """By the rule of `metrics.collapsed_classes`, which only counts: predictions in any order will do."""
    experts = torch.tensor(np.stack([np.repeat(np.arange(len(own)), own) for own in window.votes]))
    said = torch.tensor(np.repeat(np.arange(len(window.said)), window.said))
    lost = collapsed_classes(experts, said, classes)
    if not lost:
        return None
    named = ", ".join(f"'{each['class']}' ({each['share']:.0%}, experts {each['experts']:.0%})" for each in lost)
    return Finding(
        COLLAPSE,
        ALARM,
        f"In the last {window.images} images the merged model has all but given up {named}.",
        {"images": window.images, "lost": lost},
    )


def _disagreement(window: Half, settings: GuardSettings) -> Finding | None:
    share = window.disputed / window.images
    if len(window.votes) < 2 or share < settings.disagreement:
        return None
    return Finding(
        DISAGREEMENT,
        WARNING,
        f"On {share:.0%} of the last {window.images} images the confident experts contradict each other.",
        {"images": window.images, "share": share, "limit": settings.disagreement},
    )


def _drift(memory: Memory, settings: GuardSettings) -> list[Finding]:
    limit, findings = settings.drift_limit, []
    certainty, mixture = memory.certainty, memory.mixture
    if certainty.standing_at(limit):
        way = "less certain" if certainty.up >= certainty.down else "more certain"
        sentence = f"The merged model has become {way} than on the {certainty.images} images this stream began with."
        numbers = {"up": certainty.up, "down": certainty.down, "reference": certainty.level, "limit": limit}
        findings.append(Finding(ENTROPY_DRIFT, ALARM, sentence, numbers))
    if mixture.standing_at(limit):
        sentence = f"The mixture of classes has moved away from that of the first {mixture.images} images."
        findings.append(Finding(CLASS_DRIFT, ALARM, sentence, {"up": mixture.up, "limit": limit}))
    return findings


def _certainty(memory: Memory, seen: Seen, settings: GuardSettings) -> Cusum:
    return level_shift(memory.certainty, float(entropy(seen.logits[None])[0]), len(seen.logits), settings)


def _histogram(predictions: torch.Tensor, classes: int) -> tuple[int, ...]:
    return tuple(torch.bincount(predictions, minlength=classes).tolist())


def _votes(seen: Seen) -> tuple[tuple[int, ...], ...]:
    if seen.experts is None:
        return ()
    return tuple(_histogram(own, len(seen.classes)) for own in seen.experts.argmax(dim=-1))


def _disputed(seen: Seen, settings: GuardSettings) -> int:
    """Images on which at least two experts are confident and no class has more than half of their votes."""
    if seen.experts is None:
        return 0
    confidence, votes = torch.softmax(seen.experts, dim=-1).max(dim=-1)  # [K,B]
    ballots = torch.nn.functional.one_hot(votes, len(seen.classes)) * (confidence >= settings.sure)[..., None]
    cast = ballots.sum(dim=(0, 2))  # [B]
    return int(((cast >= 2) & (2 * ballots.sum(dim=0).amax(dim=-1) <= cast)).sum())
