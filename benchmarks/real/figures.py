"""Figures of the records: scores by batch size, and ours against the others on every stream."""

from collections.abc import Sequence
from pathlib import Path

from bars import LOSS, TITLES, differences_everywhere
from pairing import Where, estimate, methods, select
from recipes import HEAD_INITS, METRICS, PAPER
from records import Group

from mergestream.bench.report.figures import colours_of, new_figure


def draw_batch_sizes(groups: Sequence[Group], path: Path) -> None:
    """One panel a data set and head start, a line a method."""
    figure, axes = new_figure(10, 6.5, rows=len(METRICS), columns=len(HEAD_INITS))
    for row, (dataset, metrics) in enumerate(METRICS.items()):
        for column, start in enumerate(HEAD_INITS):
            own, ax = select(groups, "batches", dataset, start, LOSS[dataset]), axes[row][column]
            sizes = list(dict.fromkeys(int(r["condition"].split()[1]) for group in own for r in group["rows"]))
            for name, colour in colours_of(methods(own)).items():
                values = [estimate(own, name, Where("iid", f"batch {size}"), metrics[0]) for size in sizes]
                known = [(size, 100 * value.mean) for size, value in zip(sizes, values, strict=True) if value]
                x, y = [size for size, _ in known], [score for _, score in known]
                ax.plot(x, y, marker="o", markersize=3, color=colour, label=name)
            ax.set_xscale("log", base=2)
            ax.set_xticks(sizes, [str(size) for size in sizes])
            ax.set_xlabel("images a batch")
            ax.set_ylabel(f"{metrics[0].replace('_', ' ')}, %")
            ax.set_title(f"{TITLES[dataset]}, {start} heads", loc="left", fontsize=10)
            ax.spines[["top", "right"]].set_visible(False)
    if methods([group for group in groups if group["kind"] == "batches"]):
        axes[0][0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=100)


def draw_differences(groups: Sequence[Group], ours: str, path: Path) -> None:
    """Paired differences with their intervals, where there are any."""
    rivals = [name for name in ("mean", "ensemble", PAPER) if name != ours]
    found = {name: [(p, g) for p, g in differences_everywhere(groups, ours, name) if g.low == g.low] for name in rivals}
    height = max([3.0, *(0.22 * len(each) for each in found.values())])
    figure, axes = new_figure(3.5 + 3 * len(rivals), height, columns=len(rivals))
    for ax, (name, gaps) in zip(axes[0], found.items(), strict=True):
        for place, (_, gap) in enumerate(gaps):
            colour = "#009E73" if gap.low > 0 else "#D55E00" if gap.high < 0 else "#888888"
            ax.plot([100 * gap.low, 100 * gap.high], [place, place], color=colour, linewidth=1.5)
            ax.plot([100 * gap.mean], [place], marker="o", markersize=4, color=colour)
        ax.axvline(0, color="#444444", linewidth=0.8)
        told = ax is axes[0][0]  # every panel has the same places
        ax.set_yticks(range(len(gaps)), [place if told else "" for place, _ in gaps], fontsize=7)
        ax.invert_yaxis()
        ax.set_title(f"{ours} - {name}, points", fontsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
