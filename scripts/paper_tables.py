"""Blocks of docs/paper.md, its log and docs/reproduce.md, from benchmarks/results, for scripts/docs_tables.py."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from mergestream.bench.analysis.comparison import Estimate
from mergestream.bench.claims.claim_checks import AMONG, OVER
from mergestream.bench.claims.claim_finding import MARKS, UNKNOWN, format_estimate
from mergestream.bench.reproduction.paper_values import BACKBONES, DATASETS, ROWS, printed_accuracy, short_title
from mergestream.bench.reproduction.reproduction_record import ReproductionRecord

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
MEASURES = {f"Spearman {OVER}": ", over time", f"Spearman {AMONG}": ", among experts"}
GAIN = "The rule has a higher accuracy than the mean"
REGMEAN = "measuring RegMean++ "
Finding = Mapping[str, Any]


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def accuracy_table(record: ReproductionRecord) -> str:
    """Ours, and what the paper prints for its own networks."""
    sets = [name for name in DATASETS if record.find("table1", name, record.backbones[0], ROWS[0])]
    columns = ("ours", *(f"paper {short_title(network)}" for network in BACKBONES))
    rows = []
    for row in ROWS:
        cells = [row]
        for name in sets:
            ours = record.find("table1", name, record.backbones[0], row)
            assert ours is not None, f"{row} is not in the record"
            value = ours.accuracy.times(100)
            cells += [f"{value.mean:.1f} [{value.low:.1f}, {value.high:.1f}]"]
            cells += [f"{printed_accuracy(name, network, row):.1f}" for network in BACKBONES]
        rows.append(cells)
    return markdown(["accuracy, %", *(f"{DATASETS[name]} {what}" for name in sets for what in columns)], rows)


def call_list(log: Mapping[str, Any]) -> str:
    """Seconds of the calls of `reproduce` in order, how each ended, and seconds of RegMean++."""
    calls = ", ".join(f"{each['seconds']:.0f} s ({each['ended']})" for each in log["calls"])
    return f"The calls took {calls}. {statistics_line(log)}"


def statistics_line(log: Mapping[str, Any]) -> str:
    """Seconds of RegMean++ for all leave-one-out pools, for every training seed."""
    stages, seconds = log["stages"], list[float]()
    for before, after in pairwise(stages):
        if after["stage"].startswith(REGMEAN):
            took = after["ended"] - before["ended"]
            seconds[-1:] = [seconds[-1] + took] if before["stage"].startswith(REGMEAN) else [*seconds[-1:], took]
    return f"RegMean++ for all four leave-one-out pools took {' and '.join(f'{each:.0f}' for each in seconds)} s."


def error_table(settings: Sequence[Mapping[str, Any]]) -> str:
    """The decomposition, and how much the mean loses against its experts on average."""
    head = ("squared error", "K", "seeds", "bias", "variance", "covariance", "mean of answers", "mean of weights")
    rows = []
    for each in settings:
        parts, drift = each["parts"], each["drift"]
        counts = [each["name"], str(parts["experts"]), str(parts["seeds"])]
        errors = [f"{parts[name]:.3f}" for name in ("bias", "variance", "covariance", "averaged", "merged")]
        gained = -100 * mean(point["failure"] for point in drift)
        rows.append([*counts, *errors, f"{gained:+.1f}", f"{mean(point['angle'] for point in drift):.2f}°"])
    return markdown([*head, "mean less experts, points", "angle"], rows)


def estimate_of(finding: Finding) -> Estimate:
    return Estimate(**finding["estimate"])


def by_idea(settings: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Finding]]:
    """Findings by idea and setting."""
    ideas: dict[str, dict[str, Finding]] = {}
    for setting in settings:
        for each in setting["findings"]:
            idea = f"{each['claim'].rstrip('.')}{MEASURES.get(each['measure'], '')}"
            ideas.setdefault(idea, {})[setting["name"]] = each
    return ideas


def idea_table(settings: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            idea,
            *(f"{format_estimate(estimate_of(each), each['unit'])} {MARKS[each['verdict']]}" for each in own.values()),
        ]
        for idea, own in by_idea(settings).items()
    ]
    return markdown(["idea", *(each["name"] for each in settings)], rows)


def verdict_table(record: Mapping[str, Any], gains: Sequence[float]) -> str:
    """Every idea in one row: the lowest and highest number, and in how many settings it holds."""
    rows, above = [], sum(each > 0 for each in gains)
    for idea, own in by_idea(record["settings"]).items():
        values = sorted(own.values(), key=lambda each: each["estimate"]["mean"])
        ends = [format_estimate(estimate_of(each), each["unit"]).partition(" [")[0] for each in (values[0], values[-1])]
        unit = " %" if values[0]["unit"] == "share" else ""
        rows.append([idea, f"{' to '.join(ends)}{unit}", verdicts(own)])
    drift = record["drift"]
    rows.append([drift["claim"].rstrip("."), format_estimate(estimate_of(drift), drift["unit"]), drift["verdict"]])
    rows.append([GAIN, f"{min(gains):+.1f} to {max(gains):+.1f} points", f"yes in {above} of {len(gains)}"])
    return markdown(["idea", "measured", "verdict"], rows)


def verdicts(own: Mapping[str, Finding]) -> str:
    """How often each verdict was given; the rarer ones with the settings' names."""
    named: dict[str, list[str]] = {}
    for name, each in own.items():
        named.setdefault(each["verdict"], []).append(name)
    ordered = sorted(named.items(), key=lambda item: (item[0] == UNKNOWN, -len(item[1])))
    (first, most), *rest = ordered
    return "; ".join(
        [f"{first} in {len(most)} of {len(own)}", *(f"{verdict} in {', '.join(where)}" for verdict, where in rest)]
    )


def statistics_speed(record: Mapping[str, Any]) -> str:
    """What one call of `pool statistics` took, from the start of Python to the last file."""
    whole, again, about = record["all"], record["nothing_left_to_measure"], record["about"]
    kinds = {"Gram": "gram", "Fisher": "fisher", "RegMean++": "RegMean++"}
    parts = [
        f"{kind} {sum(s for stage, s in whole['stages'].items() if word in stage)} s" for kind, word in kinds.items()
    ]
    return (
        f"{whole['wall_seconds']:.0f} s on an {about['machine']}, GPU busy {whole['gpu_busy_seconds']:.0f} s: "
        f"{', '.join(parts)}, start {again['wall_seconds']:.0f} s, the rest {record['written_gb']:.0f} GB of files."
    )


def paper_blocks(gains: Sequence[float]) -> dict[str, Callable[[], str]]:
    written, theory = read("reproduction"), read("theory")
    record = ReproductionRecord.from_json(written["reproduction"])
    return {
        "reproduction-accuracy": partial(accuracy_table, record),
        "reproduction-calls": partial(call_list, written["log"]),
        "statistics-speed": partial(statistics_speed, read("statistics_speed")),
        "theory-error": partial(error_table, theory["settings"]),
        "theory-ideas": partial(idea_table, theory["settings"]),
        "theory-verdicts": partial(verdict_table, theory, gains),
    }
