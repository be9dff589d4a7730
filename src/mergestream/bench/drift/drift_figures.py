"""Figures of a pool's drift: what each shows, as data for all drawings, and the static drawings by matplotlib."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mergestream.bench.drift.pool_drift import Drift, LayerDrift
from mergestream.bench.drift.spread import BaseSpread, Spread
from mergestream.bench.report.figures import PALETTE, Panel, colours_of, draw_heat, new_figure, panel

GUIDES = (45, 80)  # degrees, after Model Stock
HALF = 50  # percent of the signal
BLUE, VERMILION, GREEN, GREY = PALETTE[0], PALETTE[1], PALETTE[2], "#888888"


class DriftLine(NamedTuple):
    """One value per layer [layers], NaN where it is not defined; `style` as in matplotlib."""

    name: str
    values: np.ndarray
    colour: str
    style: str = "o-"


@dataclass(frozen=True)
class DriftFigure:
    """A figure over the layers in order of depth: lines with every pair behind them, or a heat map."""

    name: str
    title: str
    y_label: str
    unit: str
    layers: Sequence[LayerDrift]
    lines: Sequence[DriftLine] = ()
    pairs: Mapping[str, np.ndarray] = field(default_factory=dict)  # pair -> values [layers]
    guides: Sequence[float] = ()
    shaded_from: float | None = None  # up to 100
    y_range: tuple[float, float] | None = None
    is_log: bool = False
    heat_rows: Sequence[str] = ()
    heat: np.ndarray | None = None  # [rows, layers]
    heat_top: float = 90.0  # the end of the colours, unless a value is above it


def figures_of(drift: Drift) -> list[DriftFigure]:
    """All figures for which the pool has numbers."""
    layers, whole = drift.layers, [layer.whole for layer in drift.layers]
    figures: list[DriftFigure] = []
    if drift.pairs:
        title, label = "Directional drift: angle between experts by layer", "angle between experts, degrees"
        lines, pairs = _mean_and_pairs(drift, whole, "mean_angle", "angles")
        figures.append(_angle_figure(drift, "drift_by_depth", title, label, lines, pairs))

        title, label = "Directional drift of weights and of biases", "mean angle of all pairs, degrees"
        lines = [
            DriftLine("weights", _column([layer.weights for layer in layers], "mean_angle"), BLUE),
            DriftLine("biases", _column([layer.biases for layer in layers], "mean_angle"), VERMILION, "s--"),
        ]
        figures.append(_angle_figure(drift, "weights_and_biases", title, label, lines, {}))

        title, label = "Scale drift: norm ratio between experts by layer", "norm ratio, larger / smaller (1 = equal)"
        lines, pairs = _mean_and_pairs(drift, whole, "mean_norm_ratio", "norm_ratios")
        figures.append(DriftFigure("norm_ratios", title, label, "", layers, lines, pairs, guides=(1,)))

        title, label = "Signal lost by averaging, by layer", "signal lost by averaging, %"
        lines = [
            DriftLine("implied by the mean angle of two", _column(whole, "implied_loss"), GREEN, "s--"),
            DriftLine("measured on the mean of all", _column(whole, "measured_loss"), BLUE),
        ]
        figure = DriftFigure("signal_loss", title, label, " %", layers, lines, shaded_from=HALF, y_range=(0, 100))
        figures.append(figure)

        title, rows = "Angle between experts by component and layer", drift.components
        heat = [_column([layer.components.get(name) for layer in layers], "mean_angle") for name in rows]
        figure = DriftFigure("component_heat_map", title, "", "°", layers, heat_rows=rows, heat=np.stack(heat))
        figures.append(figure)
    if drift.has_base:
        figures.append(_distances_from_base(drift))
    if drift.has_base and drift.pairs:
        title, label = "Directions taken from the shared start", "angle between (expert − base), degrees"
        lines, pairs = _mean_and_pairs(drift, [each.from_base for each in whole], "mean_angle", "angles")
        figures.append(_angle_figure(drift, "angles_from_base", title, label, lines, pairs))
    return figures


def pair_heat_maps(drift: Drift) -> list[DriftFigure]:
    """Angles by component and layer, one heat map per pair of experts."""
    spreads = [[layer.components.get(name) for layer in drift.layers] for name in drift.components]
    heats = [
        np.array([[each.angles[number] if each else None for each in row] for row in spreads], dtype=float)
        for number in range(len(drift.pairs))
    ]
    top, layers, rows = float(np.nanmax([90.0, *(np.nanmax(heat) for heat in heats)])), drift.layers, drift.components
    return [
        DriftFigure(f"pair_{a}_{b}", f"{a} – {b}", "", "°", layers, heat_rows=rows, heat=heat, heat_top=top)
        for (a, b), heat in zip(drift.pairs, heats, strict=True)
    ]


def _mean_and_pairs(
    drift: Drift, spreads: Sequence[Spread | BaseSpread | None], mean: str, quantity: str
) -> tuple[list[DriftLine], dict[str, np.ndarray]]:
    """The line of all pairs' mean, and the values [layers] of every pair, by the names of both in a spread."""
    columns = np.array([getattr(each, quantity) for each in spreads], dtype=float).T
    pairs = {f"{one} – {other}": column for (one, other), column in zip(drift.pairs, columns, strict=True)}
    return [DriftLine("mean of all pairs", _column(spreads, mean), BLUE)], pairs


def _angle_figure(
    drift: Drift, name: str, title: str, label: str, lines: list[DriftLine], pairs: Mapping[str, np.ndarray]
) -> DriftFigure:
    top = np.nanmax([95.0, *(1.05 * np.concatenate([*(line.values for line in lines), *pairs.values()]))])
    return DriftFigure(name, title, label, "°", drift.layers, lines, pairs, GUIDES, y_range=(0, top))


def _distances_from_base(drift: Drift) -> DriftFigure:
    """The distance of each expert from the shared start, relative to the start's norm."""
    bases = [layer.whole.from_base for layer in drift.layers if layer.whole.from_base]
    shares = np.array([base.relative_norms for base in bases], dtype=float)
    lines = []
    for k, (name, colour) in enumerate(colours_of(drift.experts).items()):
        style = ("o-", "s--", "^:")[k // len(PALETTE) % 3]  # colours repeat from here on
        lines.append(DriftLine(name, 100 * shares[:, k], colour, style))
    title, label = "Drift from the shared start, by layer", "‖expert − base‖ / ‖base‖, %"
    # On a log scale a frozen layer stands at 0, a new head far above 100.
    return DriftFigure("drift_from_base", title, label, " %", drift.layers, lines, is_log=True)


def _column(spreads: Sequence[Spread | BaseSpread | None], quantity: str) -> np.ndarray:
    """A quantity by layer [layers], NaN where it is not defined."""
    return np.array([getattr(each, quantity, None) for each in spreads], dtype=float)


def static_figure(figure: DriftFigure) -> Figure:
    """The figure on its own, with its title."""
    width = max(6.4, 0.34 * len(figure.layers) + 1.6)
    height = 4.0 if figure.heat is None else max(3.2, 0.36 * len(figure.heat_rows) + 1.6)
    drawing, axes = new_figure(width, height)
    draw(axes[0, 0], figure)
    axes[0, 0].set_title(figure.title, loc="left", fontsize=11)
    return drawing


def layer_panel(name: str, figure: DriftFigure, alternative: str) -> Panel:
    """The figure for a page."""
    width = min(6.6, max(5.4, 0.34 * len(figure.layers) + 1.6))
    is_heat = figure.heat is not None
    height = 0.36 * len(figure.heat_rows) + 1.6 if is_heat else 3.6
    shown: dict[str, Any] = {"title": figure.title, "width": width, "height": height, "is_card": is_heat}
    return panel(name, alternative, draw, figure, **shown)


def draw(ax: Axes, figure: DriftFigure) -> None:
    """Draw lines, pairs and guides, or the heat map, over the layers."""
    if figure.heat is not None:
        return _draw_heat_map(ax, figure, figure.heat)
    if figure.shaded_from is not None:
        label = f"≥ {figure.shaded_from:g} % lost"
        ax.axhspan(figure.shaded_from, 100, color=VERMILION, alpha=0.12, linewidth=0, label=label)
    layers = np.arange(len(figure.layers))
    if figure.pairs:
        heights = np.concatenate(list(figure.pairs.values()))
        places = np.tile(layers, len(figure.pairs))
        ax.plot(places, heights, "o", color=GREY, markersize=3, alpha=0.6, label="one pair of experts")
    for line in figure.lines:
        ax.plot(layers, line.values, line.style, color=line.colour, linewidth=1.6, markersize=4, label=line.name)
    right = ax.get_yaxis_transform()
    for guide in figure.guides:
        ax.axhline(guide, color=GREY, linewidth=0.8, linestyle=":")
        ax.text(1.01, guide, f"{guide:g}{figure.unit}", transform=right, va="center", fontsize=8)
    if figure.y_range:
        ax.set_ylim(*figure.y_range)
    if figure.is_log:
        ax.set_yscale("symlog", linthresh=1, linscale=0.4)
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_formatter("{x:g}")
    ax.set_ylabel(figure.y_label)
    ax.legend(fontsize=8, frameon=False, loc="upper left" if figure.shaded_from is not None else "best")
    return _label_layers(ax, figure)


def _draw_heat_map(ax: Axes, figure: DriftFigure, angles: np.ndarray) -> None:
    highest = max(figure.heat_top, float(np.nanmax(angles)))
    fits = len(figure.layers) <= 20  # beyond, the numbers do not fit in the cells

    def number(angle: float) -> str:
        return f"{angle:.0f}" if fits and np.isfinite(angle) else ""

    image = draw_heat(ax, angles, figure.heat_rows, 0.0, highest, number, size=7)
    _label_layers(ax, figure)
    ax.figure.colorbar(image, ax=ax, label="angle, degrees", pad=0.02)


def _label_layers(ax: Axes, figure: DriftFigure) -> None:
    labels = [layer.label for layer in figure.layers]
    crowded = max(map(len, labels)) * len(labels) > 60
    ax.set_xticks(range(len(labels)), labels, rotation=90 if crowded else 0, fontsize=8)
    ax.set_xlabel("layer, in order of depth")
    ax.set_xlim(-0.5, len(labels) - 0.5)
