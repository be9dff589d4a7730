"""The tables of docs/results.md as functions of the record's groups."""

import math
from collections.abc import Sequence

import numpy as np
from bars import LOSS, TITLES, collapses, loud_rows, points
from pairing import Where, difference, estimate, methods, places, select
from recipes import HEAD_INITS, MAIN_STREAMS, METRICS, PAPER, RIVALS
from records import Group

from mergestream.bench.analysis.comparison import Estimate
from mergestream.bench.report.bench_tables import percent
from mergestream.bench.report.result_table import ResultTable as Table
from mergestream.bench.report.result_table import to_markdown

SINGLE = "single_expert"
LATER = " (later run)"
ALONE, BEST = "an expert alone: mean", "an expert alone: best, by labels"


def main_table(groups: Sequence[Group], dataset: str, losses: Sequence[str]) -> str:
    """Methods by head start and stream; below it what was not run, and why."""
    settings = [(start, loss) for loss in losses for start in HEAD_INITS]
    settings = [each for each in settings if select(groups, "main", dataset, *each)]
    columns, cells = [], dict[str, list[str]]()
    names = methods([g for g in groups if g["kind"] == "main" and g["dataset"] == dataset])
    shown = [*(name for name in names if not name.startswith(SINGLE)), ALONE, BEST]
    for start, loss in settings:
        own = select(groups, "main", dataset, start, loss)
        late = select(groups, "main", dataset, start, loss, later=True)
        for stream in MAIN_STREAMS:
            columns.append(f"{start}{'' if loss == LOSS[dataset] else f', {loss} loss'}: {stream}")
            for name in shown:
                cells.setdefault(name, []).append(_scores(own, name, Where(stream), dataset))
            for name in {group["ours"] for group in late}:
                cells.setdefault(name + LATER, []).append(_scores(late, name, Where(stream), dataset))
    width = max(map(len, cells.values()), default=0)
    rows = tuple((name, *values, *["–"] * (width - len(values))) for name, values in cells.items())
    best = _best(rows[: len(shown) - 2])
    why = {n: w for g in groups if g["kind"] == "main" and g["dataset"] == dataset for n, w in g["left_out"].items()}
    notes = "".join(f"\nNot run: `{name}`: {reason}\n" for name, reason in why.items())
    return to_markdown(Table("", ("method", *columns), rows, best)) + notes


def _scores(own: Sequence[Group], method: str, where: Where, dataset: str) -> str:
    if method in (ALONE, BEST):
        return " / ".join(_alone(own, method, where, metric) for metric in METRICS[dataset])
    return " / ".join(_percent(estimate(own, method, where, metric)) for metric in METRICS[dataset])


def _percent(value: Estimate | None) -> str:
    return percent(value) if value is None or not math.isnan(value.low) else f"{100 * value.mean:.1f}"


def _alone(own: Sequence[Group], which: str, where: Where, metric: str) -> str:
    """Single experts: their mean at every target, or the one that labels show to be best: a bound, no method."""
    found = []
    for group in own:
        here = [r for r in group["rows"] if r["method"].startswith(SINGLE) and r["stream"] == where.stream]
        for target in dict.fromkeys(row["target"] for row in here):
            values = [row[metric] for row in here if row["target"] == target and row[metric] is not None]
            found.append(max(values) if which == BEST else float(np.mean(values)))
    return f"{100 * np.mean(found):.1f}" if found else "–"


def _best(rows: Sequence[tuple[str, ...]]) -> frozenset[tuple[int, int]]:
    """The highest first number of every column."""
    marked = set()
    for column in range(1, len(rows[0]) if rows else 0):
        values = {r: float(row[column].split(" ")[0]) for r, row in enumerate(rows) if row[column][0].isdigit()}
        marked |= {(r, column) for r, value in values.items() if value == max(values.values())}
    return frozenset(marked)


def differences_table(groups: Sequence[Group], ours: str) -> str:
    """The five paired differences on every stream; bold where the interval excludes 0."""
    pairs = [(ours, PAPER), (ours, "ensemble"), (ours, "mean")] if ours != PAPER else []
    pairs += [(PAPER, "mean"), (PAPER, "ensemble")]
    rows, clear = [], set()
    for dataset, metrics in METRICS.items():
        for start in HEAD_INITS:
            for kind in ("main", "streams"):
                own = select(groups, kind, dataset, start, LOSS[dataset])
                for where, metric in ((w, m) for w in places(own) for m in metrics):
                    found = [difference(own, a, own, b, where, metric) for a, b in pairs]
                    clear |= {(len(rows), c) for c, gap in enumerate(found, 1) if gap and _excludes_zero(gap)}
                    place = f"{TITLES[dataset]}, {start}, {where.told}, {metric.replace('_', ' ')}"
                    rows.append((place, *("–" if gap is None else points(gap) for gap in found)))
    columns = ("points", *(f"{a} - {b}" for a, b in pairs))
    return to_markdown(Table("", columns, tuple(rows), frozenset(clear)))


def _excludes_zero(gap: Estimate) -> bool:
    return gap.low > 0 or gap.high < 0


def streams_table(groups: Sequence[Group], kind: str, dataset: str) -> str:
    """The compared methods on the other streams, or in batches of all sizes."""
    parts = []
    for start in HEAD_INITS:
        own = select(groups, kind, dataset, start, LOSS[dataset])
        found = places(own)
        rows = tuple((name, *(_scores(own, name, where, dataset) for where in found)) for name in methods(own))
        columns = (f"{start} heads", *(where.condition or where.stream for where in found))
        parts.append(to_markdown(Table("", columns, rows, _best(rows))))
    return "\n".join(parts)


def ablation_table(groups: Sequence[Group], dataset: str) -> str:
    """Every variant, and its paired difference to the full method."""
    rows = []
    for start in HEAD_INITS:
        own = select(groups, "ablation", dataset, start, LOSS[dataset])
        for name in methods(own):
            cells = []
            for stream, metric in ((s, m) for s in MAIN_STREAMS for m in METRICS[dataset]):
                gap = difference(own, name, own, "full", Where(stream), metric)
                told = "" if name == "full" or gap is None else f" ({points(gap)})"
                value = estimate(own, name, Where(stream), metric)
                cells.append("–" if value is None else f"{100 * value.mean:.1f}{told}")
            rows.append((f"{start}: {name}", *cells))
    columns = [f"{s}, {m.replace('_', ' ')}" for s in MAIN_STREAMS for m in METRICS[dataset]]
    return to_markdown(Table("", ("heads: variant", *columns), tuple(rows)))


def costs_table(groups: Sequence[Group]) -> str:
    found = [group for group in groups if group["kind"] == "costs" and not group["later"]]
    names = dict.fromkeys(cost["method"] for group in found for cost in group["costs"])
    columns, cells = ["method"], {name: [name] for name in names}
    for group in found:
        by = {cost["method"]: cost for cost in group["costs"]}
        first = next(iter(by.values()))
        columns += [f"{TITLES[group['dataset']]}, {first['experts']} experts: ms a step", "forwards an image"]
        for name, row in cells.items():
            cost = by.get(name)
            other = "" if cost is None or cost["dtype"] == first["dtype"] else f" ({cost['dtype']})"
            row += ["–", "–"] if cost is None else [f"{cost['ms']:.2f}{other}", f"{cost['forwards']:g}"]
    return to_markdown(Table("", tuple(columns), tuple(map(tuple, cells.values()))))


def hostile_table(groups: Sequence[Group], ours: str) -> str:
    rows = []
    for dataset, metrics in METRICS.items():
        for method in dict.fromkeys((*RIVALS, ours)):
            for condition, row in loud_rows(groups, dataset, method).items():
                scores = " / ".join(f"{100 * row[metric]:.1f}" for metric in metrics)
                agreed = f"{100 * row['agrees_with_loud']:.1f}"
                rows.append((f"{TITLES[dataset]}: {method}, {condition}", scores, agreed))
    return to_markdown(Table("", ("shared heads, iid", "score", "answers that are the loud expert's, %"), tuple(rows)))


def collapses_table(groups: Sequence[Group]) -> str:
    """In how many runs a method gave up a class that every expert says, by data set, loss and head start."""
    kinds = dict.fromkeys((g["dataset"], g["loss"], g["head_init"]) for g in groups if g["kind"] == "main")
    names = [name for name in methods([g for g in groups if g["kind"] == "main"]) if not name.startswith(SINGLE)]
    rows = []
    for name in names:
        cells = [collapses([g for g in groups if _kind(g) == kind and not g["later"]], name) for kind in kinds]
        rows.append((name, *(f"{len({text.split(': ')[0] for text in found})} of {looked}" for looked, found in cells)))
    columns = [f"{TITLES[dataset]}, {loss} loss, {start} heads" for dataset, loss, start in kinds]
    return to_markdown(Table("", ("classes given up, of runs", *columns), tuple(rows)))


def _kind(group: Group) -> tuple[str, str, str]:
    return group["dataset"], group["loss"], group["head_init"]


def times_table(groups: Sequence[Group]) -> str:
    """Seconds of every stage, those of pools trained or benched again left out."""
    seconds: dict[str, dict[str, float]] = {}
    for group in groups:
        if not group["later"]:
            seconds.setdefault(group["stage"], {}).setdefault(group["pool"], group["seconds"])
    rows = [(stage, str(len(pools)), f"{sum(pools.values()):.0f}") for stage, pools in seconds.items()]
    total = sum(sum(pools.values()) for pools in seconds.values())
    return to_markdown(Table("", ("stage", "pools", "seconds"), (*rows, ("all", "", f"{total:.0f}"))))


def summary_table(groups: Sequence[Group], ours: str) -> str:
    """The README's: four methods, shared heads, both main streams."""
    rows = []
    for method in dict.fromkeys((*RIVALS, ours)):
        cells = []
        for dataset, stream in ((d, s) for d in METRICS for s in MAIN_STREAMS):
            own = select(groups, "main", dataset, HEAD_INITS[0], LOSS[dataset])
            values = [estimate(own, method, Where(stream), metric) for metric in METRICS[dataset]]
            cells.append(" / ".join("–" if v is None else f"{100 * v.mean:.1f}" for v in values))
        rows.append((method, *cells))
    told = {d: f"{TITLES[d]} {' / '.join(metrics).replace('_', ' ')}" for d, metrics in METRICS.items()}
    names = [f"{told[dataset]}: {stream}" for dataset in METRICS for stream in MAIN_STREAMS]
    return to_markdown(Table("", ("method", *names), tuple(rows), _best(rows)))
