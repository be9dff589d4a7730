"""How far apart the experts' weights are, from a drift record."""

from mergestream.bench.drift.drift_figures import FIGURES
from mergestream.bench.drift.drift_text import drift_in_words
from mergestream.bench.drift.weights import Drift, LayerDrift
from mergestream.bench.report.page import Fold, Picture, Section, bullets
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.svg import Panel, panel
from mergestream.bench.report.tables import Table

HEAT_MAP = "component_heat_map"


def drift(report: ReportFindings) -> Section | None:
    if report.drift is None:
        return None
    found = report.drift
    names = [name for name in FIGURES if found.has_base or not name.endswith("from_base")]
    picture = Picture(
        [_panel(name, found) for name in names],
        f"Weights of {', '.join(found.experts)}, compared pair by pair, layer by layer. The numbers are in the table.",
    )
    return Section("Drift", [bullets(drift_in_words(found)), picture, Fold("Layer by layer", [_table(found)])])


def _panel(name: str, found: Drift) -> Panel:
    draw, title = FIGURES[name]
    return panel(
        f"drift-{name}",
        f"{title}. {_seen(found)}",
        lambda ax: draw(ax, found),
        width=min(6.6, max(5.4, 0.34 * len(found.layers) + 1.6)),
        height=0.36 * len(found.components) + 1.6 if name == HEAT_MAP else 3.6,
        title=title,
        is_card=name == HEAT_MAP,
    )


def _seen(found: Drift) -> str:
    """What the figures have in common, for who cannot see them: the extremes by angle."""
    known = [(layer.whole.mean_angle, layer.label) for layer in found.layers if layer.whole.mean_angle is not None]
    if not known:
        return "No pair of layers has an angle."
    (low, nearest), (high, farthest) = min(known), max(known)
    return f"Layers lie from {low:.1f} degrees ({nearest}) to {high:.1f} degrees ({farthest}) apart."


def _table(found: Drift) -> Table:
    rows = tuple(_row(layer) for layer in found.layers)
    columns = ("layer", "mean angle °", "norm ratio", "signal lost %, measured", "signal lost %, implied")
    note = "Means over all pairs of experts; measured: 1 − |mean p| / mean |p|; implied by the angle: 1 − cos(angle/2)."
    return Table("Drift by layer", columns, rows, note=note)


def _row(layer: LayerDrift) -> tuple[str, ...]:
    whole = layer.whole
    values = (whole.mean_angle, 1), (whole.mean_norm_ratio, 3), (whole.measured_loss, 2), (whole.implied_loss, 2)
    return layer.label, *("–" if value is None else f"{value:.{digits}f}" for value, digits in values)
