"""Rewrite the marked blocks of the results pages and the README from the committed records: scripts/docs_tables.py."""

import json
import re
import runpy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from mergestream.bench.analysis.comparison import Estimate
from mergestream.bench.report.figures import colours_of, new_figure
from mergestream.bench.report.result_table import grid_table, mark_best, to_markdown
from mergestream.functional.non_inferiority import MARGINS, outcome_of
from mergestream.runtime.errors import InputError, unknown_name

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (
    "docs/results.md",
    "docs/speed.md",
    "docs/dicom_node.md",
    "docs/methods.md",
    "docs/paper.md",
    "docs/reproduce.md",
    "docs/log/paper_on_real_data.md",
    "docs/log/results_all.md",
    "docs/log/speed.md",
    "README.md",
)
SETS = {"pacs": "PACS, ViT-S", "clip": "PACS, CLIP", "midog": "MIDOG, ViT-S"}
SHOWN = {
    "pacs": ("accuracy",),
    "clip": ("accuracy",),
    "midog": ("accuracy", "balanced_accuracy", "auroc"),
}
MAIN = ("iid", "dirichlet:0.05")
LOG_ONLY = (
    "note:0.1", "missing:1", "prevalence:0.05", "prevalence:0.1", "prevalence:0.2",
    "prevalence:0.05:0", "prevalence:0.1:0", "prevalence:0.2:0",
)  # fmt: skip
USUAL = 32  # images per batch
ENSEMBLE, PAPER, RULE, ONCE = "ensemble(views=hflip)", "entropy_adaptive", "merge_and_fit", "merge_once(ask_first=256)"
AUTO, LAME = "auto", "lame(ensemble(views=hflip))"
SUMMARY = ("mean", ENSEMBLE, PAPER, "corrected", LAME, "t3a(mean)", RULE, ONCE, AUTO)
ABLATION = ("merge_and_fit(correct=False)", "merge_and_fit(temperature=card)", "merge_and_fit(views=())", RULE)
WHOLE = (
    "mean", "task_arithmetic", "ties", "adamerging", "tent", "sar", "t3_js", "dawin", "dawin(transductive=True)",
    PAPER, "entropy_adaptive(momentum=0.9)", ENSEMBLE, ONCE, RULE,
)  # fmt: skip
CALIBRATED = (ENSEMBLE, PAPER, "corrected", RULE, ONCE)
CALIBRATION = ("nll", "brier", "ece", "calibration_in_the_large")
BEST_OF = ("mean", ENSEMBLE, PAPER, "corrected", LAME)
METRICS = ("accuracy", "balanced_accuracy", "auroc")
BOUND = 2.0  # points that the rule may be below the ensemble at a single target
Row = Mapping[str, Any]


def records(folder: str = "streams") -> dict[str, list[Row]]:
    """Rows, differences and choices of benchmarks/real_streams.py; each names its set and head start."""
    joined: dict[str, list[Row]] = {"rows": [], "differences": [], "choices": []}
    for file in sorted((RESULTS / folder).glob("*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        name, heads = next(iter(record["pools"])).split("-")[:2]
        about = {"set": name, "heads": heads, "file": file.stem}
        for key, rows in joined.items():
            columns = record[key]["columns"]
            rows += [{**dict(zip(columns, row, strict=True)), **about} for row in record[key]["rows"]]
    return joined


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


def picked(rows: Iterable[Row], **values: Any) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def mean_of(rows: Iterable[Row], metric: str) -> float:
    """Mean over head starts of the mean over targets of the mean over seeds; NaN where a metric is not defined."""
    by_target: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        value = np.nan if row[metric] is None else row[metric]
        by_target.setdefault(row["heads"], {}).setdefault(row["target"], []).append(value)
    starts = [np.mean([np.mean(values) for values in targets.values()]) for targets in by_target.values()]
    return float(np.mean(starts)) if starts else np.nan


def scores(rows: Sequence[Row], metrics: Sequence[str]) -> str:
    values = [mean_of(rows, metric) for metric in metrics]
    return "/".join("–" if np.isnan(value) else f"{100 * value:.1f}" for value in values) if rows else "–"


def table(corner: str, cells: Mapping[tuple[str, str], str]) -> str:
    spread = {key: value.replace("/", " / ") for key, value in cells.items()}
    return to_markdown(mark_best(grid_table("", corner, spread, str), ())).replace(" / ", "/")


def main_table(rows: Sequence[Row], methods: Sequence[str], metrics: int = 3) -> str:
    """Methods on both main streams of every set, mean over head starts and seeds."""
    cells = {
        (method, f"{title}: {stream}"): scores(
            picked(rows, set=name, stream=stream, batch=USUAL, method=method), SHOWN[name][:metrics]
        )
        for method in methods
        for name, title in SETS.items()
        for stream in MAIN
    }
    return table("method", cells)


def stream_table(
    rows: Sequence[Row], name: str, methods: Sequence[str], metrics: Sequence[str], left_out: Sequence[str] = ()
) -> str:
    """Methods on the streams of a set, batches of 32."""
    own = picked(rows, set=name, batch=USUAL)
    cells = {
        (method, stream): scores(picked(own, method=method, stream=stream), metrics)
        for method in methods
        for stream in dict.fromkeys(row["stream"] for row in own if row["stream"] not in left_out)
    }
    return table(f"{SETS[name]}, {', '.join(metrics).replace('_', ' ')}", cells)


def size_table(rows: Sequence[Row], name: str) -> str:
    """Accuracy in batches of all sizes: one pool, shared heads."""
    own = [row for row in picked(rows, set=name, heads="shared", seed=0) if row["training_seed"] == 0]
    methods = ("mean", ENSEMBLE, PAPER, "corrected", LAME, RULE, ONCE)
    cells = {
        (method, f"{stream}, {size}"): scores(picked(own, method=method, stream=stream, batch=size), SHOWN[name][:1])
        for method in methods
        for stream in MAIN
        for size in (1, 4, 32, 128)
    }
    return table(f"{SETS[name]}: stream, images per batch", cells)


def long_table(rows: Sequence[Row]) -> str:
    """Streams of 100,000 batches: accuracy in tenths of the stream, and the processor's time without forwards."""
    lines = ["| target, stream | method | whole | first tenth | lowest tenth | last tenth | ms per step |",
             "|---|---|---:|---:|---:|---:|---:|"]  # fmt: skip
    for row in rows:
        parts = row["parts"]
        values = " | ".join(f"{100 * value:.2f}" for value in (row["accuracy"], parts[0], min(parts), parts[-1]))
        steps = row["images"] / row["batch"]
        lines.append(
            f"| {SETS[row['set']]}: {row['target'].replace('_', ' ')}, {row['stream']} | {row['method']} | {values} | "
            f"{1000 * row['cpu_seconds'] / steps:.1f} |"
        )
    return "\n".join(lines)


def probability_table(rows: Sequence[Row], metrics: Sequence[str]) -> str:
    """How good the probabilities are: lower is better everywhere, so nothing is bold."""
    names = "/".join(name.upper() if len(name) == 3 else name.replace("_", " ") for name in metrics)
    lines = [f"| {names} | {' | '.join(f'{title}: {stream}' for title in SETS.values() for stream in MAIN)} |"]
    lines.append("|---|" + "---:|" * (len(SETS) * len(MAIN)))
    for method in CALIBRATED:
        cells = [
            "/".join(f"{mean_of(own, metric):.2f}" for metric in metrics)
            for name in SETS
            for stream in MAIN
            for own in [picked(rows, set=name, stream=stream, batch=USUAL, method=method)]
        ]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cost_table(rows: Sequence[Row], methods: Sequence[str]) -> str:
    """Forwards per image beside accuracy (MIDOG: balanced) on i.i.d. streams, cheapest first."""
    lines = [f"| forwards: accuracy | {' | '.join(SETS.values())}, balanced |", "|---|" + "---:|" * len(SETS)]
    own = picked(rows, stream="iid", batch=USUAL)
    ran = {method: picked(own, method=method) for method in methods}
    for method, here in sorted(ran.items(), key=lambda item: mean_of(picked(item[1], set="pacs"), "forwards")):
        cells = []
        for name in SETS:
            at = picked(here, set=name)
            value = f"{mean_of(at, 'forwards'):.1f}: {100 * mean_of(at, SHOWN[name][:2][-1]):.1f}"
            cells.append(value if at else "–")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def whole_table(rows: Sequence[Row]) -> str:
    """Methods that merge or adapt whole networks on one pool: `iid`, `dirichlet:0.05`; accuracy (MIDOG: balanced)."""
    own = picked(rows, heads="shared", training_seed=0, batch=USUAL, seed=0)
    cells = {}
    for method, (name, title) in product(WHOLE, SETS.items()):
        metric = SHOWN[name][:2][-1:]
        values = [scores(picked(own, set=name, method=method, stream=stream), metric) for stream in MAIN]
        cells[method, f"{title}{', balanced' * (len(SHOWN[name]) > 1)}"] = ",".join(values)
    return to_markdown(grid_table("", "method", cells, str))


def rule_gains(rows: Sequence[Row]) -> list[float]:
    """Points of accuracy of the paper's rule above the mean, for every set, head start and main stream."""
    heads = dict.fromkeys((row["set"], row["heads"]) for row in rows)
    settings = [picked(rows, set=name, heads=start, stream=each, batch=USUAL) for name, start in heads for each in MAIN]
    scored = [[mean_of(picked(own, method=name), "accuracy") for name in (PAPER, "mean")] for own in settings]
    return [100 * (ours - theirs) for ours, theirs in scored]


def outcome_counts(rows: Sequence[Row]) -> list[int]:
    outcomes = [outcome_of(row["low"], row["high"], MARGINS["accuracy"]) for row in rows]
    return [outcomes.count(name) for name in ("better", "not inferior", "undecided", "inferior")]


def bar_table(differences: Sequence[Row]) -> str:
    """How the rules meet the bars: against the best rival of each setting, the paper's rule, and the ensemble.

    The best rival of a setting is the one that the rule is furthest behind, which is harsher than one named before.
    """
    lines = ["| rule | against the best rival | against the paper's rule | far below the ensemble | lowest |",
             "|---|---:|---:|---:|---|"]  # fmt: skip
    for rule in (RULE, ONCE, AUTO):
        own = picked(differences, ours=rule)
        best: dict[tuple[Any, ...], Row] = {}
        for row in (row for row in own if row["rival"] in BEST_OF):
            key = tuple(row[part] for part in ("set", "heads", "stream", "batch", "metric"))
            best[key] = min(best.get(key, row), row, key=lambda each: each["mean"])
        single = picked(own, rival=ENSEMBLE, metric="accuracy")
        far = [row for row in single if 100 * row["worst"] < -BOUND]
        lowest = min(single, key=lambda row: row["worst"])
        outcomes = [
            "/".join(map(str, outcome_counts(rows))) for rows in (list(best.values()), picked(own, rival=PAPER))
        ]
        lines.append(
            f"| {rule} | {' | '.join(outcomes)} | {len(far)} of {len(single)} | {100 * lowest['worst']:+.1f} "
            f"({place(lowest)}, {lowest['worst_target']}) |"
        )
    return "\n".join(lines)


def endpoint_table(differences: Sequence[Row]) -> str:
    """Primary endpoints: accuracy of the rule less the ensemble's, mean over targets and worst; batches of 32."""
    lines = ["| set, heads | stream | mean over targets [95 %] | verdict | worst target |", "|---|---|---:|---|---:|"]
    own = picked(differences, ours=RULE, rival=ENSEMBLE, metric="accuracy", batch=USUAL)
    for row in own:
        verdict = outcome_of(row["low"], row["high"], MARGINS["accuracy"])
        lines.append(
            f"| {SETS[row['set']]}, {row['heads']} | {row['stream']} | {interval(row)} | {verdict} | "
            f"{100 * row['worst']:+.1f} ({row['worst_target'].replace('_', ' ')}) |"
        )
    return "\n".join(lines)


def losses(differences: Sequence[Row]) -> str:
    """Every setting where the recommended rule is inferior to a rival, worst first."""
    own = [row for row in differences if row["ours"] == RULE and row["rival"] in BEST_OF]
    lost = [row for row in own if outcome_of(row["low"], row["high"], MARGINS["accuracy"]) == "inferior"]
    lines = [
        f"- {interval(row)} ({place(row)}, {row['metric'].replace('_', ' ')}) to {row['rival']}"
        for row in sorted(lost, key=lambda row: row["mean"])
    ]
    return "\n".join(lines) or "None."


def interval(row: Row) -> str:
    return Estimate(row["mean"], row["low"], row["high"]).points()


def place(row: Row) -> str:
    return f"{SETS[row['set']]}, {row['heads']}, {row['stream']}, {row['batch']}"


def choice_list(choices: Sequence[Row]) -> str:
    """What `auto` took, and how often."""
    lines = []
    for name, title in SETS.items():
        taken = [row["method"] for row in picked(choices, set=name)]
        counted = sorted(((taken.count(method), method) for method in set(taken)), reverse=True)
        if taken:
            lines.append(f"- {title}: " + ", ".join(f"{each} at {n} of {len(taken)}" for n, each in counted))
    return "\n".join(lines)


def batchnorm_table() -> str:
    record = json.loads((RESULTS / "batchnorm_pacs.json").read_text(encoding="utf-8"))
    streams = list(dict.fromkeys(row["stream"] for row in record["rows"]))
    lines = [f"| EfficientNet-Lite0, PACS | {' | '.join(streams)} |", "|---|" + "---:|" * len(streams)]
    for method in dict.fromkeys(row["method"] for row in record["rows"]):
        rows = picked(record["rows"], method=method)
        values = [np.mean([row["accuracy"] for row in picked(rows, stream=stream)]) for stream in streams]
        lines.append(f"| {method} | {' | '.join(f'{value:.1f}' for value in values)} |")
    return "\n".join(lines)


def all_blocks() -> dict[str, Callable[[], str]]:
    """Every block by its name, not drawn yet."""
    joined = records()
    rows, differences = joined["rows"], joined["differences"]
    of_few = {row["method"] for row in rows} - {row["method"] for row in picked(rows, heads="independent")}
    every = list(dict.fromkeys(row["method"] for row in rows if row["method"] not in of_few))
    blocks: dict[str, Callable[[], str]] = {
        "summary": partial(main_table, rows, SUMMARY),
        "every-method": partial(main_table, rows, every),
        "ablation": partial(main_table, rows, ABLATION, 2),
        "probabilities": partial(probability_table, rows, CALIBRATION[:1] + CALIBRATION[2:3]),
        "all-probabilities": partial(probability_table, rows, CALIBRATION),
        "costs": partial(cost_table, rows, ("mean", "entropy_adaptive(score_images=8)", ONCE,
                                            "merge_and_fit(ask_first=256, ask_every=4)", ENSEMBLE, PAPER, RULE)),
        "whole": partial(whole_table, rows),
        "long": lambda: long_table(records("long_streams")["rows"]),
        "bars": partial(bar_table, differences),
        "endpoints": partial(endpoint_table, differences),
        "losses": partial(losses, differences),
        "choices": partial(choice_list, joined["choices"]),
        "batchnorm": batchnorm_table,
        **runpy.run_path(str(Path(__file__).with_name("speed_tables.py")))["speed_blocks"](),
        **runpy.run_path(str(Path(__file__).with_name("correction_tables.py")))["correction_blocks"](),
        **runpy.run_path(str(Path(__file__).with_name("paper_tables.py")))["paper_blocks"](rule_gains(rows)),
    }  # fmt: skip
    for name in SETS:
        blocks[name] = partial(stream_table, rows, name, (*SUMMARY[:5], RULE, ONCE), SHOWN[name], LOG_ONLY)
        blocks[f"{name}-sizes"] = partial(size_table, rows, name)
        for metric in (*METRICS, "nll"):
            blocks[f"{name}-{metric}"] = partial(stream_table, rows, name, SUMMARY, (metric,))
    return blocks


def draw_costs(rows: Sequence[Row], path: Path) -> None:
    """Accuracy against forwards per image, one panel per data set."""
    figure, axes = new_figure(12, 4, columns=len(SETS))
    methods = (*SUMMARY[:-1], "merge_and_fit(ask_first=256, ask_every=4)")
    colours = colours_of(list(methods))
    for ax, name in zip(axes[0], SETS, strict=True):
        metric = SHOWN[name][:2][-1]
        for method, colour in colours.items():
            for stream, marker in zip(MAIN, "o^", strict=True):
                own = picked(rows, set=name, stream=stream, batch=USUAL, method=method)
                label = method if stream == MAIN[0] else None
                values = mean_of(own, "forwards"), 100 * mean_of(own, metric)
                ax.plot(*[[value] for value in values], marker, color=colour, label=label)
        ax.set_xlabel("forwards per image")
        ax.set_ylabel(f"{metric.replace('_', ' ')}, %")
        ax.set_title(f"{SETS[name]}: ● {MAIN[0]}, ▲ {MAIN[1]}", loc="left", fontsize=10)
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), frameon=False, fontsize=8, ncols=5, loc="outside lower center"
    )
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    drawn = {name: draw() for name, draw in all_blocks().items()}
    for page in (ROOT / name for name in PAGES):
        page.write_text(with_blocks(page.read_text(encoding="utf-8"), drawn, page), encoding="utf-8")
    draw_costs(records()["rows"], ROOT / "docs" / "figures" / "accuracy-and-forwards.png")
