"""How far apart the experts' weights are, from a drift record."""

from mergestream.bench.drift.drift_figures import HEAT_MAP, DriftFigure, draw, figures_of
from mergestream.bench.drift.drift_report import describe_drift
from mergestream.bench.drift.pool_drift import Drift, LayerDrift
from mergestream.bench.report.page import Bullets, PageFigure, PageFold, PageSection
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.result_table import ResultTable
from mergestream.bench.report.svg import Panel, panel


def drift_section(report: ReportFindings) -> PageSection | None:
    if report.drift is None:
        return None
    drift = report.drift
    figure = PageFigure(
        [_panel(each, drift) for each in figures_of(drift)],
        f"Weights of {', '.join(drift.experts)}, compared pair by pair, layer by layer. The numbers are in the table.",
    )
    return PageSection("Drift", [Bullets(describe_drift(drift)), figure, PageFold("Layer by layer", [_table(drift)])])


def _panel(figure: DriftFigure, drift: Drift) -> Panel:
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


def _table(drift: Drift) -> ResultTable:
    rows = tuple(_row(layer) for layer in drift.layers)
    columns = ("layer", "mean angle °", "norm ratio", "signal lost %, measured", "signal lost %, implied")
    note = "Means over all pairs of experts; measured: 1 − |mean p| / mean |p|; implied by the angle: 1 − cos(angle/2)."
    return ResultTable("Drift by layer", columns, rows, note=note)


def _row(layer: LayerDrift) -> tuple[str, ...]:
    whole = layer.whole
    values = (whole.mean_angle, 1), (whole.mean_norm_ratio, 3), (whole.measured_loss, 2), (whole.implied_loss, 2)
    return layer.label, *("–" if value is None else f"{value:.{digits}f}" for value, digits in values)
