"""What the parts of the reference method are worth."""

from mergestream.bench.analysis.comparison import Duel
from mergestream.bench.report.method_figures import draw_differences
from mergestream.bench.report.page import Picture, Section, paragraph
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.svg import Panel, panel
from mergestream.bench.report.tables import Table

# Options as labels spell them, and what they take away or put in.
MEANINGS = {
    "head=shared": "entropy only: the head follows the encoder",
    "encoder=uniform": "decoupled head only: the encoder is the mean",
    "head=select": "the head of one expert",
    "momentum=": "with a moving average",
    "views=()": "without consistency",
    "views=": "consistency under other views",
    "temperature=card": "each expert's own temperature",
    "score=max_softmax": "maximum softmax in place of entropy",
    "weighting=softmax": "softmax in place of inverse weighting",
    "refresh_every=": "experts scored on some batches only",
    "recalibrate_bn=True": "BatchNorm re-estimated on every batch",
    "head_rows=seen": "head rows of experts that saw the class",
}


def ablation(report: ReportFindings) -> Section | None:
    if not report.ablation:
        return None
    full = report.ablation[0].ours
    told = paragraph(f"Variants of {full} by options alone; the full method is the first row.")
    return Section("Ablation", [told, _table(report), _picture(report)])


def _table(report: ReportFindings) -> Table:
    full = report.ablation[0].ours
    means = {row.stream: row.accuracy.mean for row in report.bench.rows if row.label == full}
    found = {(each.theirs, each.stream): each for each in report.ablation}
    streams = [stream for stream in report.streams if stream in means]
    variants = list(dict.fromkeys(each.theirs for each in report.ablation))
    rows = [(full, "the full method", *(f"{100 * means[stream]:.1f}" for stream in streams))]
    rows += [(name, meaning(name), *(_cell(found.get((name, s))) for s in streams)) for name in variants]
    clear = {
        (r, c)
        for r, name in enumerate(variants, start=1)
        for c, stream in enumerate(streams, start=2)
        if (name, stream) in found and "clearly" not in found[name, stream].outcome
    }
    note = (
        "Accuracy in %; in brackets the points above the full method on the same batches, with the 95 % interval of a "
        "paired bootstrap. Bold: it excludes 0."
    )
    return Table(f"Ablation of {full}", ("method", "what changes", *streams), tuple(rows), frozenset(clear), note)


def meaning(label: str) -> str:
    options = label.partition("(")[2].removesuffix(")")
    return "; ".join(told for option, told in MEANINGS.items() if option in options and _most_exact(option, options))


def _most_exact(option: str, options: str) -> bool:
    """'views=' is not meant where 'views=()' is."""
    return not any(other != option and other.startswith(option) and other in options for other in MEANINGS)


def _cell(each: Duel | None) -> str:
    if each is None:
        return "–"
    gap = each.difference
    low, high = sorted((-100 * gap.low, -100 * gap.high))
    mean = round(-100 * gap.mean, 1) + 0.0  # no minus before a zero
    return f"{100 * each.their_mean:.1f} ({mean:+.1f} [{round(low, 1) + 0.0:.1f}, {round(high, 1) + 0.0:.1f}])"


def _picture(report: ReportFindings) -> Picture:
    panels = [_panel(f"ablation{n}", report, stream) for n, stream in enumerate(report.telling_streams)]
    return Picture(panels, "Accuracy of each variant less that of the full method, in points, with 95 % intervals.")


def _panel(name: str, report: ReportFindings, stream: str) -> Panel:
    here = [each for each in report.ablation if each.stream == stream]
    said = "; ".join(f"{each.theirs} {-100 * each.difference.mean:+.1f}" for each in here)
    return panel(
        name,
        f"Differences to the full method on {stream}, in points: {said}.",
        lambda ax: draw_differences(ax, here),
        width=5.2,
        height=0.28 * len(here) + 1.0,
        title=stream,
    )
