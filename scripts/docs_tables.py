"""Rewrite the marked blocks of the results pages and the README from the committed records: scripts/docs_tables.py."""

import json
import re
import runpy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    "docs/log/results_confirmation.md",
    "docs/log/results_first.md",
    "README.md",
)
TITLES = {"pacs": "PACS", "midog": "MIDOG"}
CONFIRMED = {"pacs-clip": "PACS, CLIP", "pacs": "PACS, ViT-S", "midog": "MIDOG, ViT-S"}
SHOWN = {"pacs-clip": ("accuracy",), "pacs": ("accuracy",), "midog": ("accuracy", "balanced_accuracy", "auroc")}
MAIN = ("iid", "dirichlet:0.05")
PAPER, RULE, ONCE = "entropy_adaptive", "merge_and_fit", "merge_once(ask_first=256)"
SUMMARY = ("mean", "ensemble(views=hflip)", PAPER, "corrected", "lame(ensemble(views=hflip))", "t3a(mean)", RULE, ONCE)
ABLATION = ("ensemble(views=hflip)", "corrected", "merge_and_fit(correct=False)", "merge_and_fit(temperature=1)",
            "merge_and_fit(views=())", "merge_and_fit(ask_first=256, ask_every=4)", ONCE, RULE)  # fmt: skip
AUTO = "auto"
SHORT = (*(method for method in SUMMARY if method != "t3a(mean)"), AUTO)
CALIBRATION = ("nll", "brier", "ece", "calibration_in_the_large")
BEST_OF = ("mean", "ensemble(views=hflip)", PAPER, "corrected", "lame(ensemble(views=hflip))")
BOUND = 2.0  # points that the rule may be below the ensemble at a single target
Row = Mapping[str, Any]


def two_cores() -> dict[str, Any]:
    return json.loads((RESULTS / "two_cores.json").read_text(encoding="utf-8"))


def confirmation() -> dict[str, Any]:
    """The runs whose experts had no part in any choice, joined; CLIP's rows count as a data set of their own."""
    joined: dict[str, Any] = {"rows": [], "differences": [], "choices": []}
    for file in sorted((RESULTS / "confirmation").glob("*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        suffix = "-clip" if "clip" in record["about"]["network"] else ""
        for key, rows in joined.items():
            rows += [{**row, "dataset": row["dataset"] + suffix, "confirmed": True} for row in record[key]]
    return joined


def follow_up_table() -> str:
    """The streams that the confirmation left out: ViT-S/14, training seed 1, shared heads, accuracy."""
    rows: list[Row] = []
    for file in sorted((RESULTS / "follow_up").glob("*.json")):
        rows += json.loads(file.read_text(encoding="utf-8"))["rows"]
    settings = dict.fromkeys((row["dataset"], row["stream"], row["batch"]) for row in rows)
    cells = {
        (method, f"{TITLES[dataset]}: {stream}, batches of {batch}"): scores(
            picked(rows, dataset=dataset, stream=stream, batch=batch, method=method), ("accuracy",)
        )
        for method in dict.fromkeys(row["method"] for row in rows)
        for dataset, stream, batch in settings
    }
    return table("method", cells)


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
    return to_markdown(mark_best(grid_table("", corner, cells, str), ())).replace(" / ", "/")


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


def stream_table(rows: Sequence[Row], dataset: str, methods: Sequence[str] = (*SUMMARY, AUTO)) -> str:
    """Methods on every stream of a data set, mean of both head starts, batches of 32."""
    own = picked(rows, dataset=dataset, batch=32)
    streams = dict.fromkeys(row["stream"] for row in own)
    cells = {
        (method, stream): scores(picked(own, method=method, stream=stream), SHOWN[dataset])
        for method in methods
        for stream in streams
    }
    return table(CONFIRMED[dataset], cells)


def confirmed_table(rows: Sequence[Row]) -> str:
    """Accuracy, or accuracy / balanced accuracy / AUROC."""
    cells = {}
    for method in (*SUMMARY, AUTO):
        for dataset, title in CONFIRMED.items():
            for stream in MAIN:
                own = picked(rows, dataset=dataset, batch=32, method=method, stream=stream)
                cells[method, f"{title}: {stream}"] = scores(own, SHOWN[dataset])
    return table("method", cells)


def calibration_table(
    rows: Sequence[Row],
    metrics: Sequence[str] = CALIBRATION,
    methods: Sequence[str] = ("ensemble(views=hflip)", PAPER, "corrected", RULE, ONCE, AUTO),
) -> str:
    names = "/".join(name.upper() if len(name) == 3 else name.replace("_", " ") for name in metrics)
    heads = [f"{title}: {stream}" for title in CONFIRMED.values() for stream in MAIN]
    lines = [f"| {names} | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for method in methods:
        cells = []
        for dataset in CONFIRMED:
            for stream in MAIN:
                own = picked(rows, dataset=dataset, batch=32, method=method, stream=stream)
                cells.append("/".join(f"{mean_of(own, metric):.2f}" for metric in metrics))
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Bars:
    """How a rule meets the bars of the protocol."""

    rule: str
    best_rival: list[int]  # settings by outcome: better, not inferior, undecided, inferior
    paper: list[int]  # the same against the paper's rule
    far: int  # settings more than BOUND points below the ensemble at a single target ...
    settings: int  # ... of so many
    lowest: Row


def bars_of(record: Mapping[str, Any], rule: str) -> Bars:
    """A rule against the best rival of every setting, the ensemble, and the paper's rule."""
    own = [row for row in record["differences"] if row["ours"] == rule]
    settings = dict.fromkeys((r["dataset"], r["heads"], r["stream"], r["batch"], r["metric"]) for r in own)
    against_best = []
    for dataset, heads, stream, batch, metric in settings:
        here = picked(own, dataset=dataset, heads=heads, stream=stream, batch=batch, metric=metric)
        # The best rival is the one that the rule is furthest behind.
        against_best.append(min((row for row in here if row["rival"] in BEST_OF), key=lambda row: row["mean"]))
    single = picked(own, rival="ensemble", metric="accuracy")
    far = [row for row in single if 100 * row["worst"] < -BOUND]
    lowest = min(single, key=lambda row: row["worst"])
    paper = outcome_counts(picked(own, rival=PAPER))
    return Bars(rule, outcome_counts(against_best), paper, len(far), len(single), lowest)


def bar_table(record: Mapping[str, Any]) -> str:
    lines = ["| rule | against the best rival: better | not inferior | undecided | inferior | > 2 points below the "
             "ensemble at a target | lowest | against the paper's rule: better | inferior |",
             "|---|---:|---:|---:|---:|---:|---|---:|---:|"]  # fmt: skip
    for bars in (bars_of(record, rule) for rule in (RULE, ONCE, AUTO)):
        lowest = bars.lowest
        lines.append(
            f"| {bars.rule} | {' | '.join(map(str, bars.best_rival))} | {bars.far} of {bars.settings} | "
            f"{100 * lowest['worst']:+.1f} ({CONFIRMED[lowest['dataset']]}, {lowest['heads']}, {lowest['stream']}, "
            f"{lowest['batch']}, {lowest['worst_target']}) | {bars.paper[0]} of {sum(bars.paper)} | {bars.paper[3]} |"
        )
    return "\n".join(lines)


def short_bars(record: Mapping[str, Any]) -> str:
    """The outcomes as one word each."""
    lines = ["| rule | against the best rival | against the paper's rule | far below the ensemble | lowest |",
             "|---|---:|---:|---:|---:|"]  # fmt: skip
    for bars in (bars_of(record, rule) for rule in (RULE, ONCE, AUTO)):
        outcomes = ["/".join(map(str, counts)) for counts in (bars.best_rival, bars.paper)]
        lines.append(
            f"| {bars.rule} | {' | '.join(outcomes)} | {bars.far}/{bars.settings} | {100 * bars.lowest['worst']:+.1f} |"
        )
    return "\n".join(lines)


def outcome_counts(rows: Sequence[Row]) -> list[int]:
    outcomes = [outcome_of(row["low"], row["high"], MARGINS["accuracy"]) for row in rows]
    return [outcomes.count(name) for name in ("better", "not inferior", "undecided", "inferior")]


def losses(record: Mapping[str, Any]) -> str:
    """Every setting where the recommended rule is inferior to a rival, worst first."""
    own = [row for row in record["differences"] if row["ours"] == RULE and row["rival"] in BEST_OF]
    lost = [row for row in own if outcome_of(row["low"], row["high"], MARGINS["accuracy"]) == "inferior"]
    lines = [f"- {place(row)} to {row['rival']}" for row in sorted(lost, key=lambda row: row["mean"])]
    return "\n".join(lines) or "None."


def choice_list(record: Mapping[str, Any]) -> str:
    """What `auto` took, and how often."""
    lines = []
    for dataset, title in CONFIRMED.items():
        taken = [row["method"] for row in picked(record["choices"], dataset=dataset)]
        counted = sorted(((taken.count(name), name) for name in set(taken)), reverse=True)
        lines.append(f"- {title}: " + ", ".join(f"{name} at {count} of {len(taken)}" for count, name in counted))
    return "\n".join(lines)


def ablation_table(rows: Sequence[Row], titles: Mapping[str, str] = TITLES, methods: Sequence[str] = ABLATION) -> str:
    cells = {}
    for method in methods:
        for dataset, title in titles.items():
            for stream in MAIN:
                own = picked(rows, dataset=dataset, batch=32, method=method, stream=stream)
                cells[method, f"{title}: {stream}"] = scores(own, SHOWN[dataset][:2])
    return table("method", cells)


def probability_table(rows: Sequence[Row]) -> str:
    """How good the probabilities are: lower is better everywhere, so nothing is bold."""
    lines = ["| NLL/Brier/ECE/calibration in the large | " + " | ".join(
        f"{TITLES[dataset]}: {stream}" for dataset in TITLES for stream in MAIN) + " |",
        "|---|" + "---:|" * (len(TITLES) * len(MAIN))]  # fmt: skip
    for method in SUMMARY:
        cells = []
        for dataset in TITLES:
            for stream in MAIN:
                own = picked(rows, dataset=dataset, heads="shared", batch=32, method=method, stream=stream)
                cells.append("/".join(f"{mean_of(own, metric):.2f}" for metric in CALIBRATION))
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cost_table(rows: Sequence[Row], listed: Sequence[str], titles: Mapping[str, str] = TITLES) -> str:
    """Accuracy against forwards per image, i.i.d. streams of all sets."""
    heads = [f"forwards per image, {title} | {SHOWN[name][:2][-1].replace('_', ' ')}" for name, title in titles.items()]
    lines = [f"| method | {' | '.join(heads)} |", "|---|" + "---:|" * (2 * len(titles))]

    def own(method: str, dataset: str) -> list[Row]:
        return picked(rows, dataset=dataset, stream="iid", batch=32, method=method)

    ran = [name for name in dict.fromkeys(row["method"] for row in rows) if name in listed]
    for method in sorted(ran, key=lambda name: mean_of(own(name, next(iter(titles))), "forwards")):
        cells = []
        for dataset in titles:
            here, metric = own(method, dataset), SHOWN[dataset][:2][-1]
            cells += [f"{mean_of(here, 'forwards'):.1f}", f"{100 * mean_of(here, metric):.1f}"]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def short_costs(rows: Sequence[Row]) -> str:
    """Forwards per image, and accuracy or balanced accuracy, in one cell per data set; i.i.d. streams."""
    lines = [f"| forwards/accuracy | {' | '.join(CONFIRMED.values())}, balanced |", "|---|" + "---:|" * len(CONFIRMED)]
    own = picked(rows, stream="iid", batch=32)
    ran = {method: picked(own, method=method) for method in (*SUMMARY, AUTO, "merge_and_fit(views=())")}
    for method, here in sorted(ran.items(), key=lambda item: mean_of(item[1], "forwards")):
        cells = []
        for dataset in CONFIRMED:
            at = picked(here, dataset=dataset)
            cells.append(f"{mean_of(at, 'forwards'):.1f}/{100 * mean_of(at, SHOWN[dataset][:2][-1]):.1f}")
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
    title = (CONFIRMED if row.get("confirmed") else TITLES)[row["dataset"]]
    return f"{interval} ({title}, {row['heads']}, {row['stream']}, {row['batch']}, {row['metric'].replace('_', ' ')})"


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
    record, confirmed = two_cores(), confirmation()
    rows = record["rows"]
    blocks: dict[str, Callable[[], str]] = {
        "summary": partial(summary_table, rows),
        "ablation": partial(ablation_table, rows),
        "probabilities": partial(probability_table, rows),
        "costs": partial(cost_table, rows, list(dict.fromkeys(row["method"] for row in rows))),
        "verdicts": partial(verdicts, record["differences"]),
        "confirmed": partial(confirmed_table, confirmed["rows"]),
        "confirmed-calibration": partial(calibration_table, confirmed["rows"]),
        "short-calibration": partial(
            calibration_table, confirmed["rows"], ("nll", "ece"), ("ensemble(views=hflip)", PAPER, "corrected", RULE)
        ),
        "short-ablation": partial(ablation_table, confirmed["rows"], CONFIRMED, ABLATION[2:]),
        "short-costs": partial(short_costs, confirmed["rows"]),
        "short-bars": partial(short_bars, confirmed),
        "confirmed-costs": partial(cost_table, confirmed["rows"], (*SUMMARY, AUTO, *ABLATION), CONFIRMED),
        "confirmed-ablation": partial(ablation_table, confirmed["rows"], CONFIRMED),
        "bars": partial(bar_table, confirmed),
        "losses": partial(losses, confirmed),
        "choices": partial(choice_list, confirmed),
        "batchnorm": batchnorm_table,
        "follow-up": follow_up_table,
        **runpy.run_path(str(Path(__file__).with_name("speed_tables.py")))["speed_blocks"](),
    }
    for dataset in TITLES:
        for heads in ("shared", "independent"):
            blocks[f"{dataset}-{heads}"] = partial(data_table, rows, dataset, heads)
    for dataset in CONFIRMED:
        blocks[f"confirmed-{dataset}"] = partial(stream_table, confirmed["rows"], dataset)
        blocks[f"short-{dataset}"] = partial(stream_table, confirmed["rows"], dataset, SHORT)
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
