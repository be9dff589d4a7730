"""Parts of the report's sections on methods: coefficients over each stream, cost, confidence."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mergestream.bench.analysis.confidence import RiskCoverage
from mergestream.bench.analysis.cost import Cost, shown
from mergestream.bench.analysis.traces import Trace
from mergestream.bench.report import method_figures
from mergestream.bench.report.figures import Panel, colours_of, css_colour, panel
from mergestream.bench.report.page import LegendKey, slug
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.result_table import ResultTable, format_number, record_table

COVERAGES = (0.5, 0.8, 0.9, 1.0)


def trace_figures(report: ReportFindings) -> list[tuple[str, list[Panel], list[LegendKey]]]:
    """Per stream with figures: its name, four panels per target, and the experts' colours."""
    figures = []
    for number, stream in enumerate(report.figure_streams):
        traces = [each for each in report.traces if each.run.stream == stream]
        colours = colours_of(sorted({expert for each in traces for expert in each.experts}))
        panels: list[Panel] = []
        for n, trace in enumerate(traces):
            panels += _trace_panels(f"stream{number}-{trace.run.target}-{n}", trace, colours)
        keys = [LegendKey(expert, css_colour(colour)) for expert, colour in colours.items()]
        figures += [(stream, panels, keys)] if panels else []
    return figures


def _trace_panels(name: str, trace: Trace, colours: Mapping[str, str]) -> list[Panel]:
    where = f"{trace.run.target}, {trace.run.stream}"
    drawings: dict[str, tuple[Any, ...]] = {}  # the text alternative, then a function and what it draws
    for part, field in method_figures.PARTS.items():
        means = _expert_means(trace, getattr(trace, field))
        text = f"{part.capitalize()} coefficients at {where}, over {len(trace.run.batches)} batches; means: {means}."
        drawings[part] = text, method_figures.draw_coefficients_over_time, trace, part, colours
    entropy = f"Entropy of each expert's answers at {where}, in nats; means: {_expert_means(trace, trace.entropy)}."
    if trace.entropy is None:
        entropy = f"No entropies were recorded at {where}."
    drawings["entropy"] = entropy, method_figures.draw_entropies, trace, colours
    drawings["accuracy"] = _describe_accuracy(trace, where), method_figures.draw_accuracy_over_time, trace
    return [
        panel(f"{slug(name)}-{what}", *drawing, width=3.3, height=2.2, title=f"{trace.run.target}: {what}")
        for what, drawing in drawings.items()
    ]


def _describe_accuracy(trace: Trace, where: str) -> str:
    if trace.accuracy is None:
        return f"There are no labels at {where}."
    low, high = 100 * np.nanmin(trace.accuracy), 100 * np.nanmax(trace.accuracy)
    return f"Accuracy at {where}, batch by batch: from {low:.0f} to {high:.0f} %, {_accuracy(trace)} % overall."


def trace_table(traces: Sequence[Trace]) -> ResultTable:
    columns: dict[str, Callable[[Trace], str]] = {
        "target": lambda trace: trace.run.target,
        "stream": lambda trace: trace.run.stream,
        "batches": lambda trace: str(len(trace.run.batches)),
        "encoder, mean": lambda trace: _expert_means(trace, trace.encoder_coefficients),
        "head, mean": lambda trace: _expert_means(trace, trace.head_coefficients),
        "effective experts, encoder": lambda trace: _mean(trace.effective_encoder),
        "effective experts, head": lambda trace: _mean(trace.effective_head),
        "change points": lambda trace: ", ".join(str(place + 1) for place in trace.coefficient_changes) or "none",
        "accuracy %": _accuracy,
    }
    note = "Change points: batches at which the encoder's coefficients take a new level, counted from 1."
    return record_table("Coefficients over each stream", traces, columns, note)


def _mean(values: np.ndarray | None) -> str:
    return format_number(None if values is None else np.nanmean(values), 2)


def _expert_means(trace: Trace, values: np.ndarray | None) -> str:
    """Mean over the stream of values [T,K], by expert."""
    if values is None:
        return "–"
    means = np.nanmean(values, axis=0)
    return ", ".join(f"{expert} {value:.2f}" for expert, value in zip(trace.experts, means, strict=True))


def _accuracy(trace: Trace) -> str:
    return format_number(None if trace.running_accuracy is None else trace.running_accuracy[-1], 1, 100)


def cost_table(report: ReportFindings) -> ResultTable:
    size, milliseconds = report.model_bytes, report.milliseconds
    columns: dict[str, Callable[[Cost], str]] = {
        "method": lambda cost: cost.label,
        "forwards per image": lambda cost: shown(cost.forwards),
        "backwards per image": lambda cost: shown(cost.backwards),
        "ms, logits given": lambda cost: format_number(milliseconds[cost.label], 1),
        "models held": lambda cost: f"{cost.models:g}",
        "MB held": lambda cost: "–" if size is None else f"{cost.models * size / 1e6:,.1f}",
        "at the start": lambda cost: cost.at_start or "–",
    }
    one_model = "size unknown, since the pool was moved" if size is None else f"{size / 1e6:,.1f} MB of weights"
    note = (
        f"Forwards and backwards: counted in every step, mean over images; shared expert logits count for each method "
        f"that used them. ms: median over runs of a step with precomputed expert logits, on the machine under "
        f"Provenance: the merge and the merged model's forward. Models held: while merging, the experts included; a "
        f"method that merges once then answers with one model. One model: {one_model}. Activations, gradients and "
        f"statistics are not in it."
    )
    return record_table("Cost of a batch", report.costs, columns, note)


def cost_figure(report: ReportFindings) -> tuple[Panel, list[LegendKey]]:
    """Accuracy on the first stream against forward passes."""
    stream, forwards = report.bench.streams[0], report.forwards
    rows = [row for row in report.bench.rows if row.stream == stream and row.label in report.plain_methods]
    points = {row.label: (forwards[row.label], row.accuracy.mean) for row in rows}
    listed = "; ".join(f"{label} {shown(x)} forwards, {100 * y:.1f} %" for label, (x, y) in points.items())
    alternative = f"Accuracy on {stream} against forward passes per image: {listed}."
    return panel("cost", alternative, method_figures.draw_cost, points, title=stream), method_figures.keys_of(points)


def confidence_figure(report: ReportFindings) -> tuple[list[Panel], list[LegendKey]]:
    """Per stream with figures a reliability diagram and risk-coverage curves, of methods without variants."""
    panels = []
    for number, stream in enumerate(report.figure_streams):
        diagrams = [c for c in report.reliabilities if c.stream == stream and c.label in report.plain_methods]
        curves = [c for c in report.risk_coverages if c.stream == stream and c.label in report.plain_methods]
        gaps = {each.label: np.sum(each.share * (each.confidence - each.accuracy)) for each in diagrams}
        confident = "; ".join(f"{label} {100 * gap:+.1f}" for label, gap in gaps.items())
        halves = "; ".join(f"{each.label} {100 * _risk_at(each, 0.5):.1f}" for each in curves)
        text = f"Accuracy by confidence on {stream}. Mean confidence minus accuracy, in points: {confident}."
        title = f"Reliability, {stream}"
        panels.append(
            panel(f"reliability{number}", text, method_figures.draw_reliability, diagrams, title=title, height=3.7)
        )
        text = f"Errors by share of images answered on {stream}. At half of the images, in %: {halves}."
        title = f"Risk and coverage, {stream}"
        panels.append(panel(f"risk{number}", text, method_figures.draw_risk_coverage, curves, title=title, height=3.7))
    return panels, method_figures.keys_of(report.plain_methods)


def _risk_at(curve: RiskCoverage, coverage: float) -> float:
    return float(np.interp(coverage, curve.coverage, curve.risk))


def coverage_table(report: ReportFindings, stream: str) -> ResultTable:
    curves = [each for each in report.risk_coverages if each.stream == stream]
    rows = tuple((each.label, *(f"{100 * _risk_at(each, share):.1f}" for share in COVERAGES)) for each in curves)
    columns = ("method", *(f"{100 * share:.0f} % answered" for share in COVERAGES))
    return ResultTable(f"Errors among the answered, {stream}", columns, rows, note="In %, mean over targets.")
