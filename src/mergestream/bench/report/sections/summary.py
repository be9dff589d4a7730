"""What was done and what came out, in words."""

from collections.abc import Callable, Sequence

from mergestream.bench.analysis.comparison import Duel, Row, in_words
from mergestream.bench.report.page import Fold, Part, Section, bullets, paragraph
from mergestream.bench.report.report_findings import ReportFindings

DIFFERENCES = "In brackets: the difference in points on the same batches; its interval decides which word is used."
Measure = Callable[[Row], float]
OUTCOMES = ("beats", "does not differ clearly from", "loses to")


def summary(report: ReportFindings) -> Section:
    said = [*across_streams(report.bench.duels), *_highest(report), *_also(report)]
    parts: list[Part] = [paragraph(what_was_run(report)), bullets(said)]
    if report.bench.duels:
        parts.append(Fold("Stream by stream", [bullets(in_words(report.bench.duels)), paragraph(DIFFERENCES)]))
    return Section("In words", parts)


def what_was_run(report: ReportFindings) -> str:
    lines, bench = report.bench.runs, report.bench
    targets = {line["target"]: line for line in lines}
    told = ", ".join(f"{name} ({line['images']:,} images)" for name, line in targets.items())
    seeds = len({line["seed"] for line in lines})
    pools = max(len({line["pool"] for line in lines if line["target"] == name}) for name in targets)
    sizes = sorted({line["experts"] for line in lines})
    count = f"{sizes[0]} experts" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]} experts"
    return (
        f"{len(report.methods)} methods, variants included, answer with {count} ({bench.network or 'unknown'}). "
        f"Targets: {told}. Streams: {', '.join(report.streams)}; batches of {lines[0]['batch_size']}; stream seeds: "
        f"{seeds}; pools for each target: {pools}; {len(lines):,} runs in all."
    )


def across_streams(duels: Sequence[Duel]) -> list[str]:
    """One sentence an outcome: against whom it was the same on every stream, then against whom it was not."""
    rivals: dict[str, list[str]] = {}
    for each in duels:
        rivals.setdefault(each.theirs, []).append(each.outcome)
    streams = len({each.stream for each in duels})
    where = "" if streams == 1 else f" on all {streams} streams"
    said = []
    for outcome in OUTCOMES:
        always = [name for name, seen in rivals.items() if set(seen) == {outcome}]
        said += [f"{duels[0].ours} {outcome} {', '.join(always)}{where}."] if always else []
    mixed = [f"{name} ({_tally(seen)})" for name, seen in rivals.items() if len(set(seen)) > 1]
    return said + ([f"It depends on the stream against {', '.join(mixed)}."] if mixed else [])


def _tally(seen: Sequence[str]) -> str:
    words = {"beats": "beats", "loses to": "loses", "does not differ clearly from": "unclear"}
    return ", ".join(f"{word} {seen.count(outcome)}" for outcome, word in words.items() if outcome in seen)


def _highest(report: ReportFindings) -> list[str]:
    return [
        *_by_winner(report, "Highest accuracy", lambda row: -row.accuracy.mean, lambda row: row.accuracy.mean),
        *_by_winner(report, "Lowest calibration error (ECE)", lambda row: row.ece, lambda row: row.ece),
    ]


def _by_winner(report: ReportFindings, what: str, key: Measure, value: Measure) -> list[str]:
    """One sentence: who is first, and on which streams."""
    winners: dict[str, list[Row]] = {}
    for stream in report.streams:
        here = [row for row in report.bench.rows if row.stream == stream and row.label in report.methods]
        best = min(here, key=key)
        winners.setdefault(best.label, []).append(best)
    told = []
    for label, rows in winners.items():
        numbers = sorted(round(100 * value(row), 1) for row in rows)
        spread = f"{numbers[0]}" if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}"
        where = "" if len(winners) == 1 else f" on {', '.join(row.stream for row in rows)}"
        told.append(f"{label} ({spread} %){where}")
    return [f"{what}: {'; '.join(told)}."]


def _also(report: ReportFindings) -> list[str]:
    said = []
    dear = max(report.costs, key=lambda cost: cost.forwards)
    cheap = min(report.costs, key=lambda cost: cost.forwards)
    if dear.forwards > cheap.forwards:
        said.append(f"A batch costs {dear.label} {dear.forwards:g} forward passes, {cheap.label} {cheap.forwards:g}.")
    count = len(report.bench.sentences)
    said.append(f"{count} warning{'s' * (count != 1)}: see Warnings." if count else "No warnings.")
    return said
