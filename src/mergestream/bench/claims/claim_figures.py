"""Figures of the paper's claims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mergestream.bench.claims.claim_finding import FAILS, HOLDS, UNKNOWN, ClaimFinding, Verdict
from mergestream.bench.report.figures import PALETTE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colour and shape both, for readers without colours.
STYLES: dict[Verdict, tuple[str, str]] = {
    HOLDS: (PALETTE[0], "o"),
    FAILS: (PALETTE[1], "X"),
    UNKNOWN: (PALETTE[6], "s"),
}


def draw_findings(ax: Axes, findings: Sequence[ClaimFinding]) -> None:
    """A dot and interval per finding with a number in the first one's unit, under the name of its measure."""
    shown = [each for each in findings if each.estimate is not None and each.unit == findings[0].unit]
    streams: dict[int, str] = {}
    row = 0
    for measure in dict.fromkeys(each.measure for each in shown):
        ax.text(0.01, row, measure, transform=ax.get_yaxis_transform(), va="center", fontsize=8, fontweight="bold")
        here = [each for each in shown if each.measure == measure]
        for place, finding in enumerate(here, start=row + 1):
            streams[place] = finding.stream or ""
            _draw_interval(ax, place, finding)
        row += 1 + len(here)
    ax.axvline(0, color="#888888", linewidth=0.8, linestyle=":")
    ax.set_yticks(list(streams), list(streams.values()), fontsize=8)
    ax.set_ylim(row - 0.5, -0.5)
    ax.set_xlabel(f"{findings[0].unit}; lines: intervals" if findings else "")
    ax.spines[["top", "right"]].set_visible(False)


def _draw_interval(ax: Axes, row: int, finding: ClaimFinding) -> None:
    assert finding.estimate is not None
    colour, marker = STYLES[finding.verdict]
    estimate = finding.estimate
    labels = ax.get_legend_handles_labels()[1]
    ax.plot([estimate.low, estimate.high], [row, row], color=colour, linewidth=1.4)
    label = None if finding.verdict in labels else finding.verdict
    ax.plot(estimate.mean, row, marker, color=colour, markersize=6, linestyle="none", label=label)
