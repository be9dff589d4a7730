"""Figures of a loss landscape: the plane through three experts, and the segments between them."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm
from matplotlib.figure import Figure

from mergestream.bench.landscape.landscape_record import EXPERT, MEAN, POOL_MEAN, Landscape, Mark
from mergestream.bench.report.figures import INK, PALETTE, new_figure
from mergestream.bench.report.method_figures import colour_of

# One hue from light valleys to dark heights: safe for colour-blind readers, and marks stand out on it.
COLOURS = "YlOrBr"
LEVELS = 16
EDGE = "#222222"
BESIDE: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9}
MARKERS = {EXPERT: ("o", 70), MEAN: ("*", 190), POOL_MEAN: ("D", 55)}


def landscape_figure(landscape: Landscape) -> Figure:
    """The plane beside the segments."""
    figure, axes = new_figure(11.5, 4.8, columns=2)
    figure.set_layout_engine("constrained", wspace=0.06)
    draw_plane(axes[0, 0], landscape)
    draw_segments(axes[0, 1], landscape)
    return figure


def draw_plane(ax: Axes, landscape: Landscape) -> None:
    """Filled contours of the loss with the experts, their mean and the path of the merged models."""
    values = np.ma.masked_invalid(np.array(landscape.loss, dtype=float))
    levels = _levels(values)
    colours = BoundaryNorm(levels, 256, extend="both")  # as many shades between any two levels
    filled = ax.contourf(landscape.x, landscape.y, values, levels, cmap=COLOURS, norm=colours, extend="both")
    ax.contour(filled, colors=EDGE, linewidths=0.4, alpha=0.3)
    bar = ax.figure.colorbar(filled, ax=ax, format="%.2f", ticks=levels[::3])
    bar.set_label(landscape.loss_label)
    corners = landscape.of_kind(EXPERT)
    ax.fill([mark.x for mark in corners], [mark.y for mark in corners], fill=False, edgecolor=EDGE, linestyle=":")
    _draw_path(ax, landscape)
    for mark in landscape.marks:
        _draw_mark(ax, mark)
    ax.set_aspect("equal")
    ax.spines[:].set_visible(True)
    ax.set_xlabel("distance in parameters along the first side")
    ax.set_ylabel("distance in parameters across it")
    title = f"the plane through {', '.join(landscape.experts)}\nloss on {landscape.images} images of {landscape.target}"
    ax.set_title(title, fontsize=9, loc="left")


def draw_segments(ax: Axes, landscape: Landscape) -> None:
    """The loss along every segment, with the highest barrier marked against the line between the ends."""
    for segment, colour, style in zip(landscape.segments, PALETTE, ("-", "--", "-."), strict=False):
        losses = np.array(segment.loss, dtype=float)
        ax.plot(segment.positions, losses, style, color=colour, linewidth=1.8, label=f"{segment.start} → {segment.end}")
        ax.plot([0, 1], losses[[0, -1]], ":", color=colour, linewidth=1)
    highest = max(landscape.segments, key=lambda segment: segment.barrier_height)
    if highest.barrier and highest.barrier.height > 0:
        at, height = highest.barrier.at, highest.barrier.height
        top = float(np.interp(at, highest.positions, np.array(highest.loss, dtype=float)))
        ax.annotate("", xy=(at, top), xytext=(at, top - height), arrowprops={"arrowstyle": "<->", "color": INK})
        ax.annotate(f"barrier {height:.3f} nats", (at, top), xytext=(0, 6), ha="center", **BESIDE)
    ax.set_xlabel("position between two experts, 0 to 1")
    ax.set_ylabel(landscape.loss_label)
    ax.legend(fontsize=8, frameon=False)


def _levels(values: np.ma.MaskedArray) -> np.ndarray:
    """Levels evenly spaced in the logarithm, over at most a factor of 50 below the 98th percentile.

    Far outside the experts the loss is many times theirs: a linear scale would leave the middle one colour.
    """
    finite = values.compressed()
    if not len(finite):
        return np.array([0.0, 1.0])
    high = max(float(np.percentile(finite, 98)), 1e-6)
    low = max(float(finite.min()), high / 50)
    return np.geomspace(0.999 * low, 1.001 * high, LEVELS)


def _draw_path(ax: Axes, landscape: Landscape) -> None:
    if landscape.path_method is None:
        return
    colour = colour_of(landscape.path_method)
    x, y = [point.x for point in landscape.path], [point.y for point in landscape.path]
    ax.plot(x, y, "-", color=colour, linewidth=0.8, alpha=0.6, zorder=3)
    ax.scatter(x, y, s=16, color=colour, edgecolors="white", linewidths=0.5, zorder=4, label=landscape.path_name)
    ax.scatter(x[:1], y[:1], s=34, marker="s", color=colour, edgecolors="white", zorder=4, label="its first batch")
    ax.legend(fontsize=8, loc="best", framealpha=0.85)


def _draw_mark(ax: Axes, mark: Mark) -> None:
    marker, size = MARKERS[mark.kind]
    # Hollow if off the plane: the colour around it is not its loss.
    face = "white" if mark.kind != POOL_MEAN else "none"
    ax.scatter([mark.x], [mark.y], s=size, marker=marker, color=face, edgecolors=EDGE, linewidths=1.3, zorder=5)
    box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.75}
    ax.annotate(mark.name, (mark.x, mark.y), xytext=(7, 7), zorder=6, bbox=box, **BESIDE)
