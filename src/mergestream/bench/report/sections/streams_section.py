"""How the reference method's coefficients moved over each stream."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mergestream.bench.analysis.traces import Trace
from mergestream.bench.report.figures import colours_of
from mergestream.bench.report.page import LegendKey, PageFigure, PageFold, PageSection, Paragraph, Part, slug
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.result_table import ResultTable
from mergestream.bench.report.svg import Panel, css_colour, panel
from mergestream.bench.report.trace_figures import draw_accuracy_over_time, draw_coefficients_over_time, draw_entropies

Draw = Callable[[Any], object]  # on a matplotlib axis
INTRO = "Effective number of experts: exp of the coefficients' entropy; K if all count equally, 1 if one counts alone."
CAPTION = (
    "Each target: encoder and head coefficients, the experts' entropy, accuracy (dots: batches; line: all so far). "
    "Dotted: 1/K. Dashed: a change of level."
)
COLUMNS = (
    "target", "stream", "batches", "encoder, mean", "head, mean", "effective experts, encoder",
    "effective experts, head", "change points", "accuracy %",
)  # fmt: skip


def streams_section(report: ReportFindings) -> PageSection | None:
    traces = [each for each in report.traces if each.encoder_coefficients is not None]
    if not traces:
        return None
    folds: list[Part] = []
    for number, stream in enumerate(report.streams):
        here = [each for each in traces if each.stream == stream]
        # A figure for every stream would make the page heavy; the table has them all.
        if here and stream in report.figure_streams:
            folds.append(PageFold(f"Coefficients on {stream}", [_figure(f"stream{number}", here)], is_open=True))
    return PageSection("Streams", [Paragraph(f"{traces[0].label}, first seed. {INTRO}"), *folds, _table(traces)])


def _figure(name: str, traces: Sequence[Trace]) -> PageFigure:
    experts = sorted({expert for each in traces for expert in each.experts})
    colours = colours_of(experts)
    panels = [each for n, trace in enumerate(traces) for each in _panels(f"{name}-{trace.target}-{n}", trace, colours)]
    return PageFigure(panels, CAPTION, [LegendKey(expert, css_colour(colours[expert])) for expert in experts])


def _panels(name: str, trace: Trace, colours: Mapping[str, str]) -> list[Panel]:
    where = f"{trace.target}, {trace.stream}"
    drawings: list[tuple[str, str, Draw]] = [
        (
            part,
            f"{part.capitalize()} coefficients at {where}, over {len(trace.images)} batches; means: "
            f"{_expert_means(trace, coefficients)}.",
            lambda ax, part=part: draw_coefficients_over_time(ax, trace, part, colours),  # type: ignore[misc]
        )
        for part, coefficients in (("encoder", trace.encoder_coefficients), ("head", trace.head_coefficients))
    ]
    drawings.append(("entropy", _describe_entropy(trace, where), lambda ax: draw_entropies(ax, trace, colours)))
    drawings.append(("accuracy", _describe_accuracy(trace, where), lambda ax: draw_accuracy_over_time(ax, trace)))
    return [
        panel(f"{slug(name)}-{what}", alternative, draw, width=3.3, height=2.2, title=f"{trace.target}: {what}")
        for what, alternative, draw in drawings
    ]


def _describe_entropy(trace: Trace, where: str) -> str:
    if trace.entropy is None:
        return f"No entropies were recorded at {where}."
    return f"Entropy of each expert's answers at {where}, in nats; means: {_expert_means(trace, trace.entropy)}."


def _describe_accuracy(trace: Trace, where: str) -> str:
    if trace.accuracy is None:
        return f"There are no labels at {where}."
    low, high = 100 * np.nanmin(trace.accuracy), 100 * np.nanmax(trace.accuracy)
    return f"Accuracy at {where}, batch by batch: from {low:.0f} to {high:.0f} %, {_accuracy(trace)} % overall."


def _table(traces: Sequence[Trace]) -> ResultTable:
    rows = tuple(
        (
            each.target,
            each.stream,
            str(len(each.images)),
            *(_expert_means(each, values) for values in (each.encoder_coefficients, each.head_coefficients)),
            *("–" if v is None else f"{np.nanmean(v):.2f}" for v in (each.effective_encoder, each.effective_head)),
            ", ".join(str(place + 1) for place in each.coefficient_changes) or "none",
            _accuracy(each),
        )
        for each in traces
    )
    note = "Change points: batches at which the encoder's coefficients take a new level, counted from 1."
    return ResultTable("Coefficients over each stream", COLUMNS, rows, note=note)


def _expert_means(trace: Trace, values: np.ndarray | None) -> str:
    """Mean over the stream of values [T,K], by expert."""
    if values is None:
        return "–"
    means = np.nanmean(values, axis=0)
    return ", ".join(f"{expert} {value:.2f}" for expert, value in zip(trace.experts, means, strict=True))


def _accuracy(trace: Trace) -> str:
    return "–" if trace.running_accuracy is None else f"{100 * float(trace.running_accuracy[-1]):.1f}"
