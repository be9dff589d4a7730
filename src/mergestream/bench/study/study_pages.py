"""The tables of docs/results.md from a record's groups, each by its name."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from mergestream.bench.analysis.comparison import Estimate
from mergestream.bench.analysis.cost import shown
from mergestream.bench.report.bench_tables import percent
from mergestream.bench.report.result_table import ResultTable, grid_table, to_markdown
from mergestream.bench.study.results_plan import COMPARED, HEAD_INITS, LOSS, MAIN_STREAMS, METRICS, OURS, PAPER
from mergestream.bench.study.study_bars import (
    TITLES,
    Setting,
    all_bars,
    collapses_of,
    difference,
    estimate,
    loud_rows,
    methods_of,
    places,
    select,
    settings_of,
)
from mergestream.bench.study.study_record import SINGLE, Group

LATER = " (later run)"
ALONE, BEST = "an expert alone: mean", "an expert alone: best, by labels"
PAIRS = ((OURS, PAPER), (OURS, "ensemble"), (OURS, "mean"), (PAPER, "mean"), (PAPER, "ensemble"))


def main_table(groups: Sequence[Group], dataset: str) -> str:
    """Methods by head start, loss and stream; below it the methods that did not run, and why."""
    mine = [group for group in groups if group["kind"] == "main" and group["dataset"] == dataset]
    methods = [name for name in methods_of(mine) if not name.startswith(SINGLE)]
    later = {group["ours"]: f"{group['ours']}{LATER}" for group in mine if group["later"]}
    cells: dict[tuple[str, str], str] = {}
    for loss, start in product(dict.fromkeys((LOSS[dataset], "plain")), HEAD_INITS):
        own, late = (select(groups, "main", dataset, start, loss, later=which) for which in (False, True))
        for stream in MAIN_STREAMS if own else ():
            column = f"{start}{'' if loss == LOSS[dataset] else f', {loss} loss'}: {stream}"
            for name in (*methods, ALONE, BEST):
                cells[name, column] = _scores(own, name, Setting(stream), dataset)
            for name, row in later.items():
                cells[row, column] = _scores(late, name, Setting(stream), dataset) if late else "–"
    reasons = {name: why for group in mine for name, why in group["left_out"].items()}
    notes = "".join(f"\nNot run: `{name}`: {reason}\n" for name, reason in reasons.items())
    return _grid("method", cells, methods) + notes


def _scores(own: Sequence[Group], method: str, at: Setting, dataset: str) -> str:
    if method in (ALONE, BEST):
        return " / ".join(_alone(own, method, at, metric) for metric in METRICS[dataset])
    return " / ".join(_percent(estimate(own, method, at, metric)) for metric in METRICS[dataset])


def _percent(value: Estimate | None) -> str:
    return percent(value) if value is None or not math.isnan(value.low) else f"{100 * value.mean:.1f}"


def _alone(own: Sequence[Group], which: str, at: Setting, metric: str) -> str:
    """Single experts: their mean at every target, or the one that labels show to be best: a bound, no method."""
    values = []
    for group in own:
        here = [row for row in group["rows"] if row["method"].startswith(SINGLE) and row["stream"] == at.stream]
        for target in dict.fromkeys(row["target"] for row in here):
            scores = [row[metric] for row in here if row["target"] == target and row[metric] is not None]
            values.append(max(scores) if which == BEST else float(np.mean(scores)))
    return f"{100 * np.mean(values):.1f}" if values else "–"


def _grid(corner: str, cells: Mapping[tuple[str, str], str], competing: Collection[str]) -> str:
    """Cells by row and column; bold: the highest first number of every column among the competing rows."""
    table = grid_table("", corner, cells, str)
    best = set()
    for column in range(1, len(table.columns)):
        texts = {r: row[column] for r, row in enumerate(table.rows) if row[0] in competing and row[column][0].isdigit()}
        values = {r: float(text.split(" ")[0]) for r, text in texts.items()}
        best |= {(r, column) for r, value in values.items() if value == max(values.values())}
    return to_markdown(replace(table, best=frozenset(best)))


def _markdown(
    columns: Sequence[str], rows: Sequence[tuple[str, ...]], bold: frozenset[tuple[int, int]] = frozenset()
) -> str:
    return to_markdown(ResultTable("", tuple(columns), tuple(rows), bold))


def differences_table(groups: Sequence[Group]) -> str:
    """The paired differences on every stream; bold where the interval excludes 0."""
    rows, clear = list[tuple[str, ...]](), set[tuple[int, int]]()
    for place, own, at, metric in (each for d in METRICS for each in places(groups, d, ("main", "streams"))):
        gaps = [difference(own, a, b, at, metric) for a, b in PAIRS]
        clear |= {(len(rows), c) for c, gap in enumerate(gaps, 1) if gap and (gap.low > 0 or gap.high < 0)}
        rows.append((place.replace(" heads", ""), *("–" if gap is None else gap.points() for gap in gaps)))
    return _markdown(("points", *(f"{a} - {b}" for a, b in PAIRS)), rows, frozenset(clear))


def streams_table(groups: Sequence[Group], kind: str, dataset: str) -> str:
    """The compared methods on the other streams, or in batches of all sizes."""
    parts = []
    for start in HEAD_INITS:
        own = select(groups, kind, dataset, start)
        places = product(methods_of(own), settings_of(own))
        cells = {(name, at.condition or at.stream): _scores(own, name, at, dataset) for name, at in places}
        parts.append(_grid(f"{start} heads", cells, methods_of(own)))
    return "\n".join(parts)


def ablation_table(groups: Sequence[Group], dataset: str) -> str:
    """Every variant, and its paired difference to the paper's rule."""
    rows = []
    columns = list(product(MAIN_STREAMS, METRICS[dataset]))
    for start in HEAD_INITS:
        own = select(groups, "ablation", dataset, start)
        for name in methods_of(own):
            cells = []
            for stream, metric in columns:
                value, gap = (
                    estimate(own, name, Setting(stream), metric),
                    difference(own, name, PAPER, Setting(stream), metric),
                )
                shown = "" if name == PAPER or gap is None else f" ({gap.points()})"
                cells.append("–" if value is None else f"{100 * value.mean:.1f}{shown}")
            rows.append((f"{start}: {name}", *cells))
    return _markdown(("heads: variant", *(f"{s}, {m.replace('_', ' ')}" for s, m in columns)), rows)


def costs_table(groups: Sequence[Group]) -> str:
    measured = [group for group in groups if group["kind"] == "costs" and not group["later"]]
    names = dict.fromkeys(cost["method"] for group in measured for cost in group["costs"])
    columns, cells = ["method"], {name: [name] for name in names}
    for group in measured:
        by = {cost["method"]: cost for cost in group["costs"]}
        first = next(iter(by.values()))
        columns += [f"{TITLES[group['dataset']]}, {first['experts']} experts: ms per step", "forwards per image"]
        for name, row in cells.items():
            cost = by.get(name)
            other = "" if cost is None or cost["dtype"] == first["dtype"] else f" ({cost['dtype']})"
            row += ["–", "–"] if cost is None else [f"{cost['ms']:.2f}{other}", shown(cost["forwards"])]
    return _markdown(columns, [tuple(row) for row in cells.values()])


def hostile_table(groups: Sequence[Group]) -> str:
    rows = []
    for dataset, metrics in METRICS.items():
        for method in COMPARED:
            for condition, row in loud_rows(groups, dataset, method).items():
                scores = " / ".join(f"{100 * row[metric]:.1f}" for metric in metrics)
                agreed = f"{100 * row['agrees_with_loud']:.1f}"
                rows.append((f"{TITLES[dataset]}: {method}, {condition}", scores, agreed))
    return _markdown(("shared heads, iid", "score", "answers that are the loud expert's, %"), rows)


def collapses_table(groups: Sequence[Group]) -> str:
    """In how many runs a class vanished that every expert predicts, by data set, loss and head start."""
    main = [group for group in groups if group["kind"] == "main"]
    kinds = dict.fromkeys((g["dataset"], g["loss"], g["head_init"]) for g in main)
    rows = []
    for name in (name for name in methods_of(main) if not name.startswith(SINGLE)):
        cells = []
        for kind in kinds:
            own = [g for g in groups if (g["dataset"], g["loss"], g["head_init"]) == kind and not g["later"]]
            count, collapsed = collapses_of(own, name)
            cells.append(f"{len({text.split(': ')[0] for text in collapsed})} of {count}")
        rows.append((name, *cells))
    columns = [f"{TITLES[dataset]}, {loss} loss, {start} heads" for dataset, loss, start in kinds]
    return _markdown(("runs in which a class vanished", *columns), rows)


def times_table(groups: Sequence[Group]) -> str:
    """Seconds of every stage; pools trained or benched again are left out."""
    seconds: dict[str, dict[str, float]] = {}
    for group in (group for group in groups if not group["later"]):
        seconds.setdefault(group["stage"], {}).setdefault(group["pool"], group["seconds"])
    rows = [(stage, str(len(pools)), f"{sum(pools.values()):.0f}") for stage, pools in seconds.items()]
    total = sum(sum(pools.values()) for pools in seconds.values())
    return _markdown(("stage", "pools", "seconds"), [*rows, ("all", "", f"{total:.0f}")])


def summary_table(groups: Sequence[Group]) -> str:
    """The README's: four methods, shared heads, both main streams."""
    cells = {}
    for (dataset, metrics), stream, name in product(METRICS.items(), MAIN_STREAMS, COMPARED):
        own = select(groups, "main", dataset, HEAD_INITS[0])
        values = [estimate(own, name, Setting(stream), metric) for metric in metrics]
        text = " / ".join("–" if value is None else f"{100 * value.mean:.1f}" for value in values)
        cells[name, f"{TITLES[dataset]} {' / '.join(metrics).replace('_', ' ')}: {stream}"] = text
    return _grid("method", cells, COMPARED)


def all_blocks(groups: Sequence[Group]) -> dict[str, str]:
    """Every block by name, of first runs; those of later ones as later-NAME."""
    return {
        name if run == "first" else f"{run}-{name}": text
        for run, own in runs_of(groups).items()
        for name, text in _blocks(own).items()
    }


def runs_of(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Groups of the first run with later rows beside them, and those of later runs alone."""
    late = [{**group, "later": False, "only_later": True} for group in groups if group["later"]]
    first = list(groups) if any(not group["later"] for group in groups if "ours" in group) else late
    return {"first": first} | ({"later": late} if late else {})


def _blocks(groups: Sequence[Group]) -> dict[str, str]:
    blocks = {
        "summary": summary_table(groups),
        "bars": _bars(groups),
        "pacs": main_table(groups, "pacs"),
        "midog": main_table(groups, "midog"),
        "differences": differences_table(groups),
    }
    for dataset in METRICS:
        blocks |= {
            f"streams-{dataset}": streams_table(groups, "streams", dataset),
            f"batches-{dataset}": streams_table(groups, "batches", dataset),
            f"ablation-{dataset}": ablation_table(groups, dataset),
        }
    return blocks | {
        "costs": costs_table(groups),
        "hostile": hostile_table(groups),
        "collapses": collapses_table(groups),
        "times": times_table(groups),
    }


def _bars(groups: Sequence[Group]) -> str:
    """One line per bar, and how many hold."""
    bars = all_bars(groups)
    counts = [sum(bar.holds is state for bar in bars) for state in (True, False, None)]
    head = f"{counts[0]} of {len(bars)} bars hold, {counts[1]} do not, {counts[2]} were not measured."
    if any(group.get("only_later") for group in groups):
        head += " All rows are of a **later run**: the rule had been run on these data before."
    return head + "\n\n" + "\n".join(f"- {bar.sentence}" for bar in bars) + "\n"
