"""The result of 'train' as lines of text."""

from collections.abc import Sequence
from pathlib import Path

from mergestream.pool.expert_card import ExpertCard
from mergestream.training.training_candidates import Candidate


def describe_training(trained: Sequence[tuple[ExpertCard, Sequence[Candidate]]], out: Path) -> list[str]:
    """Describe every expert in a sentence, and why recipes failed."""
    lines = []
    for card, candidates in trained:
        report = card.metrics["validation"]
        scores = f"accuracy {100 * report['accuracy']:.1f} %, balanced {100 * report['balanced_accuracy']:.1f} %"
        lines.append(
            f"{card.domain}: {scores}, cross-entropy {report['nll']:.3f} on its own validation split; step "
            f"{card.metrics['best_step']}, temperature {card.temperature:.2f}, best of {len(candidates)}."
        )
        reasons = dict.fromkeys(candidate.failed for candidate in candidates if candidate.failed)
        lines += [f"  a setting failed: {reason}" for reason in reasons]
    return [*lines, f"Pool: {out}"]
