"""Figures that compare methods. `gid`s let a page hide a method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mergestream.bench.analysis.comparison import Duel, ResultRow
from mergestream.bench.analysis.confidence import Reliability, RiskCoverage
from mergestream.bench.report.method_styles import colour_of, gid_of, is_dashed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GUIDE = "#888888"


def draw_intervals(ax: Axes, rows: Sequence[ResultRow], metric: str) -> None:
    """One dot and 95 % interval per method, in percent, in the order given from the top."""
    for place, row in enumerate(rows):
        value = getattr(row, metric)
        _dot(ax, row.label, place, (100 * value.mean, 100 * value.low, 100 * value.high))
    _name_rows(ax, [row.label for row in rows])
    ax.set_xlabel(f"{metric.replace('_', ' ')}, %")


def draw_differences(ax: Axes, duels: Sequence[Duel]) -> None:
    """Each variant minus the full method, in points, with the paired 95 % interval; right of 0 is better."""
    for place, each in enumerate(duels):
        gap = each.difference
        _dot(ax, each.theirs, place, (-100 * gap.mean, -100 * gap.high, -100 * gap.low))
    ax.axvline(0, color=GUIDE, linewidth=1, linestyle=":")
    _name_rows(ax, [each.theirs for each in duels], of=duels[0].ours if duels else "")
    ax.set_xlabel("accuracy, points above the full method")


def draw_reliability(ax: Axes, curves: Sequence[Reliability]) -> None:
    """Accuracy by confidence; on the dotted diagonal a model is right as often as it is confident."""
    ax.plot([0, 1], [0, 1], color=GUIDE, linewidth=1, linestyle=":")
    for curve in curves:
        style = _line_style(curve.label)
        ax.plot(curve.confidence, curve.accuracy, marker="o", markersize=3, **style)
    ax.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="confidence (highest probability)", ylabel="accuracy")
    _plain(ax)


def draw_risk_coverage(ax: Axes, curves: Sequence[RiskCoverage]) -> None:
    """Errors among the images that are answered, when the least confident ones are left to a human."""
    for curve in curves:
        ax.plot(100 * curve.coverage, 100 * curve.risk, **_line_style(curve.label))
    ax.set(xlim=(0, 101), xlabel="answered, % of images", ylabel="errors among them, %")
    ax.set_ylim(bottom=0)
    _plain(ax)


def draw_cost(ax: Axes, labels: Sequence[str], forwards: Sequence[float], accuracies: Sequence[float]) -> None:
    """Accuracy in percent against forward passes per batch."""
    for label, passes, accuracy in zip(labels, forwards, accuracies, strict=True):
        marker = "D" if is_dashed(label) else "o"
        ax.plot([passes], [100 * accuracy], linestyle="none", marker=marker, color=colour_of(label), gid=gid_of(label))
    ax.set(xlabel="forward passes per batch", ylabel="accuracy, %")
    ax.set_xlim(left=0)
    _plain(ax)


def _dot(ax: Axes, label: str, place: int, value: tuple[float, float, float]) -> None:
    mean, low, high = value
    colour, gid = colour_of(label), gid_of(label)
    ax.plot([low, high], [place, place], color=colour, linewidth=1.6, gid=gid)
    ax.plot([mean], [place], marker="o", markersize=5, color=colour, gid=gid)


def _name_rows(ax: Axes, labels: Sequence[str], of: str = "") -> None:
    """`of` is the method that all of them vary; it is left out of their names."""
    names = [label.removeprefix(f"{of}(").removesuffix(")") if of else label for label in labels]
    ax.set_yticks(range(len(labels)), names, fontsize=9)
    for text, label in zip(ax.get_yticklabels(), labels, strict=True):
        text.set_gid(gid_of(label))
    ax.set_ylim(len(labels) - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", alpha=0.3)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _plain(ax: Axes) -> None:
    ax.grid(alpha=0.2)
    ax.spines[["top", "right"]].set_visible(False)


def _line_style(label: str) -> dict[str, Any]:
    line = "--" if is_dashed(label) else "-"
    return {"color": colour_of(label), "linestyle": line, "linewidth": 1.6, "gid": gid_of(label)}
