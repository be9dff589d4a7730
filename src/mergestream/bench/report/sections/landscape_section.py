"""The loss between the experts, from a landscape record."""

from mergestream.bench.landscape.landscape_figures import draw_plane, draw_segments, loss_label
from mergestream.bench.landscape.landscape_record import Landscape, Mark, describe_landscape
from mergestream.bench.report.page import Bullets, PageFigure, PageSection
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.result_table import ResultTable
from mergestream.bench.report.svg import panel


def landscape_section(report: ReportFindings) -> PageSection | None:
    if report.landscape is None:
        return None
    landscape = report.landscape
    sentences = describe_landscape(landscape)
    plane = panel(
        "landscape-plane",
        f"Contours of the loss over the plane through {', '.join(landscape.experts)}. {sentences[0]}",
        lambda ax: draw_plane(ax, landscape),
        width=6.4,
        height=4.8,
        is_card=True,
    )
    segments = panel(
        "landscape-segments",
        f"The loss on the straight lines between the experts. {sentences[1]}",
        lambda ax: draw_segments(ax, landscape),
        width=6.4,
        height=4.8,
        title="segments between experts",
    )
    figure = PageFigure([plane, segments], f"Loss: {loss_label(landscape)}.")
    return PageSection("Loss landscape", [Bullets(sentences), figure, _table(landscape)])


def _table(landscape: Landscape) -> ResultTable:
    rows = tuple(_row(mark) for mark in landscape.marks)
    columns = ("network", "kind", "loss, nats", "accuracy %", "distance from the plane")
    return ResultTable("Networks in the landscape", columns, rows, note=f"Loss: {loss_label(landscape)}.")


def _row(mark: Mark) -> tuple[str, ...]:
    loss = "–" if mark.loss is None else f"{mark.loss:.3f}"
    accuracy = "–" if mark.accuracy is None else f"{100 * mark.accuracy:.1f}"
    return mark.name, mark.kind, loss, accuracy, f"{mark.distance:.2g}"
