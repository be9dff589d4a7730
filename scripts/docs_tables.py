"""Rewrite the marked blocks and the figures of the result pages from the committed records: scripts/docs_tables.py."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from mergestream.bench.report.figures import colours_of, new_figure
from mergestream.bench.study.results_plan import HEAD_INITS, METRICS, OURS, PAPER
from mergestream.bench.study.study_bars import TITLES, differences, estimate, methods_of, select
from mergestream.bench.study.study_pages import all_blocks, runs_of
from mergestream.bench.study.study_record import Group, Setting, read_records
from mergestream.runtime.errors import InputError, unknown_name

ROOT = Path(__file__).parents[1]
RECORDS = sorted((ROOT / "benchmarks" / "results" / "real").glob("*.json"))
PAGES = ("docs/results.md", "docs/results-first-run.md", "README.md")
BETTER, WORSE, UNCLEAR = "#009E73", "#D55E00", "#888888"


def with_blocks(text: str, blocks: dict[str, str], page: Path) -> str:
    """The text with every marked block replaced."""
    for name in re.findall(r"<!-- real:begin (\S+) -->", text):
        if name not in blocks:
            raise unknown_name(f"block in {page.name}", name, blocks)
        begin, end = f"<!-- real:begin {name} -->", f"<!-- real:end {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
            raise InputError(f"{page}: the block '{name}' must begin and end once.")
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{blocks[name].rstrip()}\n{end}{rest.split(end)[1]}"
    return text


def demo_table() -> str:
    """Accuracy of every method at its defaults in the committed demo, and of one variant that the README discusses."""
    streams = ("iid", "dirichlet:0.05", "sorted")
    rows = json.loads((ROOT / "docs" / "results" / "demo.json").read_text(encoding="utf-8"))["results"]
    by_label: dict[str, dict[str, str]] = {}
    for row in rows:
        score = {name: 100 * value for name, value in row["accuracy"].items()}
        if "(" not in row["label"] or row["label"] == "regmean_pp(statistics=target)":
            text = f"{score['mean']:.1f} ±{(score['high'] - score['low']) / 2:.1f}"
            by_label.setdefault(row["label"], {})[row["stream"]] = text
    lines = [f"| method | {' | '.join(streams)} |", "|---|---:|---:|---:|"]
    lines += [f"| {label} | {' | '.join(own[name] for name in streams)} |" for label, own in by_label.items()]
    return "\n".join(lines)


def draw_batch_sizes(groups: Sequence[Group], path: Path) -> None:
    """One panel per data set and head start, one line per method."""
    figure, axes = new_figure(10, 6.5, rows=len(METRICS), columns=len(HEAD_INITS))
    for row, (dataset, (metric, *_)) in enumerate(METRICS.items()):
        for start, ax in zip(HEAD_INITS, axes[row], strict=True):
            own = select(groups, "batches", dataset, start)
            sizes = list(dict.fromkeys(int(r["condition"].split()[1]) for group in own for r in group["rows"]))
            for name, colour in colours_of(methods_of(own)).items():
                scores = [estimate(own, name, Setting("iid", f"batch {size}"), metric) for size in sizes]
                percent = [float("nan") if score is None else 100 * score.mean for score in scores]
                ax.plot(sizes, percent, marker="o", markersize=3, color=colour, label=name)
            ax.set_xscale("log", base=2)
            ax.set_xticks(sizes, [str(size) for size in sizes])
            ax.set_xlabel("images per batch")
            ax.set_ylabel(f"{metric.replace('_', ' ')}, %")
            ax.set_title(f"{TITLES[dataset]}, {start} heads", loc="left", fontsize=10)
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=100)


def draw_differences(groups: Sequence[Group], path: Path) -> None:
    """Ours less each other method with the interval, wherever there is one."""
    gaps = {
        name: [
            (place, gap)
            for dataset in METRICS
            for place, gap in differences(groups, dataset, OURS, name)
            if gap is not None and gap.low == gap.low
        ]
        for name in ("mean", "ensemble", PAPER)
    }
    height = max(3.0, *(0.22 * len(own) for own in gaps.values()))
    figure, axes = new_figure(3.5 + 3 * len(gaps), height, columns=len(gaps))
    for ax, (name, own) in zip(axes[0], gaps.items(), strict=True):
        for place, (_, gap) in enumerate(own):
            colour = BETTER if gap.low > 0 else WORSE if gap.high < 0 else UNCLEAR
            ax.plot([100 * gap.low, 100 * gap.high], [place, place], color=colour, linewidth=1.5)
            ax.plot([100 * gap.mean], [place], marker="o", markersize=4, color=colour)
        ax.axvline(0, color="#444444", linewidth=0.8)
        # Every panel has the same places: only the first one names them.
        ax.set_yticks(range(len(own)), [place if ax is axes[0][0] else "" for place, _ in own], fontsize=7)
        ax.invert_yaxis()
        ax.set_title(f"{OURS} - {name}, points", fontsize=8)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    every_group = read_records(RECORDS)
    blocks = {**all_blocks(every_group), "demo": demo_table()}
    for page in (ROOT / name for name in PAGES):
        page.write_text(with_blocks(page.read_text(encoding="utf-8"), blocks, page), encoding="utf-8")
    for run, own in runs_of(every_group).items():
        draw_differences(own, ROOT / "docs" / "figures" / f"{run}-differences.png")
        draw_batch_sizes(own, ROOT / "docs" / "figures" / f"{run}-batch-sizes.png")
