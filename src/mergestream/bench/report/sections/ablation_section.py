"""What each part of the reference method contributes."""

from mergestream.bench.analysis.comparison import Duel
from mergestream.bench.report.method_figures import draw_differences
from mergestream.bench.report.page import PageFigure, PageSection, Paragraph
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.result_table import ResultTable
from mergestream.bench.report.svg import Panel, panel

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


def ablation_section(report: ReportFindings) -> PageSection | None:
    if not report.ablation:
        return None
    full = report.ablation[0].ours
    intro = Paragraph(f"Variants of {full} that differ only in options; the full method is the first row.")
    panels = [_panel(f"ablation{n}", report, stream) for n, stream in enumerate(report.figure_streams)]
    caption = "Accuracy of each variant minus that of the full method, in points, with 95 % intervals."
    return PageSection("Ablation", [intro, _table(report, full), PageFigure(panels, caption)])


def _table(report: ReportFindings, full: str) -> ResultTable:
    means = {row.stream: row.accuracy.mean for row in report.bench.rows if row.label == full}
    duels = {(each.theirs, each.stream): each for each in report.ablation}
    streams = [stream for stream in report.streams if stream in means]
    variants = list(dict.fromkeys(each.theirs for each in report.ablation))
    rows = [(full, "the full method", *(f"{100 * means[stream]:.1f}" for stream in streams))]
    rows += [(name, describe_options(name), *(_cell(duels.get((name, s))) for s in streams)) for name in variants]
    clear = {
        (r, c)
        for r, name in enumerate(variants, start=1)
        for c, stream in enumerate(streams, start=2)
        if (name, stream) in duels and duels[name, stream].is_clear
    }
    note = (
        "Accuracy in %; in brackets the points above the full method on the same batches, with the 95 % interval of a "
        "paired bootstrap. Bold: it excludes 0."
    )
    columns = ("method", "what changes", *streams)
    return ResultTable(f"Ablation of {full}", columns, tuple(rows), frozenset(clear), note)


def describe_options(label: str) -> str:
    """What the options in a variant's label change."""
    options = label.partition("(")[2].removesuffix(")")
    present = [option for option in MEANINGS if option in options]
    # 'views=' does not apply where the more specific 'views=()' does.
    exact = [o for o in present if not any(other != o and other.startswith(o) for other in present)]
    return "; ".join(MEANINGS[option] for option in exact)


def _cell(each: Duel | None) -> str:
    if each is None:
        return "–"
    mean, high, low = (round(-100 * x, 1) + 0.0 for x in vars(each.difference).values())  # + 0.0: no minus before 0
    return f"{100 * each.their_mean:.1f} ({mean:+.1f} [{low:.1f}, {high:.1f}])"


def _panel(name: str, report: ReportFindings, stream: str) -> Panel:
    here = [each for each in report.ablation if each.stream == stream]
    differences = "; ".join(f"{each.theirs} {-100 * each.difference.mean:+.1f}" for each in here)
    return panel(
        name,
        f"Differences to the full method on {stream}, in points: {differences}.",
        lambda ax: draw_differences(ax, here),
        height=0.28 * len(here) + 1.0,
        title=stream,
    )
