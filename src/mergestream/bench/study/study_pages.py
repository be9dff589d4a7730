"""The tables of the plan 'results' from its record's groups, each by its name."""

from collections.abc import Collection, Mapping, Sequence
from itertools import product

import numpy as np

from mergestream.bench.analysis import cost
from mergestream.bench.analysis.comparison import Estimate
from mergestream.bench.report.bench_tables import percent
from mergestream.bench.report.page import environment
from mergestream.bench.report.result_table import format_number, grid_table, mark_best, to_markdown
from mergestream.bench.study import results_plan, study_bars
from mergestream.bench.study.results_plan import COMPARED, HEAD_INITS, LOSS, MAIN_STREAMS, METRICS, OURS, PAPER
from mergestream.bench.study.study_bars import (
    TITLES,
    collapses_of,
    endpoints,
    estimate,
    methods_of,
    places,
    select,
    settings_of,
)
from mergestream.bench.study.study_record import PROBABILITIES, SCORES, SINGLE, Group, Setting
from mergestream.functional.non_inferiority import LOWER_IS_BETTER

LATER = " (later run)"
NAMES = dict(
    zip(
        (*SCORES, *PROBABILITIES),
        ("accuracy %", "balanced accuracy %", "AUROC %", "NLL", "Brier", "ECE %", "calibration in the large, points"),
        strict=True,
    )
)
RIVALS = tuple(name for name in COMPARED if name != OURS)
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
    return _grid("method", cells, (ALONE, BEST, *later.values())) + notes


def _scores(own: Sequence[Group], method: str, at: Setting, dataset: str) -> str:
    if method in (ALONE, BEST):
        return " / ".join(_alone(own, method, at, metric) for metric in METRICS[dataset])
    return " / ".join(percent(estimate(own, method, at, metric)) for metric in METRICS[dataset])


def _alone(own: Sequence[Group], which: str, at: Setting, metric: str) -> str:
    """Single experts: their mean at every target, or the one that labels show to be best: a bound, no method."""
    values = []
    for group in own:
        here = [row for row in group["rows"] if row["method"].startswith(SINGLE) and row["stream"] == at.stream]
        for target in dict.fromkeys(row["target"] for row in here):
            scores = [row[metric] for row in here if row["target"] == target and row[metric] is not None]
            values.append(max(scores) if which == BEST else float(np.mean(scores)))
    return f"{100 * np.mean(values):.1f}" if values else "–"


def _grid(corner: str, cells: Mapping[tuple[str, str], str], bounds: Collection[str] = ()) -> str:
    """Cells by row and column; bold: the highest first number of every column, rows in `bounds` excluded."""
    return to_markdown(mark_best(grid_table("", corner, cells, str), bounds))


def streams_table(groups: Sequence[Group], kind: str, dataset: str) -> str:
    """The compared methods on the other streams, or in batches of all sizes."""
    parts = []
    for start in HEAD_INITS:
        own = select(groups, kind, dataset, start)
        places = product(methods_of(own), settings_of(own))
        cells = {(name, at.condition or at.stream): _scores(own, name, at, dataset) for name, at in places}
        parts.append(_grid(f"{start} heads", cells))
    return "\n".join(parts)


def metrics_table(groups: Sequence[Group], dataset: str, metrics: Sequence[str]) -> str:
    """Methods by head start and stream, the metrics of a cell one after the other; a dash where a record lacks one."""
    cells: dict[tuple[str, str], str] = {}
    for start, stream in product(HEAD_INITS, MAIN_STREAMS):
        own = select(groups, "main", dataset, start)
        for name in (name for name in methods_of(own) if not name.startswith(SINGLE)):
            values = [(metric, estimate(own, name, Setting(stream), metric)) for metric in metrics]
            cells[name, f"{start}: {stream}"] = " / ".join(_number(metric, value) for metric, value in values)
    return _grid(" / ".join(NAMES[metric] for metric in metrics), cells) if cells else ""


def _number(metric: str, value: Estimate | None) -> str:
    return format_number(getattr(value, "mean", None), *((3, 1) if metric in LOWER_IS_BETTER else (1, 100)))


def verdicts_table(groups: Sequence[Group], ours: str, rivals: Sequence[str]) -> str:
    """Ours less each rival at every place: mean over targets, then worst target, each with its verdict."""
    cells: dict[tuple[str, str], str] = {}
    for dataset, rival in product(METRICS, rivals):
        for place, own, at, metric in places(groups, dataset, ("main", "streams"), SCORES):
            both = endpoints(own, ours, rival, at, metric)
            texts = [f"{each.difference.points()} {each.outcome}" for each in both or ()]
            cells[place.replace(" heads", ""), f"{ours} - {rival}"] = "; worst target: ".join(texts) or "–"
    return to_markdown(grid_table("", "points", cells, str)) if cells else ""


def life_table(groups: Sequence[Group], kind: str, dataset: str) -> str:
    """Streams and batch sizes by the compared methods; on lone positives their sensitivity comes last."""
    metrics = (*METRICS[dataset], *(("lone_sensitivity",) if kind == "lone" else ()))
    parts = []
    for start in HEAD_INITS:
        own = select(groups, kind, dataset, start)
        cells = {
            (str(at), name): " / ".join(percent(estimate(own, name, at, metric)) for metric in metrics)
            for at, name in product(settings_of(own), methods_of(own))
        }
        corner = f"{start} heads: {' / '.join(metrics).replace('_', ' ')}"
        parts += [to_markdown(grid_table("", corner, cells, str))] if cells else []
    return "\n".join(parts)


def kinds_of(groups: Sequence[Group]) -> list[tuple[str, str, str]]:
    """Data sets, losses and head starts, in the order of the groups."""
    return list(dict.fromkeys((g["dataset"], g["loss"], g["head_init"]) for g in groups))


def vanished(groups: Sequence[Group], kind: tuple[str, str, str], method: str) -> str:
    """In how many runs a class vanished that every expert predicts."""
    count, collapsed = collapses_of([g for g in groups if kinds_of([g]) == [kind] and not g["later"]], method)
    return f"{len({text.split(': ')[0] for text in collapsed})} of {count}"


def seconds_by_stage(groups: Sequence[Group]) -> dict[str, list[float]]:
    """Seconds of every pool; pools benched again are left out."""
    seconds: dict[str, dict[str, float]] = {}
    for group in (group for group in groups if not group["later"]):
        seconds.setdefault(group["stage"], {}).setdefault(group["pool"], group["seconds"])
    return {stage: list(pools.values()) for stage, pools in seconds.items()}


def summary_table(groups: Sequence[Group]) -> str:
    """The README's: four methods, shared heads, both main streams."""
    cells = {}
    for (dataset, metrics), stream, name in product(METRICS.items(), MAIN_STREAMS, COMPARED):
        own = select(groups, "main", dataset, HEAD_INITS[0])
        values = [estimate(own, name, Setting(stream), metric) for metric in metrics]
        text = " / ".join("–" if value is None else f"{100 * value.mean:.1f}" for value in values)
        cells[name, f"{TITLES[dataset]} {' / '.join(metrics).replace('_', ' ')}: {stream}"] = text
    return _grid("method", cells)


def all_blocks(groups: Sequence[Group]) -> dict[str, str]:
    """Every section of the template study.md.j2 by its heading, of first runs; those of later ones as later-NAME."""
    template, blocks = environment().get_template("study.md.j2"), {}
    for run, own in runs_of(groups).items():
        sections = template.render({**vars(cost), **vars(results_plan), **vars(study_bars), **globals()}, groups=own)
        for section in f"\n{sections}".split("\n## ")[1:]:
            name, _, text = section.partition("\n")
            blocks[name if run == "first" else f"{run}-{name}"] = f"{text.strip()}\n"
    return blocks


def runs_of(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Groups of the first run with later rows beside them, and those of later runs alone."""
    late = [{**group, "later": False, "only_later": True} for group in groups if group["later"]]
    first = list(groups) if any(not group["later"] for group in groups) else late
    return {"first": first} | ({"later": late} if late else {})
