"""What a batch costs: forwards, milliseconds, memory."""

import numpy as np

from mergestream.bench.analysis.cost import Cost
from mergestream.bench.report.method_figures import draw_cost
from mergestream.bench.report.method_styles import keys_of
from mergestream.bench.report.page import Picture, Section
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.svg import panel
from mergestream.bench.report.tables import Table


def cost(report: ReportFindings) -> Section:
    return Section("Cost", [_table(report), _picture(report)])


def _table(report: ReportFindings) -> Table:
    times = {
        label: [row.milliseconds for row in report.bench.rows if row.label == label and row.milliseconds is not None]
        for label in report.labels
    }
    rows = tuple(_row(each, times.get(each.label, []), report.model_bytes) for each in report.costs)
    columns = ("method", "forwards a batch", "backwards a batch", "ms a step", "models held", "MB held", "at the start")
    known = report.model_bytes
    size = "size unknown, since the pool is not where it was" if known is None else f"{known / 1e6:,.1f} MB of weights"
    note = (
        f"Forwards and backwards from the options, expert logits not given. ms: median over runs of a step whose "
        f"expert logits were computed before, on the machine under Provenance: the merge and the merged model's "
        f"forward. Models held: the experts among them, while merging; a method that merges once then answers with one "
        f"model. One model: {size}. Activations, gradients and statistics are not counted."
    )
    return Table("Cost of a batch", columns, rows, note=note)


def _row(each: Cost, times: list[float], size: int | None) -> tuple[str, ...]:
    return (
        each.label,
        f"{each.forwards:g}",
        f"{each.backwards:g}",
        f"{float(np.median(times)):.1f}" if times else "–",
        f"{each.models:g}",
        "–" if size is None else f"{each.models * size / 1e6:,.1f}",
        each.at_start or "–",
    )


def _picture(report: ReportFindings) -> Picture:
    stream, known = report.streams[0], {each.label: each for each in report.costs}
    rows = [row for row in report.bench.rows if row.stream == stream and row.label in report.plain_methods]
    labels = [row.label for row in rows]
    forwards, accuracies = [known[label].forwards for label in labels], [row.accuracy.mean for row in rows]
    said = "; ".join(
        f"{label} {passes:g} forwards, {100 * accuracy:.1f} %"
        for label, passes, accuracy in zip(labels, forwards, accuracies, strict=True)
    )
    drawn = panel(
        "cost", f"Accuracy on {stream} against forward passes a batch: {said}.",
        lambda ax: draw_cost(ax, labels, forwards, accuracies), width=5.2, height=3.4, title=stream,
    )  # fmt: skip
    return Picture([drawn], "Up and to the left is better.", keys_of(labels))
