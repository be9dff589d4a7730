"""The first screen of a report: the answer in three sentences."""

from statistics import mean

from mergestream.bench.analysis.comparison import grouped
from mergestream.bench.analysis.cost import shown
from mergestream.bench.analysis.duels import PHRASES
from mergestream.bench.report.plain_names import METHODS, plain_method
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.functional.non_inferiority import OUTCOMES

BESIDE = ("merge_and_fit", "mean")  # the recommended rule and the plain average


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
