"""The result of 'train' as lines of text."""

from collections.abc import Sequence
from pathlib import Path

from mergestream.pool.expert_card import ExpertCard


def describe_training(trained: Sequence[tuple[ExpertCard, Sequence[str | None]]], out: Path) -> list[str]:
    """One sentence per expert; beside its card, why each tried setting failed (None if it did not)."""
    lines = []
    for card, failures in trained:
        report = card.metrics["validation"]
        scores = f"accuracy {100 * report['accuracy']:.1f} %, balanced {100 * report['balanced_accuracy']:.1f} %"
        lines.append(
            f"{card.domain}: {scores}, cross-entropy {report['nll']:.3f} on its own validation split; step "
            f"{card.metrics['best_step']}, temperature {card.temperature:.2f}, best of {len(failures)}."
        )
        lines += [f"  a setting failed: {reason}" for reason in dict.fromkeys(failures) if reason]
    return [*lines, f"Pool: {out}"]
