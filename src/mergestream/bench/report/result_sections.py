"""Parts of the report's summary, the answer in three sentences, and of its results: tables, accuracy, ablation."""

from statistics import mean

from mergestream.bench.analysis.comparison import grouped
from mergestream.bench.analysis.cost import shown
from mergestream.bench.analysis.duels import PHRASES, describe_levels
from mergestream.bench.report.bench_tables import all_tables
from mergestream.bench.report.figures import Panel, panel
from mergestream.bench.report.method_figures import draw_accuracies, draw_differences
from mergestream.bench.report.plain_names import METHODS, plain_method
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.result_table import ResultTable, format_number, grid_table
from mergestream.functional.non_inferiority import OUTCOMES

BESIDE = ("merge_and_fit", "mean")  # the recommended rule and the plain average
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


def answer_sentences(report: ReportFindings) -> list[str]:
    """The reference beside the recommended rule, the average and the best; its duels; its price and limits."""
    return [sentence for sentence in (_accuracy(report), _verdict(report), _limits(report)) if sentence]


def _reference(report: ReportFindings) -> str:
    return report.bench.duels[0].ours if report.bench.duels else report.plain_methods[0]


def _accuracy(report: ReportFindings) -> str:
    rows = [row for row in report.bench.rows if row.label in report.bench.methods]
    levels = {label: mean(row.accuracy.mean for row in own) for label, own in grouped(rows, "label").items()}
    ours, best = _reference(report), max(levels, key=lambda label: levels[label])
    clauses = [f"{plain_method(ours)} is right on {100 * levels[ours]:.1f} % of the images"]
    others = [label for label in BESIDE if label in levels and label not in (ours, best)]
    clauses += [f"{plain_method(label)} on {100 * levels[label]:.1f} %" for label in others]
    leader = f"the best method, {plain_method(best)}, on {100 * levels[best]:.1f} %"
    clauses.append("no method on more" if best == ours else leader)
    streams = len(report.bench.streams)
    where = f"Over {streams} streams" if streams > 1 else f"On {report.bench.streams[0]}"
    return f"{where}, {', '.join(clauses[:-1])} and {clauses[-1]}."


def _verdict(report: ReportFindings) -> str:
    duels = report.bench.duels
    if not duels:
        return ""
    skewed = report.figure_streams[-1]
    here = [each for each in duels if each.stream == skewed]
    counts = [(PHRASES[name], sum(each.outcome == name for each in here)) for name in OUTCOMES]
    words = [f"{phrase} {count}" for phrase, count in counts if count]
    listed = " and ".join([", ".join(words[:-1]), words[-1]]) if words[1:] else "".join(words)
    ours = METHODS.get(duels[0].ours, duels[0].ours)
    return f"Of {len(here)} other methods on {skewed}, {ours} is {listed} (margin {100 * duels[0].margin:g} points)."


def _limits(report: ReportFindings) -> str:
    clauses = []
    lost = [each for each in report.bench.duels if each.worst.outcome == "inferior"]
    if lost:
        worst = min(lost, key=lambda each: each.worst.difference.mean)
        points, place = -100 * worst.worst.difference.mean, f"{worst.worst.target}, {worst.stream}"
        clauses.append(f"at its worst it loses {points:.1f} points to {plain_method(worst.theirs)} ({place})")
    clauses.append(f"it costs {shown(report.forwards[_reference(report)])} forward passes per image, scoring included")
    count = len(report.bench.sentences)
    clauses.append(f"{count} warning{'s' * (count != 1)} below" if count else "there are no warnings")
    text = "; ".join(clauses)
    return f"{text[0].upper()}{text[1:]}."


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
        middle, high, low = (round(-100 * x, 1) + 0.0 for x in vars(each.difference).values())
        text = f"{100 * each.their_mean:.1f} ({middle:+.1f} [{low:.1f}, {high:.1f}])"
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
