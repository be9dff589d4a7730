"""Rewrite the marked blocks of docs/results.md and the README from the committed records: scripts/docs_tables.py."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mergestream.bench.analysis.comparison import Estimate
from mergestream.bench.report.figures import colours_of, new_figure
from mergestream.bench.report.result_table import grid_table, mark_best, to_markdown
from mergestream.bench.study.study_bars import Setting, estimate, select
from mergestream.bench.study.study_record import read_records
from mergestream.functional.non_inferiority import MARGINS, outcome_of
from mergestream.runtime.errors import InputError, unknown_name

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("docs/results.md", "README.md")
TITLES = {"pacs": "PACS", "midog": "MIDOG"}
SHOWN = {"pacs": ("accuracy",), "midog": ("accuracy", "balanced_accuracy", "auroc")}
MAIN = ("iid", "dirichlet:0.05")
PAPER, RULE, ONCE = "entropy_adaptive", "merge_and_fit", "merge_once(ask_first=256)"
SUMMARY = ("mean", "ensemble(views=hflip)", PAPER, "corrected", "lame(ensemble(views=hflip))", "t3a(mean)", RULE, ONCE)
ABLATION = ("ensemble(views=hflip)", "corrected", "merge_and_fit(correct=False)", "merge_and_fit(temperature=1)",
            "merge_and_fit(views=())", "merge_and_fit(ask_first=256, ask_every=4)", ONCE, RULE)  # fmt: skip
BOUND = 2.0  # points that the rule may be below the ensemble at a single target
Row = Mapping[str, Any]


def two_cores() -> dict[str, Any]:
    return json.loads((RESULTS / "two_cores.json").read_text(encoding="utf-8"))


def with_blocks(text: str, blocks: Mapping[str, str], page: Path) -> str:
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


def mean_of(rows: Iterable[Row], metric: str) -> float:
    """Mean over targets of the mean over their seeds; NaN where a target does not define the metric."""
    by_target: dict[str, list[float]] = {}
    for row in rows:
        by_target.setdefault(row["target"], []).append(np.nan if row[metric] is None else row[metric])
    return float(np.mean([np.mean(values) for values in by_target.values()])) if by_target else np.nan


def picked(rows: Iterable[Row], **values: Any) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def table(corner: str, cells: Mapping[tuple[str, str], str]) -> str:
    return to_markdown(mark_best(grid_table("", corner, cells, str), ()))


def scores(rows: Sequence[Row], metrics: Sequence[str]) -> str:
    values = [mean_of(rows, metric) for metric in metrics]
    return " / ".join("–" if np.isnan(value) else f"{100 * value:.1f}" for value in values) if rows else "–"


def data_table(rows: Sequence[Row], dataset: str, heads: str) -> str:
    """The methods that ran on every stream, batches of 32."""
    own = picked(rows, dataset=dataset, heads=heads, batch=32)
    streams = dict.fromkeys(row["stream"] for row in own)
    by_method = {
        name: {row["stream"] for row in picked(own, method=name)} for name in {row["method"]: 0 for row in own}
    }
    methods = [name for name, ran in by_method.items() if ran == set(streams)]
    cells = {
        (method, stream): scores(picked(own, method=method, stream=stream), SHOWN[dataset])
        for method in methods
        for stream in streams
    }
    return table(f"{TITLES[dataset]}, {heads} heads", cells)


def summary_table(rows: Sequence[Row]) -> str:
    cells = {}
    for method in SUMMARY:
        for dataset in TITLES:
            for stream in MAIN:
                own = picked(rows, dataset=dataset, heads="shared", batch=32, method=method, stream=stream)
                cells[method, f"{TITLES[dataset]}: {stream}"] = scores(own, SHOWN[dataset])
    return table("method", cells)


def ablation_table(rows: Sequence[Row]) -> str:
    cells = {}
    for method in ABLATION:
        for dataset in TITLES:
            for stream in MAIN:
                own = picked(rows, dataset=dataset, batch=32, method=method, stream=stream)
                cells[method, f"{TITLES[dataset]}: {stream}"] = scores(own, SHOWN[dataset][:2])
    return table("both head starts", cells)


def probability_table(rows: Sequence[Row]) -> str:
    """How good the probabilities are: lower is better everywhere, so nothing is bold."""
    lines = ["| NLL / Brier / ECE / calibration in the large | " + " | ".join(
        f"{TITLES[dataset]}: {stream}" for dataset in TITLES for stream in MAIN) + " |",
        "|---|" + "---:|" * (len(TITLES) * len(MAIN))]  # fmt: skip
    for method in SUMMARY:
        cells = []
        for dataset in TITLES:
            for stream in MAIN:
                own = picked(rows, dataset=dataset, heads="shared", batch=32, method=method, stream=stream)
                metrics = ("nll", "brier", "ece", "calibration_in_the_large")
                cells.append(" / ".join(f"{mean_of(own, metric):.2f}" for metric in metrics))
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cost_table(rows: Sequence[Row]) -> str:
    """Accuracy against forwards per image, i.i.d. streams of both sets."""
    lines = ["| method | forwards per image, PACS | accuracy | forwards per image, MIDOG | balanced accuracy |",
             "|---|---:|---:|---:|---:|"]  # fmt: skip
    methods = dict.fromkeys(row["method"] for row in rows)

    def cost(method: str) -> float:
        return mean_of(picked(rows, dataset="pacs", stream="iid", batch=32, method=method), "forwards")

    for method in sorted(methods, key=cost):
        cells = []
        for dataset, metric in (("pacs", "accuracy"), ("midog", "balanced_accuracy")):
            own = picked(rows, dataset=dataset, stream="iid", batch=32, method=method)
            cells += [f"{mean_of(own, 'forwards'):.1f}", f"{100 * mean_of(own, metric):.1f}"]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdicts(differences: Sequence[Row]) -> str:
    """How often the rule is better than, not inferior or inferior to each rival; then every place where it loses."""
    lines = ["| merge_and_fit against | better | not inferior | undecided | inferior | lowest mean difference |",
             "|---|---:|---:|---:|---:|---|"]  # fmt: skip
    own = [row for row in differences if row["ours"] == RULE]
    for rival in dict.fromkeys(row["rival"] for row in own):
        mine = picked(own, rival=rival)
        outcomes = [outcome_of(row["low"], row["high"], MARGINS["accuracy"]) for row in mine]
        lowest = min(mine, key=lambda row: row["mean"])
        counts = [outcomes.count(name) for name in ("better", "not inferior", "undecided", "inferior")]
        lines.append(f"| {rival} | {' | '.join(map(str, counts))} | {place(lowest)} |")
    far = [row for row in picked(own, rival="ensemble", metric="accuracy") if 100 * row["worst"] < -BOUND]
    lines += ["", f"More than {BOUND:g} points of accuracy below the ensemble at a single target: {len(far)} of "
                  f"{len(picked(own, rival='ensemble', metric='accuracy'))} settings."]  # fmt: skip
    lines += [
        f"- {TITLES[row['dataset']]}, {row['heads']} heads, {row['stream']}, batches of {row['batch']}: "
        f"{100 * row['worst']:+.1f} at {row['worst_target']}"
        for row in far
    ]
    return "\n".join(lines)


def place(row: Row) -> str:
    interval = Estimate(row["mean"], row["low"], row["high"]).points()
    metric = row["metric"].replace("_", " ")
    return f"{interval} ({TITLES[row['dataset']]}, {row['heads']}, {row['stream']}, {row['batch']}, {metric})"


def gpu_table() -> str:
    """Version 0.1 on one H200: whole networks fine-tuned, three seeds; its rule was replaced since."""
    groups = [group for group in read_records(sorted((RESULTS / "real").glob("*.json"))) if "ours" in group]
    groups = [{**group, "later": False} for group in groups]
    cells = {}
    for dataset, metrics in SHOWN.items():
        for start in ("shared", "independent"):
            own = select(groups, "main", dataset, start)
            for method in ("mean", "ensemble", PAPER, "prior_adaptive"):
                for stream in MAIN:
                    values = [estimate(own, method, Setting(stream), metric) for metric in metrics]
                    text = " / ".join("–" if value is None else f"{100 * value.mean:.1f}" for value in values)
                    cells[method, f"{TITLES[dataset]}, {start}: {stream}"] = text
    return table("version 0.1, H200", cells)


def batchnorm_table() -> str:
    record = json.loads((RESULTS / "batchnorm_pacs.json").read_text(encoding="utf-8"))
    streams = list(dict.fromkeys(row["stream"] for row in record["rows"]))
    lines = [f"| EfficientNet-Lite0, PACS | {' | '.join(streams)} |", "|---|" + "---:|" * len(streams)]
    for method in dict.fromkeys(row["method"] for row in record["rows"]):
        values = [mean_of(picked(record["rows"], method=method, stream=stream), "accuracy") for stream in streams]
        lines.append(f"| {method} | {' | '.join(f'{value:.1f}' for value in values)} |")
    return "\n".join(lines)


def all_blocks() -> dict[str, Callable[[], str]]:
    """Every block by its name, not drawn yet."""
    record = two_cores()
    rows = record["rows"]
    blocks: dict[str, Callable[[], str]] = {
        "summary": partial(summary_table, rows),
        "ablation": partial(ablation_table, rows),
        "probabilities": partial(probability_table, rows),
        "costs": partial(cost_table, rows),
        "verdicts": partial(verdicts, record["differences"]),
        "gpu": gpu_table,
        "batchnorm": batchnorm_table,
    }
    for dataset in TITLES:
        for heads in ("shared", "independent"):
            blocks[f"{dataset}-{heads}"] = partial(data_table, rows, dataset, heads)
    return blocks


def draw_costs(rows: Sequence[Row], path: Path) -> None:
    """Accuracy against forwards per image, one panel per data set."""
    figure, axes = new_figure(10, 4, columns=len(TITLES))
    colours = colours_of(list(SUMMARY))
    for ax, (dataset, metric) in zip(axes[0], (("pacs", "accuracy"), ("midog", "balanced_accuracy")), strict=True):
        for method, colour in colours.items():
            for stream, marker in zip(MAIN, "o^", strict=True):
                own = picked(rows, dataset=dataset, stream=stream, batch=32, method=method)
                label = method if stream == MAIN[0] else None
                values = mean_of(own, "forwards"), 100 * mean_of(own, metric)
                ax.plot(*[[value] for value in values], marker, color=colour, label=label)
        ax.set_xlabel("forwards per image")
        ax.set_ylabel(f"{metric.replace('_', ' ')}, %")
        ax.set_title(f"{TITLES[dataset]}: ● {MAIN[0]}, ▲ {MAIN[1]}", loc="left", fontsize=10)
    axes[0][0].legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    drawn = {name: draw() for name, draw in all_blocks().items()}
    for page in (ROOT / name for name in PAGES):
        page.write_text(with_blocks(page.read_text(encoding="utf-8"), drawn, page), encoding="utf-8")
    draw_costs(two_cores()["rows"], ROOT / "docs" / "figures" / "accuracy-and-forwards.png")
