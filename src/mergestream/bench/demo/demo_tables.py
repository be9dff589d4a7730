"""What only the demo shows: its hospitals and their experts. All else is in the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mergestream.bench.analysis.comparison import ORACLE, Duel, Row
from mergestream.bench.records import Run
from mergestream.bench.report.figures import draw_samples, new_figure, to_data_uri
from mergestream.bench.report.page import Section, image
from mergestream.bench.report.sections.summary import DIFFERENCES
from mergestream.bench.report.tables import Table, results_table
from mergestream.pool.checkpoint import ExpertCard

__all__ = ["DIFFERENCES", "SYNTHETIC", "DemoFindings", "hospitals", "main_tables"]

SYNTHETIC = "The data are synthetic: generated phantom hospitals, no patients."


@dataclass(frozen=True)
class DemoFindings:
    """All that the demo computed."""

    plan: dict[str, Any]
    command: str
    rows: list[Row]
    duels: list[Duel]
    cards: list[ExpertCard]
    runs: list[Run]


def main_tables(findings: DemoFindings, compact: bool = False) -> list[Table]:
    """Accuracy and balanced accuracy, methods by streams."""
    return [
        results_table(findings.rows, metric, f"{title} on the hospital left out", (ORACLE,), compact)
        for metric, title in (("accuracy", "Accuracy"), ("balanced_accuracy", "Balanced accuracy"))
    ]


def hospitals(cards: Sequence[ExpertCard], samples: Mapping[str, np.ndarray], classes: Sequence[str]) -> Section:
    """Images of every hospital [n,H,W,3], and how its expert does at home."""
    figure, axes = new_figure(7, 1.1 * len(samples), rows=len(samples))
    for ax, (name, images) in zip(axes[:, 0], samples.items(), strict=True):
        draw_samples(ax, images, name)
    told = ", ".join(classes)
    drawn = image(
        to_data_uri(figure),
        f"Sample images of each phantom hospital ({', '.join(samples)}), two of each class: {told}.",
        f"Two generated images of each class ({told}) per hospital: same cells, other stain, optics and artefacts.",
    )
    return Section("The hospitals", [drawn, _experts(cards)])


def _experts(cards: Sequence[ExpertCard]) -> Table:
    rows = tuple(
        (
            card.name,
            str(card.recipe["seed"]),
            f"{100 * card.metrics['validation']['accuracy']:.1f}",
            f"{card.metrics['validation']['nll']:.3f}",
            f"{card.temperature:.2f}",
        )
        for card in cards
    )
    columns = ("expert", "seed", "accuracy %", "cross-entropy", "temperature")
    return Table("Experts at home, on their own validation split", columns, rows)
