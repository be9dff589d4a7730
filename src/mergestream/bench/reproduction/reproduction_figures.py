"""Figures of a reproduction, on the page and as files: drift, landscape, accuracy against skew, angles of pairs."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes

from mergestream.bench.analysis.comparison import grouped
from mergestream.bench.claims.theory_checks import DriftPoint
from mergestream.bench.drift.drift_figures import (
    GREY,
    DriftFigure,
    figures_of,
    layer_panel,
    pair_heat_maps,
    static_figure,
)
from mergestream.bench.drift.pool_drift import Drift
from mergestream.bench.landscape.landscape_figures import landscape_figure
from mergestream.bench.landscape.landscape_record import Landscape
from mergestream.bench.report.figures import METHOD, Panel, colours_of, css_colour, new_figure, panel, write_figure
from mergestream.bench.report.page import LegendKey, slug
from mergestream.bench.reproduction.paper_values import DATASETS, ROWS, backbone_title
from mergestream.bench.reproduction.reproduction_record import MeasuredRow, ReproductionRecord

COLOURS, SET_COLOURS = colours_of(ROWS), colours_of(tuple(DATASETS))
OWN_ROW = "entropy-adaptive"


def drift_figures(drift: Drift) -> list[DriftFigure]:
    """Figure 2: angles and scale drift by layer."""
    return [figure for figure in figures_of(drift) if figure.name in ("drift_by_depth", "norm_ratios")]


def drift_panels(drift: Drift) -> list[Panel]:
    return [_drift_panel("fig2", figure) for figure in drift_figures(drift)]


def pair_panels(drift: Drift) -> list[Panel]:
    """Figure 5: one heat map per pair."""
    return [_drift_panel("fig5", figure) for figure in pair_heat_maps(drift)]


def _drift_panel(name: str, figure: DriftFigure) -> Panel:
    alternative = f"{figure.title}, over {len(figure.layers)} layers in order of depth. The numbers are in the table."
    return layer_panel(f"{name}-{slug(figure.name)}", figure, alternative)


def skew_panels(record: ReproductionRecord) -> list[Panel]:
    """Figure 4: one panel per data set."""
    panels = []
    for dataset, rows in grouped(record.of_part("fig4"), "dataset").items():
        best = max(rows, key=lambda row: row.accuracy.mean)
        alternative = (
            f"Accuracy of {len(ROWS)} methods on {DATASETS[dataset]} by stream; the highest is {best.row} on "
            f"{best.stream} with {100 * best.accuracy.mean:.1f} %."
        )
        title = f"{DATASETS[dataset]}, {backbone_title(rows[0].network)}"
        panels.append(panel(f"fig4-{dataset}", alternative, draw_skew, rows, title=title, width=6.0, height=3.8))
    return panels


def skew_keys() -> list[LegendKey]:
    return [LegendKey(row, css_colour(colour), is_method=True) for row, colour in COLOURS.items()]


def draw_skew(ax: Axes, rows: Sequence[MeasuredRow]) -> None:
    """A line per method over the streams, from the least skewed to the most."""
    shares = {stream: sum(row.majority for row in own) / len(own) for stream, own in grouped(rows, "stream").items()}
    streams = sorted(shares, key=shares.__getitem__)
    for name, colour in COLOURS.items():
        means = {row.stream: 100 * row.accuracy.mean for row in rows if row.row == name}
        own = [stream for stream in streams if stream in means]
        width = 2.6 if name == OWN_ROW else 1.4
        line = ax.plot([streams.index(s) for s in own], [means[s] for s in own], "o-", color=colour, linewidth=width)
        line[0].set(gid=f"{METHOD}{name}", markersize=4, label=name)
    ax.set_xticks(range(len(streams)), [f"{stream}\n{100 * shares[stream]:.0f} %" for stream in streams])
    ax.set_xlabel("stream, and the mean share of a batch's commonest class")
    ax.set_ylabel("accuracy, %")


def drift_panel(record: ReproductionRecord) -> Panel:
    """Drift against failure, a dot per target, a colour per data set."""
    points = [point for check in record.theory for point in check.drift]
    alternative = f"Failure of the mean against the angle between experts, {len(points)} targets. See the table."
    return panel("theory-drift", alternative, draw_drift_points, points, width=6.4, height=3.8)


def drift_keys(record: ReproductionRecord) -> list[LegendKey]:
    names = dict.fromkeys(check.dataset for check in record.theory)
    return [LegendKey(DATASETS[name], css_colour(SET_COLOURS[name])) for name in names]


def draw_drift_points(ax: Axes, points: Sequence[DriftPoint]) -> None:
    for name, colour in SET_COLOURS.items():
        own = [point for point in points if point.dataset == name]
        ax.plot([point.angle for point in own], [100 * point.failure for point in own], "o", color=colour, alpha=0.8)
    ax.axhline(0, color=GREY, linewidth=0.8, linestyle=":")
    ax.set_xlabel("mean angle between the experts' encoder blocks, degrees")
    ax.set_ylabel("failure of the mean, points")


def write_figures(record: ReproductionRecord, drift: Drift | None, landscape: Landscape | None, folder: Path) -> None:
    """Every figure of the page as PNG, PDF and SVG."""
    if drift is not None and "fig2" in record.parts:
        for figure in drift_figures(drift):
            write_figure(static_figure(figure), folder, f"fig2-{slug(figure.name)}", dpi=150)
    if landscape is not None:
        write_figure(landscape_figure(landscape), folder, "fig3", dpi=150)
    for dataset, rows in grouped(record.of_part("fig4"), "dataset").items():
        chart, axes = new_figure(6.4, 4.2)
        draw_skew(axes[0, 0], rows)
        axes[0, 0].set_title(f"{DATASETS[dataset]}, {backbone_title(rows[0].network)}", loc="left")
        axes[0, 0].legend(fontsize=7, frameon=False)
        write_figure(chart, folder, f"fig4-{dataset}", dpi=150)
    if drift is not None and "fig5" in record.parts:
        for each in pair_heat_maps(drift):
            write_figure(static_figure(each), folder, f"fig5-{slug(each.name)}", dpi=150)
