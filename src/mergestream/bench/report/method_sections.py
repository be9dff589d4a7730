"""The report's sections on methods: coefficients over each stream, cost, confidence."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mergestream.bench.analysis.confidence import Reliability, RiskCoverage
from mergestream.bench.analysis.cost import Cost
from mergestream.bench.analysis.traces import Trace
from mergestream.bench.report.figures import Panel, colours_of, css_colour, panel
from mergestream.bench.report.method_figures import (
    draw_accuracy_over_time,
    draw_coefficients_over_time,
    draw_cost,
    draw_entropies,
    draw_reliability,
    draw_risk_coverage,
    keys_of,
)
from mergestream.bench.report.page import LegendKey, PageFigure, PageFold, PageSection, Paragraph, Part, slug
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.result_table import ResultTable

Draw = Callable[[Any], object]  # on a matplotlib axis
STREAMS_INTRO = (
    "Effective number of experts: exp of the coefficients' entropy; K if all count equally, 1 if one counts alone."
)
TRACE_CAPTION = (
    "Each target: encoder and head coefficients, the experts' entropy, accuracy (dots: batches; line: all so far). "
    "Dotted: 1/K. Dashed: a change of level."
)
TRACE_COLUMNS = (
    "target", "stream", "batches", "encoder, mean", "head, mean", "effective experts, encoder",
    "effective experts, head", "change points", "accuracy %",
)  # fmt: skip
COST_COLUMNS = (
    "method", "forwards per batch", "backwards per batch", "ms per step", "models held", "MB held", "at the start",
)  # fmt: skip
CONFIDENCE_INTRO = (
    "Reliability: below the diagonal a model is more confident than it is accurate. Risk and coverage: the errors that "
    "remain when only the most confident share is answered and the rest goes to a human; lower is better."
)
CONFIDENCE_CAPTION = (
    "Reliability diagrams (ten bins, all targets together; a bin with less than 0.5 % of the images is left out) "
    "and risk-coverage curves (mean over targets). Variants are in the tables."
)
SMALLEST_BIN = 0.005  # share of the images; with fewer the accuracy is noise
COVERAGES = (0.5, 0.8, 0.9, 1.0)


def streams_section(report: ReportFindings) -> PageSection | None:
    traces = [each for each in report.traces if each.encoder_coefficients is not None]
    if not traces:
        return None
    folds: list[Part] = []
    for number, stream in enumerate(report.streams):
        here = [each for each in traces if each.stream == stream]
        # A figure for every stream would make the page heavy; the table has them all.
        if here and stream in report.figure_streams:
            folds.append(PageFold(f"Coefficients on {stream}", [_trace_figure(f"stream{number}", here)], is_open=True))
    return PageSection(
        "Streams", [Paragraph(f"{traces[0].label}, first seed. {STREAMS_INTRO}"), *folds, _trace_table(traces)]
    )


def _trace_figure(name: str, traces: Sequence[Trace]) -> PageFigure:
    experts = sorted({expert for each in traces for expert in each.experts})
    colours = colours_of(experts)
    panels = [
        each for n, trace in enumerate(traces) for each in _trace_panels(f"{name}-{trace.target}-{n}", trace, colours)
    ]
    return PageFigure(panels, TRACE_CAPTION, [LegendKey(expert, css_colour(colours[expert])) for expert in experts])


def _trace_panels(name: str, trace: Trace, colours: Mapping[str, str]) -> list[Panel]:
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


def _trace_table(traces: Sequence[Trace]) -> ResultTable:
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
    return ResultTable("Coefficients over each stream", TRACE_COLUMNS, rows, note=note)


def _expert_means(trace: Trace, values: np.ndarray | None) -> str:
    """Mean over the stream of values [T,K], by expert."""
    if values is None:
        return "–"
    means = np.nanmean(values, axis=0)
    return ", ".join(f"{expert} {value:.2f}" for expert, value in zip(trace.experts, means, strict=True))


def _accuracy(trace: Trace) -> str:
    return "–" if trace.running_accuracy is None else f"{100 * float(trace.running_accuracy[-1]):.1f}"


def cost_section(report: ReportFindings) -> PageSection:
    return PageSection("Cost", [_cost_table(report), _cost_figure(report)])


def _cost_table(report: ReportFindings) -> ResultTable:
    times = {
        label: [row.milliseconds for row in report.bench.rows if row.label == label and row.milliseconds is not None]
        for label in report.labels
    }
    rows = tuple(_cost_row(each, times.get(each.label, []), report.model_bytes) for each in report.costs)
    size = report.model_bytes
    one_model = "size unknown, since the pool was moved" if size is None else f"{size / 1e6:,.1f} MB of weights"
    note = (
        f"Forwards and backwards follow from the options, expert logits not given. ms: median over runs of a step with "
        f"precomputed expert logits, on the machine under Provenance: the merge and the merged model's forward. Models "
        f"held: while merging, the experts included; a method that merges once then answers with one model. One model: "
        f"{one_model}. Activations, gradients and statistics are not counted."
    )
    return ResultTable("Cost of a batch", COST_COLUMNS, rows, note=note)


def _cost_row(cost: Cost, times: list[float], model_bytes: int | None) -> tuple[str, ...]:
    return (
        cost.label,
        f"{cost.forwards:g}",
        f"{cost.backwards:g}",
        f"{float(np.median(times)):.1f}" if times else "–",
        f"{cost.models:g}",
        "–" if model_bytes is None else f"{cost.models * model_bytes / 1e6:,.1f}",
        cost.at_start or "–",
    )


def _cost_figure(report: ReportFindings) -> PageFigure:
    stream, costs = report.streams[0], {each.label: each for each in report.costs}
    rows = [row for row in report.bench.rows if row.stream == stream and row.label in report.plain_methods]
    labels, accuracies = [row.label for row in rows], [row.accuracy.mean for row in rows]
    forwards = [costs[label].forwards for label in labels]
    listed = "; ".join(
        f"{label} {passes:g} forwards, {100 * accuracy:.1f} %"
        for label, passes, accuracy in zip(labels, forwards, accuracies, strict=True)
    )
    drawing = panel(
        "cost",
        f"Accuracy on {stream} against forward passes per batch: {listed}.",
        lambda ax: draw_cost(ax, labels, forwards, accuracies),
        title=stream,
    )
    return PageFigure([drawing], "Up and to the left is better.", keys_of(labels))


def confidence_section(report: ReportFindings) -> PageSection:
    panels = []
    for number, stream in enumerate(report.figure_streams):
        diagrams = [
            _without_small_bins(each)
            for each in report.reliabilities
            if each.stream == stream and each.label in report.plain_methods
        ]
        curves = [c for c in report.risk_coverages if c.stream == stream and c.label in report.plain_methods]
        panels += [
            _reliability_panel(f"reliability{number}", stream, diagrams),
            _risk_panel(f"risk{number}", stream, curves),
        ]
    figure = PageFigure(panels, CONFIDENCE_CAPTION, keys_of(report.plain_methods))
    tables = [_coverage_table(report, stream) for stream in report.figure_streams]
    return PageSection("Confidence", [Paragraph(CONFIDENCE_INTRO), figure, *tables])


def _without_small_bins(curve: Reliability) -> Reliability:
    large = curve.share >= SMALLEST_BIN
    return replace(curve, confidence=curve.confidence[large], accuracy=curve.accuracy[large], share=curve.share[large])


def _reliability_panel(name: str, stream: str, curves: Sequence[Reliability]) -> Panel:
    gaps = {each.label: float(np.sum(each.share * (each.confidence - each.accuracy))) for each in curves}
    listed = "; ".join(f"{label} {100 * gap:+.1f}" for label, gap in gaps.items())
    return panel(
        name,
        f"Accuracy by confidence on {stream}. Mean confidence minus accuracy, in points: {listed}.",
        lambda ax: draw_reliability(ax, curves),
        title=f"Reliability, {stream}",
        height=3.7,
    )


def _risk_panel(name: str, stream: str, curves: Sequence[RiskCoverage]) -> Panel:
    listed = "; ".join(f"{each.label} {100 * _risk_at(each, 0.5):.1f}" for each in curves)
    return panel(
        name,
        f"Errors by share of images answered on {stream}. At half of the images, in %: {listed}.",
        lambda ax: draw_risk_coverage(ax, curves),
        title=f"Risk and coverage, {stream}",
        height=3.7,
    )


def _risk_at(curve: RiskCoverage, coverage: float) -> float:
    return float(np.interp(coverage, curve.coverage, curve.risk))


def _coverage_table(report: ReportFindings, stream: str) -> ResultTable:
    curves = [each for each in report.risk_coverages if each.stream == stream]
    rows = tuple((each.label, *(f"{100 * _risk_at(each, share):.1f}" for share in COVERAGES)) for each in curves)
    columns = ("method", *(f"{100 * share:.0f} % answered" for share in COVERAGES))
    return ResultTable(f"Errors among the answered, {stream}", columns, rows, note="In %, mean over targets.")
