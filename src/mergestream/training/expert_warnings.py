"""Warnings about experts that have just been trained: at chance, or with a temperature at the limit of the search."""

import math

from mergestream.pool.expert_card import ExpertCard
from mergestream.training.training_loop import TEMPERATURE_LIMITS

ONE_SIDED = 1.645  # standard errors: 5 % of experts that guess are above


def training_warnings(card: ExpertCard) -> list[str]:
    """Sentences about an expert that learned nothing, or whose confidence cannot be calibrated."""
    report = card.metrics["validation"]
    counts = [sum(row) for row in report["confusion"] if sum(row)]
    sentences = []
    if len(counts) > 1:
        chance = 1 / len(counts)
        error = chance * math.sqrt(sum(chance * (1 - chance) / count for count in counts))
        if report["balanced_accuracy"] <= chance + ONE_SIDED * error:
            sentences.append(
                f"{card.domain} is at chance: balanced accuracy {report['balanced_accuracy']:.1%} on "
                f"{sum(counts)} validation images, where guessing has {chance:.1%} and the largest class alone is "
                f"{max(counts) / sum(counts):.1%} of them. Train longer (--steps), with another learning rate "
                f"(--learning-rate) or from pretrained weights (--init); or check its labels."
            )
    low, high = TEMPERATURE_LIMITS
    if not low * 1.001 < card.temperature < high / 1.001:
        why = (
            "its validation split has no error to learn from"
            if report["accuracy"] == 1
            else "its confidence says little about its errors"
        )
        sentences.append(
            f"{card.domain} has the temperature {card.temperature:g}, the limit of the search: {why}. "
            f"Give it more validation images, or do not trust its probabilities."
        )
    return sentences
