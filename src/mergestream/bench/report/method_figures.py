"""Figures of methods: comparisons, and coefficients over a stream. `gid`s let a page hide a method."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from mergestream.bench.analysis.comparison import Estimate, ResultRow
from mergestream.bench.analysis.confidence import Reliability, RiskCoverage
from mergestream.bench.analysis.duels import Duel
from mergestream.bench.analysis.traces import Trace
from mergestream.bench.report.figures import INK, METHOD, PALETTE, colours_of, css_colour
from mergestream.bench.report.page import LegendKey
from mergestream.methods import list_methods

GUIDE = "#888888"
PARTS = {"encoder": "encoder_coefficients", "head": "head_coefficients"}


def colour_of(label: str) -> str:
    """The method's colour; the page's ink for a row that is not a method."""
    return colours_of(list_methods()).get(_method_of(label), INK)


def is_dashed(label: str) -> bool:
    """There are more methods than colours that everyone can tell apart."""
    return _method_of(label) in list_methods()[len(PALETTE) :]


def keys_of(labels: Iterable[str]) -> list[LegendKey]:
    return [LegendKey(label, css_colour(colour_of(label)), is_dashed(label), is_method=True) for label in labels]


def _method_of(label: str) -> str:
    return label.partition("(")[0]


def draw_accuracies(ax: Axes, rows: Sequence[ResultRow]) -> None:
    """One dot and 95 % interval per method, in percent, in the order given from the top."""
    for place, row in enumerate(rows):
        _draw_interval(ax, row.label, place, row.accuracy.times(100))
    _name_rows(ax, [row.label for row in rows])
    ax.set_xlabel("accuracy, %")


def draw_differences(ax: Axes, duels: Sequence[Duel]) -> None:
    """Each variant minus the full method, in points, with the paired 95 % interval; right of 0 is better."""
    for place, each in enumerate(duels):
        _draw_interval(ax, each.theirs, place, each.difference.times(-100))
    ax.axvline(0, color=GUIDE, linewidth=1, linestyle=":")
    _name_rows(ax, [each.theirs for each in duels], of=duels[0].ours if duels else "")
    ax.set_xlabel("accuracy, points above the full method")


def draw_reliability(ax: Axes, curves: Sequence[Reliability]) -> None:
    """Accuracy by confidence; on the dotted diagonal a model is right as often as it is confident."""
    ax.plot([0, 1], [0, 1], color=GUIDE, linewidth=1, linestyle=":")
    for curve in curves:
        ax.plot(curve.confidence, curve.accuracy, marker="o", markersize=3, **_line_style(curve.label))
    ax.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="confidence (highest probability)", ylabel="accuracy")
    ax.grid(alpha=0.2)


def draw_risk_coverage(ax: Axes, curves: Sequence[RiskCoverage]) -> None:
    """Errors among the images that are answered, when the least confident ones are left to a human."""
    for curve in curves:
        ax.plot(100 * curve.coverage, 100 * curve.risk, **_line_style(curve.label))
    ax.set(xlim=(0, 101), xlabel="answered, % of images", ylabel="errors among them, %")
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.2)


def draw_cost(ax: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Accuracy in percent against forward passes per image; points: method -> (passes, accuracy)."""
    for label, (passes, accuracy) in points.items():
        marker = "D" if is_dashed(label) else "o"
        ax.plot([passes], [100 * accuracy], linestyle="none", marker=marker, color=colour_of(label), gid=METHOD + label)
    ax.set(xlabel="forward passes per image", ylabel="accuracy, %")
    ax.set_xlim(left=0)
    ax.grid(alpha=0.2)


def draw_lines_over_time(ax: Axes, lines: Mapping[str, np.ndarray]) -> None:
    """Accuracy so far [T] in percent, one line per method."""
    for label, values in lines.items():
        ax.plot(np.arange(1, len(values) + 1), 100 * values, **_line_style(label))
    ax.set(xlabel="batch", ylabel="accuracy so far, %")
    ax.grid(alpha=0.2)


def _draw_interval(ax: Axes, label: str, place: int, value: Estimate) -> None:
    colour, gid = colour_of(label), METHOD + label
    ax.plot([value.low, value.high], [place, place], color=colour, linewidth=1.6, gid=gid)
    ax.plot([value.mean], [place], marker="o", markersize=5, color=colour, gid=gid)


def _name_rows(ax: Axes, labels: Sequence[str], of: str = "") -> None:
    """`of` is the method that all of them vary; it is left out of their names."""
    names = [label.removeprefix(f"{of}(").removesuffix(")") if of else label for label in labels]
    ax.set_yticks(range(len(labels)), names, fontsize=9)
    for text, label in zip(ax.get_yticklabels(), labels, strict=True):
        text.set_gid(METHOD + label)
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", alpha=0.3)
    ax.spines["left"].set_visible(False)


def _line_style(label: str) -> dict[str, Any]:
    line = "--" if is_dashed(label) else "-"
    return {"color": colour_of(label), "linestyle": line, "linewidth": 1.6, "gid": METHOD + label}


def draw_coefficients_over_time(ax: Axes, trace: Trace, part: str, colours: Mapping[str, str]) -> None:
    """One line per expert, for the encoder or the head; dashed lines at changes of level, dotted at 1/K."""
    values = getattr(trace, PARTS[part])
    if values is None:
        return _draw_reason(ax, f"{trace.run.label} has no {part} coefficients")
    _draw_experts(ax, values, trace, colours, f"{part} coefficient")
    ax.axhline(1 / len(trace.experts), color=GUIDE, linewidth=0.8, linestyle=":")
    ax.set_ylim(-0.02, 1.02)
    return _mark_changes(ax, trace.coefficient_changes)


def draw_entropies(ax: Axes, trace: Trace, colours: Mapping[str, str]) -> None:
    """One line per expert; dots if some batches were not scored."""
    if trace.entropy is None:
        return _draw_reason(ax, f"{trace.run.label} records no entropies")
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
    ax.set(xlabel="batch", ylabel="accuracy, %")
    return _mark_changes(ax, trace.entropy_changes)


def _draw_experts(ax: Axes, values: np.ndarray, trace: Trace, colours: Mapping[str, str], label: str) -> None:
    """One line per expert; values [T,K]."""
    marker = "." if np.isnan(values).any() else ""
    for name, line in zip(trace.experts, values.T, strict=True):
        ax.plot(np.arange(1, len(line) + 1), line, marker=marker, color=colours[name], linewidth=1.6, label=name)
    ax.set(xlabel="batch", ylabel=label)


def _mark_changes(ax: Axes, changes: tuple[int, ...]) -> None:
    """A dashed line before each batch at which a new level begins."""
    for position, change in enumerate(changes):
        label = "change of level" if position == 0 else None
        ax.axvline(change + 0.5, color="#000000", linewidth=1.0, linestyle="--", label=label)


def _draw_reason(ax: Axes, reason: str) -> None:
    """An empty panel that says why it is empty."""
    ax.text(0.5, 0.5, reason, ha="center", va="center", transform=ax.transAxes, color=GUIDE, wrap=True)
    ax.set_axis_off()
