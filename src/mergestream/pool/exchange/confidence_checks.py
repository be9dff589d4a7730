"""Is an expert as sure of itself as its own validation loss and the other experts let expect? Warnings, not refusals.

A method that weighs experts by their entropy listens to the surest one, so a head scaled by 100 captures the pool.
What this can and cannot see is written in docs/pools.md.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from mergestream.pool.exchange.noise_probe import ProbeResult
from mergestream.pool.expert_card import ExpertCard

# Honest phantom experts lie within a factor of 2 of each other and of 2.5 of their own loss (docs/pools.md).
FACTOR = 8.0
LARGEST_ECE = 0.25
TEMPERATURES = (0.25, 4.0)


def confidence_warnings(card: ExpertCard, reading: ProbeResult, others: Sequence[ProbeResult]) -> list[str]:
    """What stands out in an expert's card, in its head, and in its answers to noise; empty where nothing does."""
    found = [*_in_its_card(card), *_against_its_loss(card, reading), *_against_others(reading, others)]
    return [f"Expert '{card.name}' {sentence} Ask the site how it was trained." for sentence in found]


def _in_its_card(card: ExpertCard) -> list[str]:
    """The card alone: accuracy, loss and temperature must tell one story."""
    accuracy, loss, ece = (_validation(card, key) for key in ("accuracy", "nll", "ece"))
    count, found = len(card.classes), []
    if accuracy is not None and loss is not None and loss > math.log(count) and accuracy > 1.5 / count:
        found.append(
            f"is right on {accuracy:.0%} of its own validation images, yet its loss there ({loss:.3g}) is above that "
            f"of answering nothing ({math.log(count):.3g}): it is far too sure when it is wrong."
        )
    if ece is not None and ece > LARGEST_ECE:
        found.append(f"is {ece:.0%} off between confidence and accuracy (ECE) on its own validation images.")
    low, high = TEMPERATURES
    # Without an error the best temperature is 0, whatever the scale: it says nothing then.
    if not low <= card.temperature <= high and (accuracy is None or accuracy < 1):
        found.append(f"needs the temperature {card.temperature:.3g} to be calibrated at home; usual is about 1.")
    return found


def _against_its_loss(card: ExpertCard, reading: ProbeResult) -> list[str]:
    """A loss L gives the truth log((C-1) / (e^L - 1)) of log-odds over one other class: the lead to expect."""
    loss = _validation(card, "nll")
    if loss is None or reading.lead is None or not 0 < loss < math.log(len(card.classes)):
        return []
    expected = math.log((len(card.classes) - 1) / math.expm1(loss))
    said = f"by its validation loss ({loss:.3g}) about {expected:.2g} is to be expected."
    if reading.lead > FACTOR * max(expected, 1.0):
        return [f"is too sure: on noise its first answer leads by {reading.lead:.3g}; {said}"]
    if reading.lead < expected / FACTOR:
        return [f"is hardly sure of anything: on noise its first answer leads by {reading.lead:.2g}; {said}"]
    return []


def _against_others(reading: ProbeResult, others: Sequence[ProbeResult]) -> list[str]:
    found = []
    leads = [other.lead for other in others if other.lead is not None]
    if reading.lead is not None and leads:
        found += _compare("answers noise", "lead of its first logit", reading.lead, leads)
    norms = [other.head_norm for other in others]
    return found + (_compare("has a head", "norm", reading.head_norm, norms) if norms else [])


def _compare(what: str, measure: str, mine: float, others: Sequence[float]) -> list[str]:
    usual = statistics.median(others)
    if usual <= 0 or usual / FACTOR <= mine <= usual * FACTOR:
        return []
    return [f"{what} out of line with the pool: {measure} {mine:.3g}, the other experts' median is {usual:.3g}."]


def _validation(card: ExpertCard, key: str) -> float | None:
    """A number of the card's validation metrics; a card comes from elsewhere and may hold anything there."""
    metrics: Any = card.metrics.get("validation")
    value = metrics.get(key) if isinstance(metrics, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return None
    return float(value)
