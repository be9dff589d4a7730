"""The demo's findings as tables, figures and one page."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mergestream.analysis.comparison import ORACLE, Duel, Row, in_words
from mergestream.checkpoints import ExpertCard
from mergestream.datasets import Dataset
from mergestream.records import Run
from mergestream.reporting.figures import (
    colours_of,
    draw_coefficients,
    draw_intervals,
    draw_samples,
    new_figure,
    to_data_uri,
)
from mergestream.reporting.page import NOTICE, Section, bullets, picture, preformatted, render
from mergestream.reporting.tables import Table, duels_table, results_table, to_html

SYNTHETIC = "The data are synthetic: generated phantom hospitals, no patients."


@dataclass(frozen=True)
class DemoFindings:
    """All that the demo shows."""

    plan: dict[str, Any]
    command: str
    rows: list[Row]
    duels: list[Duel]
    cards: list[ExpertCard]
    shown: list[Run]
    samples: dict[str, np.ndarray]
    dataset: Dataset


DIFFERENCES = "In brackets: the difference in points on the same batches; its interval decides which word is used."


def main_tables(findings: DemoFindings, compact: bool = False) -> list[Table]:
    """Accuracy and balanced accuracy, methods by streams."""
    return [
        results_table(findings.rows, metric, f"{title} on the hospital left out", (ORACLE,), compact)
        for metric, title in (("accuracy", "Accuracy"), ("balanced_accuracy", "Balanced accuracy"))
    ]


def render_demo(findings: DemoFindings) -> str:
    sections = [
        Section("In words", bullets(in_words(findings.duels)) + f"<p>{DIFFERENCES}</p>"),
        Section("Results", _results(findings)),
        Section("Coefficients over time", _coefficients(findings)),
        Section("The hospitals", _hospitals(findings)),
        Section("Detail", to_html(_detail(findings.rows))),
        Section("How to get this page again", _provenance(findings)),
    ]
    return render("mergestream demo: four hospitals, each left out in turn", f"{SYNTHETIC} {NOTICE}", sections)


def _results(findings: DemoFindings) -> str:
    streams = list(dict.fromkeys(row.stream for row in findings.rows))
    methods = len({row.label for row in findings.rows})
    figure, axes = new_figure(5.2 * min(2, len(streams)), 0.3 * methods + 1.2, columns=min(2, len(streams)))
    for ax, stream in zip(axes[0], streams, strict=False):
        draw_intervals(ax, [row for row in findings.rows if row.stream == stream], "accuracy")
        ax.set_title(stream, loc="left")
    drawn = picture(
        to_data_uri(figure),
        "Accuracy of every method with its interval; the numbers are in the table above.",
        f"Accuracy with 95 % intervals on {' and '.join(streams[:2])}; blue: variants of entropy_adaptive.",
    )
    accuracy, balanced = main_tables(findings)
    duels = duels_table(findings.duels, f"Accuracy of {findings.duels[0].ours} less that of the others")
    return to_html(accuracy) + drawn + to_html(duels) + to_html(balanced)


def _coefficients(findings: DemoFindings) -> str:
    targets = list(dict.fromkeys(run.arguments["data"]["domain"] for run in findings.shown))
    parts, colours = [], colours_of(findings.dataset.domains)
    for stream in list(dict.fromkeys(run.arguments["stream"]["name"] for run in findings.shown))[:2]:
        figure, axes = new_figure(3.1 * len(targets), 4.6, rows=2, columns=len(targets))
        runs = {r.arguments["data"]["domain"]: r for r in findings.shown if r.arguments["stream"]["name"] == stream}
        for column, target in enumerate(targets):
            for row, key in enumerate(("encoder_coefficients", "head_coefficients")):
                experts = runs[target].arguments["pool"]["experts"]
                draw_coefficients(axes[row, column], runs[target].steps, key, experts, colours)
                axes[row, column].set_title(f"{target}: {key.split('_')[0]}", fontsize=9, loc="left")
            axes[0, column].legend(fontsize=7, frameon=False)
        parts.append(
            picture(
                to_data_uri(figure),
                f"Encoder and head coefficients of entropy_adaptive over the {stream} stream, one panel per target.",
                f"Stream {stream}. One panel per hospital left out; one line per expert; dotted: the mean's 1/K.",
            )
        )
    return "".join(parts)


def _hospitals(findings: DemoFindings) -> str:
    figure, axes = new_figure(7, 1.1 * len(findings.samples), rows=len(findings.samples))
    for ax, (name, images) in zip(axes[:, 0], findings.samples.items(), strict=True):
        draw_samples(ax, images, name)
    classes = ", ".join(findings.dataset.classes)
    experts = Table(
        "Experts at home, on their own validation split",
        ("expert", "seed", "accuracy", "cross-entropy", "temperature"),
        tuple(
            (
                card.name,
                str(card.recipe["seed"]),
                f"{100 * card.metrics['validation']['accuracy']:.1f} %",
                f"{card.metrics['validation']['nll']:.3f}",
                f"{card.temperature:.2f}",
            )
            for card in findings.cards
        ),
    )
    drawn = picture(
        to_data_uri(figure),
        f"Sample images of each phantom hospital, two of each class: {classes}.",
        f"Two generated images of each class ({classes}) per hospital: same cells, other stain, optics and artefacts.",
    )
    return drawn + to_html(experts)


def _detail(rows: Sequence[Row]) -> Table:
    columns = ("method", "stream", "AUROC", "NLL", "ECE", "Brier", "worst target", "lowest recall", "ms a step")
    cells = tuple(
        (
            row.label,
            row.stream,
            "–" if row.auroc is None else f"{row.auroc:.3f}",
            f"{row.nll:.3f}",
            f"{row.ece:.3f}",
            f"{row.brier:.3f}",
            f"{row.worst_target} {100 * row.per_target[row.worst_target]:.1f} %",
            f"{100 * row.lowest_recall:.0f} %",
            "–" if row.milliseconds is None else f"{row.milliseconds:.1f}",
        )
        for row in rows
    )
    note = (
        "Lowest recall: of any class in any run; near 0 a class has vanished. ms a step: median; expert forwards were "
        "computed once before and are not in it, static methods were only reordered on later streams."
    )
    return Table("Calibration, worst cases and cost", columns, cells, note=note)


def _provenance(findings: DemoFindings) -> str:
    return preformatted(findings.command) + preformatted(json.dumps(findings.plan, indent=1))
