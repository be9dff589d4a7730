"""Parts of the report's sections on the paper's claims and on the experts: drift and loss landscape."""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes

from mergestream.bench.claims.claim_finding import CORRELATION, FAILS, HOLDS, POINTS, UNKNOWN, ClaimFinding, Verdict
from mergestream.bench.drift.drift_figures import figures_of, layer_panel
from mergestream.bench.drift.pool_drift import Drift, LayerDrift
from mergestream.bench.landscape.landscape_figures import draw_plane, draw_segments
from mergestream.bench.landscape.landscape_record import Landscape, Mark, describe_landscape
from mergestream.bench.report.figures import PALETTE, Panel, css_colour, panel
from mergestream.bench.report.page import LegendKey
from mergestream.bench.report.result_table import ResultTable, format_number, record_table

# Colour and shape both, for readers without colours.
STYLES: dict[Verdict, tuple[str, str]] = {
    HOLDS: (PALETTE[0], "o"),
    FAILS: (PALETTE[1], "X"),
    UNKNOWN: (PALETTE[6], "s"),
}
CLAIM_KEYS = [LegendKey(verdict, css_colour(colour)) for verdict, (colour, _) in STYLES.items()]


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


def missing_claims(claims: Sequence[ClaimFinding]) -> list[str]:
    return list(dict.fromkeys(f"{each.claim} {each.reason}" for each in claims if each.estimate is None))


def claims_panels(findings: Sequence[ClaimFinding]) -> list[Panel]:
    """One panel per unit."""
    panels: list[Panel] = []
    for unit in (CORRELATION, POINTS):
        here = [each for each in findings if each.unit == unit]
        counts = {verdict: sum(each.verdict == verdict for each in here) for verdict in STYLES}
        verdicts = ", ".join(f"{verdict} {count} times" for verdict, count in counts.items())
        alternative = f"{len(here)} findings in {unit}, each a mark with its interval: the claim {verdicts}."
        height = 0.2 * (len(here) + len({each.measure for each in here})) + 0.9
        name, title = f"claims-{len(panels)}", f"Claims, in {unit}"
        panels += [panel(name, alternative, draw_findings, here, width=8.4, height=height, title=title)] if here else []
    return panels


def drift_panels(drift: Drift) -> list[Panel]:
    extremes = _extremes(drift)
    return [layer_panel(f"drift-{each.name}", each, f"{each.title}. {extremes}") for each in figures_of(drift)]


def _extremes(drift: Drift) -> str:
    """The layers with the smallest and the largest angle, for readers who cannot see the figures."""
    angles = [(layer.whole.mean_angle, layer.label) for layer in drift.layers if layer.whole.mean_angle is not None]
    if not angles:
        return "No pair of layers has an angle."
    (low, nearest), (high, farthest) = min(angles), max(angles)
    return f"Layers are from {low:.1f} degrees ({nearest}) to {high:.1f} degrees ({farthest}) apart."


def drift_table(drift: Drift) -> ResultTable:
    columns: dict[str, Callable[[LayerDrift], str]] = {
        "layer": lambda layer: layer.label,
        "mean angle °": lambda layer: format_number(layer.whole.mean_angle, 1),
        "norm ratio": lambda layer: format_number(layer.whole.mean_norm_ratio, 3),
        "signal lost %, measured": lambda layer: format_number(layer.whole.measured_loss, 2),
        "signal lost %, implied": lambda layer: format_number(layer.whole.implied_loss, 2),
    }
    note = "Means over all pairs of experts; measured: 1 − |mean p| / mean |p|; implied by the angle: 1 − cos(angle/2)."
    return record_table("Drift by layer", drift.layers, columns, note)


def landscape_panels(landscape: Landscape) -> list[Panel]:
    sentences = describe_landscape(landscape)
    plane = f"Contours of the loss over the plane through {', '.join(landscape.experts)}. {sentences[0]}"
    lines = f"The loss on the straight lines between the experts. {sentences[1]}"
    title = "segments between experts"
    return [
        panel("landscape-plane", plane, draw_plane, landscape, width=6.4, height=4.8, is_card=True),
        panel("landscape-segments", lines, draw_segments, landscape, width=6.4, height=4.8, title=title),
    ]


def landscape_table(landscape: Landscape) -> ResultTable:
    columns: dict[str, Callable[[Mark], str]] = {
        "network": lambda mark: mark.name,
        "kind": lambda mark: mark.kind,
        "loss, nats": lambda mark: format_number(mark.loss, 3),
        "accuracy %": lambda mark: format_number(mark.accuracy, 1, 100),
        "distance from the plane": lambda mark: f"{mark.distance:.2g}",
    }
    return record_table("Networks in the landscape", landscape.marks, columns, f"Loss: {landscape.loss_label}.")
