"""What happened over a stream, drawn: functions of a Trace that compute nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from mergestream.bench.analysis.traces import Trace
from mergestream.bench.report.figures import PALETTE, colours_of, draw_coefficients

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GREY = "#888888"
PARTS = {"encoder": "encoder_coefficients", "head": "head_coefficients"}


def draw_coefficients_over_time(
    ax: Axes, trace: Trace, part: str = "encoder", colours: Mapping[str, str] | None = None
) -> None:
    """One line per expert, `part` 'encoder' or 'head'; dashed lines where the coefficients change their level."""
    values = getattr(trace, PARTS[part])
    if values is None:
        return draw_nothing(ax, f"{trace.label} has no {part} coefficients")
    draw_coefficients(ax, values, trace.experts, colours or colours_of(trace.experts))
    ax.set_ylabel(f"{part} coefficient")
    return mark_changes(ax, trace.coefficient_changes)


def draw_entropies(ax: Axes, trace: Trace, colours: Mapping[str, str] | None = None) -> None:
    """One line per expert; where batches were not scored, dots stand alone."""
    if trace.entropy is None:
        return draw_nothing(ax, f"{trace.label} records no entropies")
    _lines(ax, trace.entropy, trace, colours)
    ax.set_ylim(bottom=0)
    ax.set_ylabel("entropy, nats")
    return mark_changes(ax, trace.entropy_changes)


def draw_consistency(ax: Axes, trace: Trace, colours: Mapping[str, str] | None = None) -> None:
    """One line per expert: 1 where views of an image change nothing."""
    if trace.consistency is None:
        return draw_nothing(ax, f"{trace.label} records no consistency")
    _lines(ax, trace.consistency, trace, colours)
    ax.set_ylim(top=1.0)
    ax.set_ylabel("consistency, 0 to 1")
    return None


def draw_effective_experts(ax: Axes, trace: Trace) -> None:
    """exp of the coefficients' entropy for encoder and head, between one expert and all of them."""
    if trace.effective_encoder is None or trace.effective_head is None:
        return draw_nothing(ax, f"{trace.label} has no coefficients")
    batches = np.arange(1, len(trace.images) + 1)
    ax.plot(batches, trace.effective_encoder, color=PALETTE[0], linewidth=1.6, label="encoder")
    ax.plot(batches, trace.effective_head, color=PALETTE[1], linewidth=1.6, linestyle="--", label="head")
    ax.axhline(len(trace.experts), color=GREY, linewidth=0.8, linestyle=":")
    ax.set_ylim(0.9, len(trace.experts) + 0.1)
    ax.set_ylabel("effective number of experts")
    _frame(ax)
    return mark_changes(ax, trace.coefficient_changes)


def draw_accuracy_over_time(ax: Axes, trace: Trace, changes: tuple[int, ...] | None = None) -> None:
    """A dot per batch and the running mean over all images so far; entropies' change points unless told others."""
    if trace.accuracy is None or trace.running_accuracy is None:
        return draw_nothing(ax, "this stream has no labels")
    batches = np.arange(1, len(trace.accuracy) + 1)
    ax.plot(batches, 100 * trace.accuracy, "o", color=PALETTE[5], markersize=3.5, label="this batch")
    ax.plot(batches, 100 * trace.running_accuracy, color=PALETTE[0], linewidth=1.6, label="all so far")
    ax.set_ylim(-2, 102)
    ax.set_ylabel("accuracy, %")
    _frame(ax)
    return mark_changes(ax, trace.entropy_changes if changes is None else changes)


def draw_head_experts(ax: Axes, trace: Trace, colours: Mapping[str, str] | None = None) -> None:
    """A dot at the expert that each batch chose for the head."""
    if not any(trace.head_expert):
        return draw_nothing(ax, f"{trace.label} chooses no head expert")
    chosen = colours or colours_of(trace.experts)
    for row, name in enumerate(trace.experts):
        batches = [number for number, expert in enumerate(trace.head_expert, start=1) if expert == name]
        ax.plot(batches, [row] * len(batches), "s", color=chosen[name], markersize=4)
    ax.set_yticks(range(len(trace.experts)), trace.experts)
    ax.set_ylim(-0.5, len(trace.experts) - 0.5)
    ax.set_ylabel("head expert")
    return _frame(ax, len(trace.head_expert))


def mark_changes(ax: Axes, changes: tuple[int, ...]) -> None:
    """A dashed line before each batch at which a new level begins."""
    for position, change in enumerate(changes):
        label = "change of level" if position == 0 else None
        ax.axvline(change + 0.5, color="#000000", linewidth=1.0, linestyle="--", label=label)


def draw_nothing(ax: Axes, why: str) -> None:
    """An empty panel that says why."""
    ax.text(0.5, 0.5, why, ha="center", va="center", transform=ax.transAxes, color=GREY, wrap=True)
    ax.set_axis_off()


def _lines(ax: Axes, values: np.ndarray, trace: Trace, colours: Mapping[str, str] | None) -> None:
    chosen = colours or colours_of(trace.experts)
    marker = "." if np.isnan(values).any() else ""
    for name, line in zip(trace.experts, values.T, strict=True):
        ax.plot(np.arange(1, len(line) + 1), line, marker=marker, color=chosen[name], linewidth=1.6, label=name)
    _frame(ax)


def _frame(ax: Axes, batches: int | None = None) -> None:
    if batches is not None:
        ax.set_xlim(0, batches + 1)
    ax.set_xlabel("batch")
    ax.spines[["top", "right"]].set_visible(False)
