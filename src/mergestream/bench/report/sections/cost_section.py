"""What a batch costs: forward passes, milliseconds, memory."""

import numpy as np

from mergestream.bench.analysis.cost import Cost
from mergestream.bench.report.method_figures import draw_cost
from mergestream.bench.report.method_styles import keys_of
from mergestream.bench.report.page import PageFigure, PageSection
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.result_table import ResultTable
from mergestream.bench.report.svg import panel

COLUMNS = (
    "method", "forwards per batch", "backwards per batch", "ms per step", "models held", "MB held", "at the start",
)  # fmt: skip


def cost_section(report: ReportFindings) -> PageSection:
    return PageSection("Cost", [_table(report), _figure(report)])


def _table(report: ReportFindings) -> ResultTable:
    times = {
        label: [row.milliseconds for row in report.bench.rows if row.label == label and row.milliseconds is not None]
        for label in report.labels
    }
    rows = tuple(_row(each, times.get(each.label, []), report.model_bytes) for each in report.costs)
    size = report.model_bytes
    one_model = "size unknown, since the pool was moved" if size is None else f"{size / 1e6:,.1f} MB of weights"
    note = (
        f"Forwards and backwards follow from the options, expert logits not given. ms: median over runs of a step with "
        f"precomputed expert logits, on the machine under Provenance: the merge and the merged model's forward. Models "
        f"held: while merging, the experts included; a method that merges once then answers with one model. One model: "
        f"{one_model}. Activations, gradients and statistics are not counted."
    )
    return ResultTable("Cost of a batch", COLUMNS, rows, note=note)


def _row(cost: Cost, times: list[float], model_bytes: int | None) -> tuple[str, ...]:
    return (
        cost.label,
        f"{cost.forwards:g}",
        f"{cost.backwards:g}",
        f"{float(np.median(times)):.1f}" if times else "–",
        f"{cost.models:g}",
        "–" if model_bytes is None else f"{cost.models * model_bytes / 1e6:,.1f}",
        cost.at_start or "–",
    )


def _figure(report: ReportFindings) -> PageFigure:
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
