"""Parts of the report's sections on results: summary, tables, accuracy, ablation."""

from collections.abc import Callable, Sequence

from mergestream.bench.analysis.comparison import ResultRow, grouped
from mergestream.bench.analysis.cost import shown
from mergestream.bench.analysis.duels import PHRASES, Duel, describe_levels
from mergestream.bench.report.bench_tables import all_tables
from mergestream.bench.report.figures import Panel, panel
from mergestream.bench.report.method_figures import draw_accuracies, draw_differences
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.result_table import ResultTable, format_number, grid_table
from mergestream.functional.non_inferiority import OUTCOMES

DIFFERENCES = (
    "In brackets: the difference in points on the same batches; its interval and the margin decide which word is used."
)
# Options as labels spell them, and what they change.
MEANINGS = {
    "head=shared": "entropy only: the head follows the encoder",
    "encoder=uniform": "decoupled head only: the encoder is the mean",
    "head=select": "the head of one expert",
    "momentum=": "with a moving average",
    "views=()": "without consistency",
    "views=": "consistency under other views",
    "temperature=card": "each expert's own temperature",
    "score=max_softmax": "maximum softmax instead of entropy",
    "weighting=softmax": "softmax instead of inverse weighting",
    "refresh_every=": "experts scored on some batches only",
    "recalibrate_bn=True": "BatchNorm re-estimated on every batch",
    "head_rows=seen": "head rows of experts that saw the class",
}


def summary_sentences(report: ReportFindings) -> list[str]:
    """The verdicts against rivals, the best methods, the cost, the number of warnings."""
    sentences = [
        *describe_across_streams(report.bench.duels),
        *describe_worst_targets(report.bench.duels),
        _winner(report, "Highest accuracy", lambda row: row.accuracy.mean, max),
        _winner(report, "Lowest calibration error (ECE)", lambda row: row.ece, min),
    ]
    counted = sorted((cost.forwards, cost.label) for cost in report.costs if cost.forwards is not None)
    if counted and counted[-1][0] > counted[0][0]:
        (least, lowest), (most, highest) = counted[0], counted[-1]
        sentences.append(f"Forward passes per image: {highest} {shown(most)}, {lowest} {shown(least)}.")
    count = len(report.bench.sentences)
    return [*sentences, f"{count} warning{'s' * (count != 1)}: see Warnings." if count else "No warnings."]


def describe_across_streams(duels: Sequence[Duel]) -> list[str]:
    """One sentence per outcome for rivals with the same outcome on every stream, then one for the others."""
    outcomes = {theirs: [each.outcome for each in own] for theirs, own in grouped(duels, "theirs").items()}
    streams = len({each.stream for each in duels})
    where = "" if streams == 1 else f" on all {streams} streams"
    where += f" (margin {100 * duels[0].margin:g} points)" if duels else ""
    sentences = []
    for outcome in OUTCOMES:
        always = [name for name, own in outcomes.items() if set(own) == {outcome}]
        sentences += [f"{duels[0].ours} is {PHRASES[outcome]} {', '.join(always)}{where}."] if always else []
    counts = {
        name: [f"{outcome} {own.count(outcome)}" for outcome in OUTCOMES if outcome in own]
        for name, own in outcomes.items()
    }
    mixed = [f"{name} ({', '.join(own)})" for name, own in counts.items() if len(own) > 1]
    return sentences + ([f"It depends on the stream against {', '.join(mixed)}."] if mixed else [])


def describe_worst_targets(duels: Sequence[Duel]) -> list[str]:
    """One sentence: rivals to which the reference is inferior at its worst target, each with its worst case."""
    lost = grouped([each for each in duels if each.worst.outcome == "inferior"], "theirs")
    lowest = {name: min(own, key=lambda each: each.worst.difference.mean) for name, own in lost.items()}
    cases = [
        f"{name} ({100 * each.worst.difference.mean:+.1f} points at {each.worst.target}, {each.stream})"
        for name, each in lowest.items()
    ]
    return [f"At the worst target it is inferior to {', '.join(cases) or 'none'}."] if duels else []


def _winner(
    report: ReportFindings, what: str, value: Callable[[ResultRow], float], best: Callable[..., ResultRow]
) -> str:
    """One sentence: the best methods, and on which streams."""
    rows = [row for row in report.bench.rows if row.label in report.bench.methods]
    winners = grouped([best(own, key=value) for own in grouped(rows, "stream").values()], "label")
    clauses = []
    for label, rows in winners.items():
        numbers = sorted(round(100 * value(row), 1) for row in rows)
        spread = f"{numbers[0]}" if numbers[0] == numbers[-1] else f"{numbers[0]} to {numbers[-1]}"
        where = "" if len(winners) == 1 else f" on {', '.join(row.stream for row in rows)}"
        clauses.append(f"{label} ({spread} %){where}")
    return f"{what}: {'; '.join(clauses)}."


def result_tables(report: ReportFindings) -> tuple[list[ResultTable], dict[str, list[ResultTable]]]:
    """Tables over all streams, and those of each stream."""
    tables = all_tables(report.bench)
    by_stream = {stream: [t for t in tables if t.title.endswith(f", {stream}")] for stream in report.bench.streams}
    return [table for table in tables if not any(table in group for group in by_stream.values())], by_stream


def accuracy_panels(report: ReportFindings) -> list[Panel]:
    panels = []
    for number, stream in enumerate(report.figure_streams):
        variants = {label for label in report.bench.methods if label not in report.plain_methods}
        here = (row for row in report.bench.rows if row.stream == stream and row.label not in variants)
        rows = sorted(here, key=lambda row: -row.accuracy.mean)
        first, last = rows[0], rows[-1]
        alternative = (
            f"Accuracy of {len(rows)} methods on {stream}, each a dot with its interval, from {first.label} "
            f"({100 * first.accuracy.mean:.1f} %) at the top to {last.label} ({100 * last.accuracy.mean:.1f} %) below."
        )
        height = 0.22 * len(rows) + 0.9
        panels.append(panel(f"accuracy{number}", alternative, draw_accuracies, rows, height=height, title=stream))
    return panels


def ablation_panels(report: ReportFindings) -> list[Panel]:
    panels = []
    for number, stream in enumerate(report.figure_streams):
        here = [each for each in report.ablation if each.stream == stream]
        differences = "; ".join(f"{each.theirs} {-100 * each.difference.mean:+.1f}" for each in here)
        alternative = f"Differences to the full method on {stream}, in points: {differences}."
        height = 0.28 * len(here) + 1.0
        panels.append(panel(f"ablation{number}", alternative, draw_differences, here, height=height, title=stream))
    return panels


def ablation_table(report: ReportFindings) -> ResultTable:
    full = report.ablation[0].ours
    cells = {(full, "what changes"): ("the full method", False)}  # text and whether it is bold
    cells |= {
        (r.label, r.stream): (format_number(r.accuracy.mean, 1, 100), False)
        for r in report.bench.rows
        if r.label == full
    }
    for each in report.ablation:
        # + 0.0: no minus before 0
        mean, high, low = (round(-100 * x, 1) + 0.0 for x in vars(each.difference).values())
        text = f"{100 * each.their_mean:.1f} ({mean:+.1f} [{low:.1f}, {high:.1f}])"
        cells[each.theirs, "what changes"] = describe_options(each.theirs), False
        cells[each.theirs, each.stream] = text, each.difference.is_clear
    note = (
        f"Accuracy in %; in brackets the points above the full method on the same batches, with the 95 % interval of a "
        f"hierarchical bootstrap. {describe_levels(report.ablation)} Bold: it excludes 0."
    )
    return grid_table(f"Ablation of {full}", "method", cells, lambda each: each[0], lambda each: each[1], note)


def describe_options(label: str) -> str:
    """What the options in a variant's label change."""
    options = label.partition("(")[2].removesuffix(")")
    present = [option for option in MEANINGS if option in options]
    # 'views=' does not apply where the more specific 'views=()' does.
    exact = [o for o in present if not any(other != o and other.startswith(o) for other in present)]
    return "; ".join(MEANINGS[option] for option in exact)
