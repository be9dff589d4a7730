"""The report's sections on the paper's claims and on the experts: drift and loss landscape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mergestream.bench.claims.claim_finding import (
    CORRELATION,
    FAILS,
    HOLDS,
    POINTS,
    UNKNOWN,
    ClaimFinding,
    Verdict,
    claims_by_stream,
)
from mergestream.bench.drift.drift_figures import HEAT_MAP, DriftFigure, draw, figures_of
from mergestream.bench.drift.drift_report import describe_drift
from mergestream.bench.drift.pool_drift import Drift, LayerDrift
from mergestream.bench.landscape.landscape_figures import draw_plane, draw_segments, loss_label
from mergestream.bench.landscape.landscape_record import Landscape, Mark, describe_landscape
from mergestream.bench.report.figures import PALETTE, Panel, css_colour, panel
from mergestream.bench.report.page import Bullets, LegendKey, PageFigure, PageFold, PageSection, Part
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.result_table import ResultTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colour and shape both, for readers without colours.
STYLES: dict[Verdict, tuple[str, str]] = {
    HOLDS: (PALETTE[0], "o"),
    FAILS: (PALETTE[1], "X"),
    UNKNOWN: (PALETTE[6], "s"),
}


def draw_findings(ax: Axes, findings: Sequence[ClaimFinding]) -> None:
    """A dot and interval per finding, under the name of its measure; all are in one unit."""
    streams: dict[int, str] = {}
    row = 0
    for measure in dict.fromkeys(each.measure for each in findings):
        ax.text(0.01, row, measure, transform=ax.get_yaxis_transform(), va="center", fontsize=8, fontweight="bold")
        for each in findings:
            if each.measure == measure and each.estimate is not None:
                row += 1
                streams[row] = str(each.stream)
                colour, marker = STYLES[each.verdict]
                ax.plot([each.estimate.low, each.estimate.high], [row, row], color=colour, linewidth=1.4)
                ax.plot(each.estimate.mean, row, marker, color=colour, markersize=6, linestyle="none")
        row += 1
    ax.axvline(0, color="#888888", linewidth=0.8, linestyle=":")
    ax.set_yticks(list(streams), list(streams.values()), fontsize=8)
    ax.set_ylim(row - 0.5, -0.5)
    ax.set_xlabel(f"{findings[0].unit}; lines: intervals")
    ax.spines[["top", "right"]].set_visible(False)


def claims_section(report: ReportFindings) -> PageSection | None:
    measured = [each for each in report.claims if each.estimate is not None]
    missing = [f"{each.claim} {each.reason}" for each in report.claims if each.estimate is None]
    if not measured:
        return None
    parts: list[Part] = [claims_by_stream(measured), _claims_figure(measured)]
    parts += [Bullets(list(dict.fromkeys(missing)))] if missing else []
    return PageSection("The paper's claims", parts)


def _claims_figure(findings: Sequence[ClaimFinding]) -> PageFigure:
    panels: list[Panel] = []
    for unit in (CORRELATION, POINTS):
        here = [each for each in findings if each.unit == unit]
        panels += [_claims_panel(f"claims-{len(panels)}", unit, here)] if here else []
    keys = [LegendKey(verdict, css_colour(colour)) for verdict, (colour, _) in STYLES.items()]
    caption = "Each claim's number on each stream with its 95 % interval; right of 0 supports the claim."
    return PageFigure(panels, caption, keys)


def _claims_panel(name: str, unit: str, findings: Sequence[ClaimFinding]) -> Panel:
    counts = {verdict: sum(each.verdict == verdict for each in findings) for verdict in STYLES}
    verdicts = ", ".join(f"{verdict} {count} times" for verdict, count in counts.items())
    rows = len(findings) + len({each.measure for each in findings})
    return panel(
        name,
        f"{len(findings)} findings in {unit}, each a mark with its interval: the claim {verdicts}.",
        lambda ax: draw_findings(ax, findings),
        width=8.4,
        height=0.2 * rows + 0.9,
        title=f"Claims, in {unit}",
    )


def drift_section(report: ReportFindings) -> PageSection | None:
    if report.drift is None:
        return None
    drift = report.drift
    figure = PageFigure(
        [_drift_panel(each, drift) for each in figures_of(drift)],
        f"Weights of {', '.join(drift.experts)}, compared pair by pair, layer by layer. The numbers are in the table.",
    )
    return PageSection(
        "Drift", [Bullets(describe_drift(drift)), figure, PageFold("Layer by layer", [_drift_table(drift)])]
    )


def _drift_panel(figure: DriftFigure, drift: Drift) -> Panel:
    heat_map = figure.name == HEAT_MAP
    return panel(
        f"drift-{figure.name}",
        f"{figure.title}. {_extremes(drift)}",
        lambda ax: draw(ax, figure),
        width=min(6.6, max(5.4, 0.34 * len(drift.layers) + 1.6)),
        height=0.36 * len(drift.components) + 1.6 if heat_map else 3.6,
        title=figure.title,
        is_card=heat_map,
    )


def _extremes(drift: Drift) -> str:
    """The layers with the smallest and the largest angle, for readers who cannot see the figures."""
    angles = [(layer.whole.mean_angle, layer.label) for layer in drift.layers if layer.whole.mean_angle is not None]
    if not angles:
        return "No pair of layers has an angle."
    (low, nearest), (high, farthest) = min(angles), max(angles)
    return f"Layers are from {low:.1f} degrees ({nearest}) to {high:.1f} degrees ({farthest}) apart."


def _drift_table(drift: Drift) -> ResultTable:
    rows = tuple(_drift_row(layer) for layer in drift.layers)
    columns = ("layer", "mean angle °", "norm ratio", "signal lost %, measured", "signal lost %, implied")
    note = "Means over all pairs of experts; measured: 1 − |mean p| / mean |p|; implied by the angle: 1 − cos(angle/2)."
    return ResultTable("Drift by layer", columns, rows, note=note)


def _drift_row(layer: LayerDrift) -> tuple[str, ...]:
    whole = layer.whole
    values = (whole.mean_angle, 1), (whole.mean_norm_ratio, 3), (whole.measured_loss, 2), (whole.implied_loss, 2)
    return layer.label, *("–" if value is None else f"{value:.{digits}f}" for value, digits in values)


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
    return PageSection("Loss landscape", [Bullets(sentences), figure, _landscape_table(landscape)])


def _landscape_table(landscape: Landscape) -> ResultTable:
    rows = tuple(_landscape_row(mark) for mark in landscape.marks)
    columns = ("network", "kind", "loss, nats", "accuracy %", "distance from the plane")
    return ResultTable("Networks in the landscape", columns, rows, note=f"Loss: {loss_label(landscape)}.")


def _landscape_row(mark: Mark) -> tuple[str, ...]:
    loss = "–" if mark.loss is None else f"{mark.loss:.3f}"
    accuracy = "–" if mark.accuracy is None else f"{100 * mark.accuracy:.1f}"
    return mark.name, mark.kind, loss, accuracy, f"{mark.distance:.2g}"
