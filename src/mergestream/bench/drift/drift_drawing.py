"""Static figures of drift, by matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mergestream.bench.drift.drift_figures import GREY, VERMILION, DriftFigure
from mergestream.bench.report.figures import new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def static_figure(figure: DriftFigure) -> Figure:
    """The figure on its own, with its title."""
    width = max(6.4, 0.34 * len(figure.layers) + 1.6)
    height = 4.0 if figure.heat is None else max(3.2, 0.36 * len(figure.heat_rows) + 1.6)
    drawing, axes = new_figure(width, height)
    draw(axes[0, 0], figure)
    axes[0, 0].set_title(figure.title, loc="left", fontsize=11)
    return drawing


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
    highest = max(90, float(np.nanmax(angles)))
    image = ax.imshow(angles, cmap="cividis", vmin=0, vmax=highest, aspect="auto")
    if len(figure.layers) <= 20:  # beyond, the numbers do not fit in the cells
        for (row, column), angle in np.ndenumerate(angles):
            if np.isfinite(angle):
                ink = "white" if angle < 0.55 * highest else "black"
                ax.text(column, row, f"{angle:.0f}", ha="center", va="center", fontsize=7, color=ink)
    ax.set_yticks(range(len(figure.heat_rows)), figure.heat_rows)
    _label_layers(ax, figure)
    ax.spines[:].set_visible(False)
    ax.figure.colorbar(image, ax=ax, label="mean angle, degrees", pad=0.02)


def _label_layers(ax: Axes, figure: DriftFigure) -> None:
    labels = [layer.label for layer in figure.layers]
    crowded = max(map(len, labels)) * len(labels) > 60
    ax.set_xticks(range(len(labels)), labels, rotation=90 if crowded else 0, fontsize=8)
    ax.set_xlabel("layer, in order of depth")
    ax.set_xlim(-0.5, len(labels) - 0.5)
    ax.spines[["top", "right"]].set_visible(False)
