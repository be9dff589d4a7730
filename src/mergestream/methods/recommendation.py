"""Which method suits a pool: the rule of choice, and the evidence that it may use for the experts at hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mergestream.pool.expert_card import ExpertCard
from mergestream.runtime.json_record import JsonRecord

# The project's recommended rule: `auto` without a recommendation, and the first candidate of `mergestream choose`.
DEFAULT = "merge_and_fit"
FEWEST_SITES = 3  # with fewer, every pseudo-target is answered by one expert alone: the default rule stays
MARGIN = 0.02  # how far below the reference a candidate may be at any pseudo-target
ROUNDING = 1e-9
RULE = (
    "The score of a candidate at a pseudo-target is the mean of accuracy and balanced accuracy over its streams. A "
    "candidate more than 2 points below the reference at any pseudo-target is excluded. Of the others, the first in "
    "order whose mean score is within one standard error of the best one's is chosen; the standard error is that of "
    "their difference over the pseudo-targets. With fewer than three pseudo-targets the first candidate is chosen."
)
METRICS = ("accuracy", "balanced_accuracy", "nll", "auroc")
SCORED = METRICS[:2]
Numbers = dict[str, float | None]


@dataclass(frozen=True)
class SitePart:
    """One site as a pseudo-target: its validation images, answered by experts of other sites only."""

    site: str
    experts: dict[str, str]  # sha-256 of the weights of those who answered, by name
    images: dict[str, int]  # how many, by prevalence
    runs: dict[str, dict[str, Numbers]]  # metrics by method and stream

    def score(self, method: str) -> float:
        values = [numbers[metric] for numbers in self.runs[method].values() for metric in SCORED]
        if not values or not all(isinstance(value, float | int) and 0 <= value <= 1 for value in values):
            raise ValueError(f"'{method}' has no accuracy from 0 to 1 on every stream at '{self.site}'")
        return float(np.mean(values))  # type: ignore[arg-type]


@dataclass(frozen=True)
class ChoiceEvidence(JsonRecord):
    """The candidates, in the order of the rule, measured at pseudo-targets: all of a pool's, or one site's own part."""

    kind: ClassVar[str] = "choice"
    dataset: str
    revision: int  # of the measurement
    candidates: dict[str, int]  # methods with their revisions
    reference: str  # the candidate that no choice may be far below
    parts: tuple[SitePart, ...]

    def __post_init__(self) -> None:
        if self.reference not in self.candidates:
            raise ValueError(f"the reference '{self.reference}' is no candidate")
        for part in self.parts:
            for method in self.candidates:
                part.score(method)

    def parts_for(self, cards: Sequence[ExpertCard]) -> tuple[SitePart, ...]:
        """The parts that say something about exactly these experts: every site once, answered by all others of them.

        So no image and no expert of a site that is left out of the pool counts. Empty where a part is missing.
        """
        chosen = []
        for site in sites_of(cards):
            others = hashes_of([card for card in cards if site_of(card) != site])
            chosen += [part for part in self.parts if part.site == site and part.experts == others][:1]
        return tuple(chosen) if len(chosen) == len(sites_of(cards)) else ()


@dataclass(frozen=True)
class Choice:
    """The method that the rule of choice takes, and the best of the others, with means over pseudo-targets."""

    method: str
    numbers: Numbers
    runner_up: str | None
    runner_up_numbers: Numbers | None
    better_by: float | None  # its score less the runner-up's; negative where it is first in order only
    excluded: list[str]  # candidates far below the reference at some pseudo-target
    pseudo_targets: int
    weak: bool
    rule: str = RULE


def site_of(card: ExpertCard) -> str:
    return card.domain or card.name


def sites_of(cards: Sequence[ExpertCard]) -> list[str]:
    return list(dict.fromkeys(map(site_of, cards)))


def hashes_of(cards: Sequence[ExpertCard]) -> dict[str, str]:
    return {card.name: card.weights_sha256 for card in cards}


def choose(evidence: ChoiceEvidence, parts: Sequence[SitePart]) -> Choice:
    """Apply the rule of choice to these parts."""
    names, weak = list(evidence.candidates), len(parts) < FEWEST_SITES
    scores = {name: np.array([part.score(name) for part in parts]) for name in names}  # [S] at the pseudo-targets
    means = {name: float(scores[name].mean()) for name in names}
    bar = scores[evidence.reference] - MARGIN - ROUNDING
    safe = [name for name in names if bool((scores[name] >= bar).all())]
    best = max(safe, key=means.__getitem__)
    method = names[0] if weak else next(name for name in safe if _is_near(scores[name], scores[best]))
    others = [name for name in safe if name != method]
    second = max(others, key=means.__getitem__) if others else None
    return Choice(
        method,
        {"score": means[method], **_mean_metrics(parts, method)},
        second,
        None if second is None else {"score": means[second], **_mean_metrics(parts, second)},
        None if second is None else means[method] - means[second],
        [name for name in names if name not in safe],
        len(parts),
        weak,
    )


def _is_near(scores: np.ndarray, best: np.ndarray) -> bool:
    """Whether a candidate is within one standard error of the best, paired over the pseudo-targets."""
    gaps = best - scores
    return bool(gaps.mean() <= gaps.std(ddof=1) / np.sqrt(len(gaps)) + ROUNDING)


def _mean_metrics(parts: Sequence[SitePart], name: str) -> Numbers:
    runs = [run for part in parts for run in part.runs[name].values()]
    values = {metric: [value for run in runs if (value := run.get(metric)) is not None] for metric in METRICS}
    return {metric: float(np.mean(own)) if own else None for metric, own in values.items()}
