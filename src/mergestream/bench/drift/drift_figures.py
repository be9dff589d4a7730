"""Figures of a pool's drift: functions of a Drift that draw on a given axis and compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mergestream.bench.drift.arithmetic import BaseSpread, Spread
from mergestream.bench.drift.weights import Drift
from mergestream.bench.report.figures import PALETTE, colours_of, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GUIDES = (45, 80)  # degrees, after Model Stock
HALF = 50  # percent of the signal
BLUE, VERMILION, GREEN, GREY = PALETTE[0], PALETTE[1], PALETTE[2], "#888888"
ALONE = "One expert: there is no pair to compare."
NO_BASE = "The pool has no base/: there is no start to measure from."


def draw_drift_by_depth(ax: Axes, drift: Drift) -> None:
    """The mean angle of all pairs by layer, and every pair as a dot."""
    if not drift.pairs:
        return _say(ax, ALONE)
    _dots(ax, values(drift, lambda spread: spread.angles))
    _line(ax, values(drift, lambda spread: spread.mean_angle), BLUE, "o-", "mean of all pairs")
    _angle_axis(ax, drift, "angle between experts, degrees")
    return None


def draw_weights_and_biases(ax: Axes, drift: Drift) -> None:
    """The mean angle by layer for weights and for biases, against the guide lines."""
    if not drift.pairs:
        return _say(ax, ALONE)
    for apart, colour, style in (("weights", BLUE, "o-"), ("biases", VERMILION, "s--")):
        spreads = [getattr(layer, apart) for layer in drift.layers]
        _line(ax, [np.nan if each is None else _or_nan(each.mean_angle) for each in spreads], colour, style, apart)
    _angle_axis(ax, drift, "mean angle of all pairs, degrees")
    return None


def draw_signal_loss(ax: Axes, drift: Drift) -> None:
    """What averaging loses of the weights' length: implied by the mean angle, and measured."""
    if not drift.pairs:
        return _say(ax, ALONE)
    ax.axhspan(HALF, 100, color=VERMILION, alpha=0.12, linewidth=0, label=f"≥ {HALF} % lost")
    _line(ax, values(drift, lambda spread: spread.implied_loss), GREEN, "s--", "implied by the mean angle of two")
    _line(ax, values(drift, lambda spread: spread.measured_loss), BLUE, "o-", "measured on the mean of all")
    ax.set_ylim(0, 100)
    ax.set_ylabel("signal lost by averaging, %")
    _depth_axis(ax, drift)
    ax.legend(fontsize=8, frameon=False, loc="upper left")
    return None


def draw_norm_ratios(ax: Axes, drift: Drift) -> None:
    """Scale drift: the larger by the smaller norm of every pair, by layer."""
    if not drift.pairs:
        return _say(ax, ALONE)
    _dots(ax, values(drift, lambda spread: spread.norm_ratios))
    _line(ax, values(drift, lambda spread: spread.mean_norm_ratio), BLUE, "o-", "mean of all pairs")
    ax.axhline(1, color=GREY, linewidth=0.8, linestyle=":")
    ax.set_ylabel("norm ratio, larger / smaller (1 = equal)")
    _depth_axis(ax, drift)
    return None


def draw_component_heat_map(ax: Axes, drift: Drift) -> None:
    """The mean angle of all pairs by component and layer; the numbers stand in the cells where they fit."""
    if not drift.pairs:
        return _say(ax, ALONE)
    rows = component_angles(drift)
    highest = max(90, float(np.nanmax(rows)))
    image = ax.imshow(rows, cmap="cividis", vmin=0, vmax=highest, aspect="auto")
    if len(drift.layers) <= 20:
        for (row, column), angle in np.ndenumerate(rows):
            if np.isfinite(angle):
                ink = "white" if angle < 0.55 * highest else "black"
                ax.text(column, row, f"{angle:.0f}", ha="center", va="center", fontsize=7, color=ink)
    ax.set_yticks(range(len(rows)), drift.components)
    _depth_axis(ax, drift, legend=False)
    ax.spines[:].set_visible(False)
    ax.figure.colorbar(image, ax=ax, label="mean angle, degrees", pad=0.02)
    return None


def draw_drift_from_base(ax: Axes, drift: Drift) -> None:
    """How far each expert went from the shared start, relative to the start's norm, by layer."""
    if not drift.has_base:
        return _say(ax, NO_BASE)
    colours = colours_of(drift.experts)
    for k, (name, shares) in enumerate(zip(drift.experts, distances_from_base(drift).T, strict=True)):
        style = ("o-", "s--", "^:")[k // len(PALETTE) % 3]  # where colours come round again
        _line(ax, 100 * shares, colours[name], style, name)
    ax.set_yscale("symlog", linthresh=1, linscale=0.4)  # a frozen layer stands at 0, a new head far above 100
    ax.set_ylim(bottom=0)
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_ylabel("‖expert − base‖ / ‖base‖, %")
    _depth_axis(ax, drift)
    return None


def draw_angles_from_base(ax: Axes, drift: Drift) -> None:
    """Whether experts went the same way from the start: the angles between their Deltas, by layer."""
    if not drift.has_base or not drift.pairs:
        return _say(ax, ALONE if drift.has_base else NO_BASE)
    each, means = angles_from_base(drift)
    _dots(ax, each)
    _line(ax, means, BLUE, "o-", "mean of all pairs")
    _angle_axis(ax, drift, "angle between (expert − base), degrees")
    return None


# A file each: how it is drawn, and what it shows in words.
FIGURES: dict[str, tuple[Callable[[Axes, Drift], None], str]] = {
    "drift_by_depth": (draw_drift_by_depth, "Directional drift: angle between experts by layer"),
    "weights_and_biases": (draw_weights_and_biases, "Directional drift of weights and biases apart"),
    "norm_ratios": (draw_norm_ratios, "Scale drift: norm ratio between experts by layer"),
    "signal_loss": (draw_signal_loss, "Signal lost by averaging, by layer"),
    "component_heat_map": (draw_component_heat_map, "Angle between experts by component and layer"),
    "drift_from_base": (draw_drift_from_base, "Drift from the shared start, by layer"),
    "angles_from_base": (draw_angles_from_base, "Directions taken from the shared start"),
}


def figures_of(drift: Drift) -> dict[str, Figure]:
    """Every figure that this pool has, ready to be saved."""
    wide = max(6.4, 0.34 * len(drift.layers) + 1.6)
    drawn = {}
    for name, (draw, title) in FIGURES.items():
        if (name.endswith("from_base") and not drift.has_base) or (name != "drift_from_base" and not drift.pairs):
            continue
        tall = max(3.2, 0.36 * len(drift.components) + 1.6) if draw is draw_component_heat_map else 4.0
        drawn[name], axes = new_figure(wide, tall)
        draw(axes[0, 0], drift)
        axes[0, 0].set_title(title, loc="left", fontsize=11)
    return drawn


def values(drift: Drift, quantity: Callable[[Spread], float | Sequence[float | None] | None]) -> np.ndarray:
    """A quantity of all layers as an array, by depth; NaN where it is not defined."""
    return np.array([quantity(layer.whole) for layer in drift.layers], dtype=float)


def component_angles(drift: Drift) -> np.ndarray:
    """Mean angles [components, layers]; NaN where a layer has no such part."""
    cells = [[layer.components.get(name) for layer in drift.layers] for name in drift.components]
    return np.array([[np.nan if cell is None else _or_nan(cell.mean_angle) for cell in row] for row in cells])


def distances_from_base(drift: Drift) -> np.ndarray:
    """Of every expert [layers, K], relative to the base's norm; NaN where that is zero."""
    return np.array([spread.relative_norms for spread in _bases(drift)], dtype=float)


def angles_from_base(drift: Drift) -> tuple[np.ndarray, np.ndarray]:
    """Between the Deltas of every pair [layers, pairs], and their means [layers]."""
    spreads = _bases(drift)
    each = np.array([spread.angles for spread in spreads], dtype=float)
    return each, np.array([spread.mean_angle for spread in spreads], dtype=float)


def _bases(drift: Drift) -> list[BaseSpread]:
    return [layer.whole.from_base for layer in drift.layers if layer.whole.from_base is not None]


def _or_nan(value: float | None) -> float:
    return np.nan if value is None else value


def _line(ax: Axes, heights: Sequence[float] | np.ndarray, colour: str, style: str, label: str) -> None:
    ax.plot(range(len(heights)), heights, style, color=colour, linewidth=1.6, markersize=4, label=label)


def _dots(ax: Axes, heights: np.ndarray) -> None:
    """Every pair by layer; heights [layers, pairs]."""
    layers = np.repeat(np.arange(len(heights)), heights.shape[1])
    label = "one pair of experts"
    ax.plot(layers, heights.ravel(), "o", color=GREY, markersize=3, alpha=0.6, label=label)


def _angle_axis(ax: Axes, drift: Drift, label: str) -> None:
    for guide in GUIDES:
        ax.axhline(guide, color=GREY, linewidth=0.8, linestyle=":")
        ax.text(1.01, guide, f"{guide}°", transform=ax.get_yaxis_transform(), va="center", fontsize=8, color="#555555")
    ax.set_ylim(0, max(95, 1.05 * ax.dataLim.y1))
    ax.set_ylabel(label)
    _depth_axis(ax, drift)


def _depth_axis(ax: Axes, drift: Drift, legend: bool = True) -> None:
    labels = [layer.label for layer in drift.layers]
    crowded = max(map(len, labels)) * len(labels) > 60
    ax.set_xticks(range(len(labels)), labels, rotation=90 if crowded else 0, fontsize=8)
    ax.set_xlabel("layer, in order of depth")
    ax.set_xlim(-0.5, len(labels) - 0.5)
    ax.spines[["top", "right"]].set_visible(False)
    if legend:
        ax.legend(fontsize=8, frameon=False)


def _say(ax: Axes, sentence: str) -> None:
    ax.text(0.5, 0.5, sentence, ha="center", va="center", transform=ax.transAxes, fontsize=9)
    ax.set_axis_off()
