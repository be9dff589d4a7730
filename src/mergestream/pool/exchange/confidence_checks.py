"""Warnings of experts that are much more or less confident than their validation loss and the other experts suggest.

Methods that weigh experts by entropy follow the most confident one, so a head scaled by 100 captures the pool.
docs/pools.md says what these checks can and cannot see.
"""

import math
import statistics
from collections.abc import Sequence

from mergestream.pool.exchange.noise_probe import ProbeResult
from mergestream.pool.expert_card import ExpertCard

# Honest phantom experts lie within a factor of 2 of each other and of 2.5 of their own loss (docs/pools.md).
FACTOR = 8.0
LARGEST_ECE = 0.25
TEMPERATURES = (0.25, 4.0)


def confidence_warnings(card: ExpertCard, result: ProbeResult, others: Sequence[ProbeResult]) -> list[str]:
    """Warn of anything unusual in an expert's card, in its head, and in its answers to noise."""
    sentences = [*_card_doubts(card), *_loss_doubts(card, result), *_pool_doubts(result, others)]
    return [f"Expert '{card.name}' {sentence} Ask the site how it was trained." for sentence in sentences]


def _card_doubts(card: ExpertCard) -> list[str]:
    """Do accuracy, loss and temperature in the card fit together?"""
    accuracy, loss, ece = map(card.validation, ("accuracy", "nll", "ece"))
    count, sentences = len(card.classes), list[str]()
    if accuracy is not None and loss is not None and loss > math.log(count) and accuracy > 1.5 / count:
        sentences.append(
            f"is right on {accuracy:.0%} of its own validation images, yet its loss there ({loss:.3g}) is above that "
            f"of answering nothing ({math.log(count):.3g}): it is far too sure when it is wrong."
        )
    if ece is not None and ece > LARGEST_ECE:
        sentences.append(f"is {ece:.0%} off between confidence and accuracy (ECE) on its own validation images.")
    low, high = TEMPERATURES
    # Without an error the best temperature is 0, whatever the scale: it says nothing then.
    if not low <= card.temperature <= high and (accuracy is None or accuracy < 1):
        sentences.append(f"needs the temperature {card.temperature:.3g} to be calibrated at home; usual is about 1.")
    return sentences


def _loss_doubts(card: ExpertCard, result: ProbeResult) -> list[str]:
    """Compare the lead with log((C-1) / (e^L - 1)): the log-odds of the truth over one other class at loss L."""
    loss = card.validation("nll")
    if loss is None or result.lead is None or not 0 < loss < math.log(len(card.classes)):
        return []
    expected = math.log((len(card.classes) - 1) / math.expm1(loss))
    expectation = f"by its validation loss ({loss:.3g}) about {expected:.2g} is to be expected."
    if result.lead > FACTOR * max(expected, 1.0):
        return [f"is too confident: on noise its first answer leads by {result.lead:.3g}; {expectation}"]
    if result.lead < expected / FACTOR:
        return [f"is hardly confident of anything: on noise its first answer leads by {result.lead:.2g}; {expectation}"]
    return []


def _pool_doubts(result: ProbeResult, others: Sequence[ProbeResult]) -> list[str]:
    sentences = []
    leads = [other.lead for other in others if other.lead is not None]
    if result.lead is not None and leads:
        sentences += _compare("answers noise", "lead of its first logit", result.lead, leads)
    norms = [other.head_norm for other in others]
    return sentences + (_compare("has a head", "norm", result.head_norm, norms) if norms else [])


def _compare(what: str, measure: str, mine: float, others: Sequence[float]) -> list[str]:
    usual = statistics.median(others)
    if usual <= 0 or usual / FACTOR <= mine <= usual * FACTOR:
        return []
    return [f"{what} out of line with the pool: {measure} {mine:.3g}, the other experts' median is {usual:.3g}."]
