"""What the reference method did over time: coefficients, batch by batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mergestream.bench.analysis.traces import Trace
from mergestream.bench.report.figures import colours_of
from mergestream.bench.report.page import Fold, Key, Part, Picture, Section, paragraph
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.svg import Panel, css_colour, panel
from mergestream.bench.report.table_markup import slug
from mergestream.bench.report.tables import Table
from mergestream.bench.report.trace_figures import draw_accuracy_over_time, draw_coefficients_over_time, draw_entropies

Draw = Callable[[Any], object]  # on a matplotlib axis
TOLD = (
    "The effective number of "
    "experts is exp of the coefficients' entropy: K where all count alike, 1 where one alone does."
)


def streams(report: ReportFindings) -> Section | None:
    traces = [each for each in report.followed if each.encoder_coefficients is not None]
    if not traces:
        return None
    folds: list[Part] = []
    for number, stream in enumerate(report.streams):
        here = [each for each in traces if each.stream == stream]
        # A picture of every stream would make the page heavy; the table has them all.
        if here and stream in report.telling_streams:
            folds.append(Fold(f"Coefficients on {stream}", [_picture(f"stream{number}", here)], is_open=True))
    told = paragraph(f"{traces[0].label}, first seed. {TOLD}")
    return Section("Streams", [told, *folds, _table(traces)])


def _picture(name: str, traces: Sequence[Trace]) -> Picture:
    experts = sorted({expert for each in traces for expert in each.experts})
    colours = colours_of(experts)
    panels = [each for n, trace in enumerate(traces) for each in _panels(f"{name}-{trace.target}-{n}", trace, colours)]
    caption = (
        "Each target: encoder and head coefficients, the experts' entropy, accuracy (dots: batches; line: all so far). "
        "Dotted: 1/K. Dashed: a change of level."
    )
    return Picture(panels, caption, [Key(expert, css_colour(colours[expert])) for expert in experts])


def _panels(name: str, trace: Trace, colours: Mapping[str, str]) -> list[Panel]:
    drawn: list[tuple[str, str, Draw]] = [
        (
            "encoder",
            _coefficients_seen(trace, "encoder"),
            lambda ax: draw_coefficients_over_time(ax, trace, "encoder", colours),
        ),
        ("head", _coefficients_seen(trace, "head"), lambda ax: draw_coefficients_over_time(ax, trace, "head", colours)),
        ("entropy", _entropy_seen(trace), lambda ax: draw_entropies(ax, trace, colours)),
        ("accuracy", _accuracy_seen(trace), lambda ax: draw_accuracy_over_time(ax, trace)),
    ]
    return [
        panel(f"{slug(name)}-{what}", seen, draw, width=3.3, height=2.2, title=f"{trace.target}: {what}")
        for what, seen, draw in drawn
    ]


def _coefficients_seen(trace: Trace, part: str) -> str:
    where = f"{trace.target}, {trace.stream}, over {len(trace.images)} batches"
    return f"{part.capitalize()} coefficients at {where}; means: {_mean(trace, part)}."


def _entropy_seen(trace: Trace) -> str:
    if trace.entropy is None:
        return f"No entropies were recorded at {trace.target}, {trace.stream}."
    means = np.nanmean(trace.entropy, axis=0)
    told = ", ".join(f"{expert} {value:.2f}" for expert, value in zip(trace.experts, means, strict=True))
    return f"Entropy of each expert's answers at {trace.target}, {trace.stream}, in nats; means: {told}."


def _accuracy_seen(trace: Trace) -> str:
    if trace.accuracy is None:
        return f"The stream {trace.stream} of {trace.target} has no labels."
    low, high = 100 * np.nanmin(trace.accuracy), 100 * np.nanmax(trace.accuracy)
    told = f"from {low:.0f} to {high:.0f} %, {_accuracy(trace)} % in all"
    return f"Accuracy at {trace.target}, {trace.stream}, batch by batch: {told}."


def _values(trace: Trace, part: str) -> np.ndarray:
    values = trace.encoder_coefficients if part == "encoder" else trace.head_coefficients
    return np.zeros((0, len(trace.experts))) if values is None else values


def _table(traces: Sequence[Trace]) -> Table:
    rows = tuple(
        (
            each.target,
            each.stream,
            str(len(each.images)),
            *(_mean(each, part) for part in ("encoder", "head")),
            *(_effective(values) for values in (each.effective_encoder, each.effective_head)),
            _listed(each.coefficient_changes),
            _accuracy(each),
        )
        for each in traces
    )
    columns = (
        "target", "stream", "batches", "encoder, mean", "head, mean", "effective experts, encoder",
        "effective experts, head", "change points", "accuracy %",
    )  # fmt: skip
    note = "Change points: batches at which the encoder's coefficients take a new level, counted from 1."
    return Table("Coefficients over each stream", columns, rows, note=note)


def _mean(trace: Trace, part: str) -> str:
    means = _values(trace, part).mean(axis=0)
    return ", ".join(f"{expert} {value:.2f}" for expert, value in zip(trace.experts, means, strict=True))


def _accuracy(trace: Trace) -> str:
    known = None if trace.running_accuracy is None else trace.running_accuracy[-1]
    return "–" if known is None else f"{100 * float(known):.1f}"


def _effective(values: np.ndarray | None) -> str:
    return "–" if values is None else f"{float(np.nanmean(values)):.2f}"


def _listed(places: Sequence[int]) -> str:
    return ", ".join(str(place + 1) for place in places) or "none"
