"""The loss between the experts, from a landscape record."""

from mergestream.bench.landscape.landscape_figures import draw_plane, draw_segments, loss_label
from mergestream.bench.landscape.outcome import Landscape, Mark, landscape_in_words
from mergestream.bench.report.page import Picture, Section, bullets
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.svg import panel
from mergestream.bench.report.tables import Table


def landscape(report: ReportFindings) -> Section | None:
    if report.landscape is None:
        return None
    found = report.landscape
    said = landscape_in_words(found)
    plane = panel(
        "landscape-plane",
        f"Contours of the loss over the plane through {', '.join(found.experts)}. {said[0]}",
        lambda ax: draw_plane(ax, found),
        width=6.4,
        height=4.8,
        is_card=True,
    )
    segments = panel(
        "landscape-segments",
        f"The loss on the straight lines between the experts. {' '.join(said[1:2])}",
        lambda ax: draw_segments(ax, found),
        width=6.4,
        height=4.8,
        title="segments between experts",
    )
    picture = Picture([plane, segments], f"Loss: {loss_label(found)}.")
    return Section("Loss landscape", [bullets(said), picture, _table(found)])


def _table(found: Landscape) -> Table:
    rows = tuple(_row(mark) for mark in found.marks)
    columns = ("network", "kind", "loss, nats", "accuracy %", "distance from the plane")
    return Table("Networks in the landscape", columns, rows, note=f"Loss: {loss_label(found)}.")


def _row(mark: Mark) -> tuple[str, ...]:
    loss = "–" if mark.loss is None else f"{mark.loss:.3f}"
    accuracy = "–" if mark.accuracy is None else f"{100 * mark.accuracy:.1f}"
    return mark.name, mark.kind, loss, accuracy, f"{mark.distance:.2g}"
