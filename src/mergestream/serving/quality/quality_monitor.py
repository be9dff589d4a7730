"""The estimates of a stream's quality: measured at every step, summed up for dashboard and metrics."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from mergestream.functional import conformal, label_free
from mergestream.functional.label_free import LabelFreeEstimate
from mergestream.methods.card_values import resolve_temperature
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import PoolError
from mergestream.runtime.option_checks import number
from mergestream.serving.engine.lineup import Lineup
from mergestream.serving.http import schemas
from mergestream.serving.quality.declared_prevalence import shares_of
from mergestream.serving.quality.step_sums import StepSums, Window, total_of

CALIBRATED = re.compile(r"\bmerge_(and_fit|once)\b")  # their answers are made of calibrated ones
HOME_IMAGES = 50  # that the mix at home counts for in the estimated one
BY_CONFIDENCE = (
    "Assumes that confidence is calibrated here as it was at the experts' sites: under a domain shift it is often "
    "too high, and this number with it."
)
BY_THRESHOLD = (
    "Assumes that the share of answers above a confidence tells the accuracy here as on the experts' own validation "
    "images."
)
BY_PREVALENCE = (
    "Assumes that the declared shares hold for the images sent here, image by image; the interval takes images as "
    "independent."
)
SETS = (
    "Assumes that images of one class look here as at the experts' sites, that the answers are as good as the experts' "
    "own there, and that the class shares used are right."
)


@dataclass(frozen=True)
class QualitySettings:
    """declared: shares by class. coverage: the chance of a prediction set to hold the true class; None: no sets."""

    declared: dict[str, float] | None = None
    coverage: float | None = None

    def __post_init__(self) -> None:
        if self.coverage is not None:
            number("prediction_sets", self.coverage, low=0.5, below=1)


class CardValues(NamedTuple):
    """What the cards of the experts in use hold for the estimates."""

    temperatures: np.ndarray  # [K]
    thresholds: np.ndarray | None  # [K]
    scores: list[list[float]] | None  # by class
    counts: list[int]  # [C]


class QualityMonitor:
    """For any number of threads. The declared classes and the cards are checked against the pool at the start."""

    def __init__(self, settings: QualitySettings, pool: ExpertPool) -> None:
        self.coverage = settings.coverage
        self.declared = None if settings.declared is None else shares_of(settings.declared, pool.classes)
        self._values: tuple[Lineup | None, CardValues] = (None, self.require(pool))

    def require(self, pool: ExpertPool) -> CardValues:
        """What the pool's cards hold; refused if prediction sets need more."""
        values = _card_values(pool)
        lacking = [card.name for card in pool.cards if _summary(card) is None]
        if self.coverage is not None and lacking:
            raise PoolError(
                f"--prediction-sets needs the scores of every expert's validation images, and the cards of "
                f"{', '.join(lacking)} have none: they were trained by an earlier version or elsewhere."
            )
        return values

    def measure(
        self, lineup: Lineup, numbers: dict[str, Any], logits: torch.Tensor, window: Window
    ) -> tuple[StepSums, list[list[int]] | None]:
        """The sums of a step with answers [B,C], and its prediction sets as numbers of classes."""
        values, shares = self._of(lineup), _shares(lineup, numbers)
        rule = numbers["fallback"] or f"{lineup.method} {lineup.options}"
        temperature = 1.0 if CALIBRATED.search(rule) else float(shares @ values.temperatures)
        probabilities = torch.softmax(logits.double() / temperature, dim=-1).numpy()
        # Averaged answers are less sure than those of one model, which the thresholds are of.
        one_model = numbers["encoder_coefficients"] is not None and numbers["head_coefficients"] is not None
        threshold = float(shares @ values.thresholds) if values.thresholds is not None and one_model else None
        sets = None
        if self.coverage is not None and values.scores is not None:
            mix = self.declared or _estimated_mix(values.counts, total_of(window))
            limits = conformal.score_limits(values.scores, values.counts, mix, self.coverage)
            sets = conformal.prediction_sets(probabilities, limits)
        sums = StepSums.of(probabilities, threshold, sets)
        return sums, None if sets is None else [np.flatnonzero(row).tolist() for row in sets]

    def summary(self, stream: str, window: Window, classes: Sequence[str]) -> schemas.StreamQuality | None:
        """The estimates of a stream; None before its first step."""
        total = total_of(window)
        if total is None or len(total.probability) != len(classes):
            return None
        confident = label_free.expected_accuracy(total.confidence, total.variance, total.images)
        accuracy = schemas.EstimatedAccuracy(by_confidence=_stated(confident, BY_CONFIDENCE), by_threshold=None)
        if total.sure is not None:
            by_threshold = label_free.thresholded_accuracy(total.sure, total.images)
            accuracy.by_threshold = _stated(by_threshold, BY_THRESHOLD)
        sets = None
        if self.coverage is not None and total.set_classes is not None:
            mix, size = "estimated" if self.declared is None else "declared", total.set_classes / total.images
            sets = schemas.PredictionSets(coverage=self.coverage, mean_size=size, prevalence=mix, assumes=SETS)
        return schemas.StreamQuality(
            stream=stream,
            images=total.images,
            accuracy=accuracy,
            classes=[self._class(total, place, name) for place, name in enumerate(classes)],
            prevalence_assumes=None if self.declared is None else BY_PREVALENCE,
            prediction_sets=sets,
        )

    def _class(self, total: StepSums, place: int, name: str) -> schemas.ClassPrevalence:
        mean = label_free.mean_probability(total.probability[place], total.squares[place], total.images)
        declared = None if self.declared is None else self.declared[place]
        far = declared is not None and label_free.is_far(mean.value, declared, total.images)
        return schemas.ClassPrevalence(name=name, **mean._asdict(), declared=declared, far=far)

    def _of(self, lineup: Lineup) -> CardValues:
        cached_lineup, values = self._values
        if cached_lineup is not lineup:
            values = _card_values(lineup.active)
            self._values = (lineup, values)
        return values


def _stated(estimate: LabelFreeEstimate, assumption: str) -> schemas.QualityEstimate:
    return schemas.QualityEstimate(**estimate._asdict(), assumes=assumption)


def _summary(card: Any) -> Any:
    return (card.metrics.get("validation") or {}).get("label_free")


def _card_values(pool: ExpertPool) -> CardValues:
    summaries = [_summary(card) for card in pool.cards]
    temperatures = resolve_temperature("card", pool).double().cpu().numpy()
    if any(each is None for each in summaries):
        return CardValues(temperatures, None, None, [])
    thresholds = np.array([each["confidence_threshold"] for each in summaries])
    scores, counts = [], []
    for name in pool.classes:
        # An expert's grid stands for its images: one value per image, or parts of equal size.
        own = [(each["images"].get(name, 0), each["scores"].get(name, [])) for each in summaries]
        parts = [np.repeat(grid, max(1, round(count / len(grid)))) for count, grid in own if count and grid]
        scores.append(np.concatenate(parts).tolist() if parts else [])
        counts.append(sum(count for count, grid in own if grid))
    return CardValues(temperatures, thresholds, scores, counts)


def _shares(lineup: Lineup, numbers: dict[str, Any]) -> np.ndarray:
    """How much each expert in use counts [K']: its head's coefficient, its encoder's, or all alike."""
    values = numbers["head_coefficients"] or numbers["encoder_coefficients"]
    by_name = dict(zip(lineup.pool.names, values or [1.0] * len(lineup.pool), strict=True))
    shares = np.array([by_name[name] for name in lineup.active.names], dtype=float)
    return np.asarray(shares / shares.sum() if shares.sum() > 0 else np.full(len(shares), 1 / len(shares)))


def _estimated_mix(counts: Sequence[int], total: StepSums | None) -> tuple[float, ...]:
    """The stream's mean probabilities; at its start the mix at home, which fades."""
    home = np.array(counts, dtype=float) / sum(counts)
    seen = np.zeros_like(home) if total is None else np.array(total.probability)
    return tuple(((seen + HOME_IMAGES * home) / (seen.sum() + HOME_IMAGES)).tolist())
