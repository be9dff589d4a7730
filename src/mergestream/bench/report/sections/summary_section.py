"""What was run and what came out, in a few sentences."""

from collections.abc import Callable, Sequence

from mergestream.bench.analysis.comparison import OUTCOMES, Duel, ResultRow, describe_duels
from mergestream.bench.report.page import Bullets, PageFold, PageSection, Paragraph, Part
from mergestream.bench.report.report_findings import ReportFindings

DIFFERENCES = "In brackets: the difference in points on the same batches; its interval decides which word is used."
SHORT_OUTCOMES = dict(zip(OUTCOMES, ("beats", "unclear", "loses"), strict=True))


def summary_section(report: ReportFindings) -> PageSection:
    sentences = [*describe_across_streams(report.bench.duels), *_winners(report), *_cost_and_warnings(report)]
    parts: list[Part] = [Paragraph(_setup(report)), Bullets(sentences)]
    if report.bench.duels:
        by_stream: list[Part] = [Bullets(describe_duels(report.bench.duels)), Paragraph(DIFFERENCES)]
        parts.append(PageFold("Stream by stream", by_stream))
    return PageSection("Summary", parts)


def _setup(report: ReportFindings) -> str:
    lines, bench = report.bench.runs, report.bench
    targets = {line["target"]: line for line in lines}
    sizes = ", ".join(f"{name} ({line['images']:,} images)" for name, line in targets.items())
    seeds = len({line["seed"] for line in lines})
    pools = max(len({line["pool"] for line in lines if line["target"] == name}) for name in targets)
    counts = sorted({line["experts"] for line in lines})
    experts = f"{counts[0]} experts" if len(counts) == 1 else f"{counts[0]} to {counts[-1]} experts"
    return (
        f"{len(report.methods)} methods, variants included, on {experts} ({bench.network or 'unknown'}). "
        f"Targets: {sizes}. Streams: {', '.join(report.streams)}; batches of {lines[0]['batch_size']}; stream seeds: "
        f"{seeds}; pools per target: {pools}; {len(lines):,} runs in total."
    )


def describe_across_streams(duels: Sequence[Duel]) -> list[str]:
    """One sentence per outcome for rivals with the same outcome on every stream, then one for the others."""
    outcomes: dict[str, list[str]] = {}
    for each in duels:
        outcomes.setdefault(each.theirs, []).append(each.outcome)
    streams = len({each.stream for each in duels})
    where = "" if streams == 1 else f" on all {streams} streams"
    sentences = []
    for outcome in OUTCOMES:
        always = [name for name, own in outcomes.items() if set(own) == {outcome}]
        sentences += [f"{duels[0].ours} {outcome} {', '.join(always)}{where}."] if always else []
    mixed = [f"{name} ({_counts(own)})" for name, own in outcomes.items() if len(set(own)) > 1]
    return sentences + ([f"It depends on the stream against {', '.join(mixed)}."] if mixed else [])


def _counts(outcomes: Sequence[str]) -> str:
    order = ("beats", "loses to", "does not differ clearly from")
    return ", ".join(f"{SHORT_OUTCOMES[each]} {outcomes.count(each)}" for each in order if each in outcomes)


def _winners(report: ReportFindings) -> list[str]:
    return [
        _winner(report, "Highest accuracy", lambda row: row.accuracy.mean, max),
        _winner(report, "Lowest calibration error (ECE)", lambda row: row.ece, min),
    ]


def _winner(
    report: ReportFindings, what: str, value: Callable[[ResultRow], float], best: Callable[..., ResultRow]
) -> str:
    """One sentence: the best methods, and on which streams."""
    winners: dict[str, list[ResultRow]] = {}
    for stream in report.streams:
        rows = [row for row in report.bench.rows if row.stream == stream and row.label in report.methods]
        first = best(rows, key=value)
        winners.setdefault(first.label, []).append(first)
    clauses = []
    for label, rows in winners.items():
        numbers = sorted(round(100 * value(row), 1) for row in rows)
        spread = f"{numbers[0]}" if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}"
        where = "" if len(winners) == 1 else f" on {', '.join(row.stream for row in rows)}"
        clauses.append(f"{label} ({spread} %){where}")
    return f"{what}: {'; '.join(clauses)}."


def _cost_and_warnings(report: ReportFindings) -> list[str]:
    sentences = []
    highest = max(report.costs, key=lambda cost: cost.forwards)
    lowest = min(report.costs, key=lambda cost: cost.forwards)
    if highest.forwards > lowest.forwards:
        sentences.append(
            f"Forward passes per batch: {highest.label} {highest.forwards:g}, {lowest.label} {lowest.forwards:g}."
        )
    count = len(report.bench.sentences)
    return [*sentences, f"{count} warning{'s' * (count != 1)}: see Warnings." if count else "No warnings."]
