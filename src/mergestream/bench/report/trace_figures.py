"""Figures of a Trace over its stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from mergestream.bench.analysis.traces import Trace
from mergestream.bench.report.figures import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREY = "#888888"
PARTS = {"encoder": "encoder_coefficients", "head": "head_coefficients"}


def draw_coefficients_over_time(ax: Axes, trace: Trace, part: str, colours: Mapping[str, str]) -> None:
    """One line per expert, for the encoder or the head; dashed lines at changes of level, dotted at 1/K."""
    values = getattr(trace, PARTS[part])
    if values is None:
        return _draw_reason(ax, f"{trace.label} has no {part} coefficients")
    _draw_experts(ax, values, trace, colours, f"{part} coefficient")
    ax.axhline(1 / len(trace.experts), color=GREY, linewidth=0.8, linestyle=":")
    ax.set_ylim(-0.02, 1.02)
    return _mark_changes(ax, trace.coefficient_changes)


def draw_entropies(ax: Axes, trace: Trace, colours: Mapping[str, str]) -> None:
    """One line per expert; dots if some batches were not scored."""
    if trace.entropy is None:
        return _draw_reason(ax, f"{trace.label} records no entropies")
    _draw_experts(ax, trace.entropy, trace, colours, "entropy, nats")
    ax.set_ylim(bottom=0)
    return _mark_changes(ax, trace.entropy_changes)


def draw_accuracy_over_time(ax: Axes, trace: Trace) -> None:
    """A dot per batch and the running mean over all images so far, with the entropies' change points."""
    if trace.accuracy is None or trace.running_accuracy is None:
        return _draw_reason(ax, "this stream has no labels")
    batches = np.arange(1, len(trace.accuracy) + 1)
    ax.plot(batches, 100 * trace.accuracy, "o", color=PALETTE[5], markersize=3.5, label="this batch")
    ax.plot(batches, 100 * trace.running_accuracy, color=PALETTE[0], linewidth=1.6, label="all so far")
    ax.set_ylim(-2, 102)
    _label_axes(ax, "accuracy, %")
    return _mark_changes(ax, trace.entropy_changes)


def _draw_experts(ax: Axes, values: np.ndarray, trace: Trace, colours: Mapping[str, str], label: str) -> None:
    """One line per expert; values [T,K]."""
    marker = "." if np.isnan(values).any() else ""
    for name, line in zip(trace.experts, values.T, strict=True):
        ax.plot(np.arange(1, len(line) + 1), line, marker=marker, color=colours[name], linewidth=1.6, label=name)
    _label_axes(ax, label)


def _mark_changes(ax: Axes, changes: tuple[int, ...]) -> None:
    """A dashed line before each batch at which a new level begins."""
    for position, change in enumerate(changes):
        label = "change of level" if position == 0 else None
        ax.axvline(change + 0.5, color="#000000", linewidth=1.0, linestyle="--", label=label)


def _draw_reason(ax: Axes, reason: str) -> None:
    """An empty panel that says why it is empty."""
    ax.text(0.5, 0.5, reason, ha="center", va="center", transform=ax.transAxes, color=GREY, wrap=True)
    ax.set_axis_off()


def _label_axes(ax: Axes, label: str) -> None:
    ax.set_xlabel("batch")
    ax.set_ylabel(label)
    ax.spines[["top", "right"]].set_visible(False)
