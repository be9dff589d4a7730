"""What a training brought, in words."""

from collections.abc import Sequence
from pathlib import Path

from mergestream.pool.expert_card import ExpertCard


def training_in_words(trained: Sequence[tuple[ExpertCard, Sequence[str | None]]], out: Path) -> list[str]:
    """One sentence an expert; beside its card, why each of the settings tried failed (None where it did not)."""
    said = []
    for card, failures in trained:
        report = card.metrics["validation"]
        scores = f"accuracy {100 * report['accuracy']:.1f} %, balanced {100 * report['balanced_accuracy']:.1f} %"
        said.append(
            f"{card.domain}: {scores}, cross-entropy {report['nll']:.3f} on its own validation split; step "
            f"{card.metrics['best_step']}, temperature {card.temperature:.2f}, best of {len(failures)}."
        )
        said += [f"  a setting failed: {reason}" for reason in dict.fromkeys(failures) if reason]
    return [*said, f"Pool: {out}"]
