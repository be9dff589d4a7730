"""The demo's story in six sections: hospitals, experts abroad, averaging, adapting, changing mixes, price."""

from collections.abc import Mapping
from dataclasses import replace
from statistics import mean

import numpy as np

from mergestream.bench.analysis.comparison import SINGLES
from mergestream.bench.analysis.cost import shown
from mergestream.bench.analysis.traces import trace_of
from mergestream.bench.report.figures import new_figure, panel, to_data_uri
from mergestream.bench.report.method_figures import draw_lines_over_time, keys_of
from mergestream.bench.report.page import PageSection
from mergestream.bench.report.plain_names import plain_method, stream_meaning
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.result_table import ResultTable, format_number, mark_best
from mergestream.data.datasets import Dataset

AVERAGE, TOGETHER = "mean", "ensemble"
STORY_METHODS = (AVERAGE, TOGETHER, "entropy_adaptive", "merge_and_fit")  # the tables have all
ADAPTIVE = STORY_METHODS[2:]
EARLY = 8  # batches
EXPERT = "one expert alone"


def with_story(report: ReportFindings, dataset: Dataset) -> ReportFindings:
    """The report of a demo with its story, from the runs, the experts' cards in the results, and the images."""
    chapters = (_abroad, _averaging, _adapting, _changing_mixes, _price)
    return replace(report, story=[_hospitals(dataset), *(chapter(report) for chapter in chapters)])


def story_sentences(report: ReportFindings) -> list[str]:
    """The story for a terminal: one numbered line per section."""
    return [f"{n}. {each.title}: {each.text}" for n, each in enumerate(report.story, start=1)]


def _hospitals(dataset: Dataset) -> PageSection:
    """Two images of every class from every hospital, two hospitals side by side."""
    figure, axes = new_figure(9.6, 0.46 * len(dataset.domains), rows=(len(dataset.domains) + 1) // 2, columns=2)
    for ax, domain in zip(axes.flat, dataset.domains, strict=False):
        data = dataset[domain]
        picked = [int(i) for c in range(len(data.classes)) for i in (data.labels == c).nonzero()[:2, 0]]
        side_by_side = data.images[picked].permute(2, 0, 3, 1).flatten(1, 2)  # [n,3,H,W] -> [H,n·W,3]
        ax.imshow(side_by_side.numpy(), interpolation="nearest")
        ax.set_title(domain, fontsize=9, loc="left")
    for ax in axes.flat:
        ax.set_axis_off()
    classes, names = ", ".join(dataset.classes), ", ".join(dataset.domains)
    return PageSection(
        "The hospitals",
        f"{len(dataset.domains)} generated hospitals ({names}) photograph the same kinds of cells ({classes}), each "
        f"with its own stain, optics and artefacts. Each trains an expert on its own images.",
        image=to_data_uri(figure),
        alternative=f"Sample images of each phantom hospital ({names}), two of each class: {classes}.",
        caption=f"Two generated images of each class ({classes}) per hospital.",
    )


def _home(report: ReportFindings) -> dict[str, float]:
    """Accuracy of each expert on its own validation split, mean over seeds."""
    experts: dict[str, list[float]] = {}
    for each in report.provenance.results["experts"]:
        experts.setdefault(each["name"], []).append(each["validation"]["accuracy"])
    return {name: mean(values) for name, values in experts.items()}


def _away(report: ReportFindings) -> dict[tuple[str, str], float]:
    """Accuracy by expert and foreign target on the first stream, mean over seeds."""
    own: dict[tuple[str, str], list[float]] = {}
    for run in report.provenance.runs:
        if run.is_single and run.stream == report.bench.streams[0]:
            own.setdefault((str(run.arguments["options"]["expert"]), run.target), []).append(run.accuracy)
    return {key: mean(values) for key, values in own.items()}


def _abroad(report: ReportFindings) -> PageSection:
    """Every expert at every hospital."""
    home, away = _home(report), _away(report)
    falls = {key: home[key[0]] - value for key, value in away.items()}
    expert, target = max(falls, key=lambda key: falls[key])
    level, abroad = mean(home.values()), mean(away.values())
    text = (
        f"At home an expert is right on {100 * level:.1f} % of the images, abroad on {100 * abroad:.1f} %: it falls by "
        f"{100 * (level - abroad):.1f} points. The deepest fall is that of {expert}'s expert at {target}: "
        f"{100 * falls[expert, target]:.1f} points."
    )
    rows = tuple(
        (name, *(f"{100 * home[name]:.1f} (home)" if name == at else _percent(away.get((name, at))) for at in home))
        for name in home
    )
    note = "Accuracy in %, mean over seeds; at home on the validation split, abroad on all images."
    return PageSection(
        "Experts abroad", text, table=ResultTable("Each expert at each hospital", ("expert", *home), rows, note=note)
    )


def _levels(report: ReportFindings, stream: str) -> dict[str, float]:
    """Accuracy on one stream of the story's methods that were run, and of one expert alone on average."""
    rows = {row.label: row.accuracy.mean for row in report.bench.rows if row.stream == stream}
    methods = {label: rows[label] for label in STORY_METHODS if label in rows}
    return {**({EXPERT: rows[SINGLES]} if SINGLES in rows else {}), **methods}


def _averaging(report: ReportFindings) -> PageSection:
    """The average of the weights between one expert and the ensemble."""
    levels = _levels(report, report.bench.streams[0])
    alone, average, together = (levels.get(name, float("nan")) for name in (EXPERT, AVERAGE, TOGETHER))
    verb = "gains" if average > together else "loses"
    text = (
        f"The plain average of the others' weights is right on {100 * average:.1f} % at a hospital that none of them "
        f"knows, one of these experts alone on {100 * alone:.1f} %. Averaging {verb} "
        f"{100 * abs(average - together):.1f} points against the ensemble, which runs every expert and "
        f"averages their answers ({100 * together:.1f} %)."
    )
    heads, blocks = (
        [] if report.drift is None else report.drift.values(kind, "mean_angle") for kind in ("head", "block")
    )
    if heads and blocks:
        text += f" The heads are {mean(heads):.1f} degrees apart, the encoder blocks {mean(blocks):.1f}."
    return PageSection("Averaging", text)


def _adapting(report: ReportFindings) -> PageSection:
    """Accuracy so far, batch by batch, on the most skewed stream."""
    stream = report.figure_streams[-1]
    lines = {label: _running(report, label, stream) for label in _levels(report, stream) if label != EXPERT}
    clauses = [
        f"{plain_method(label)} is {_gain(lines, label, EARLY - 1)} after {EARLY} batches, "
        f"{_gain(lines, label, -1)} at the end"
        for label in ADAPTIVE
        if label in lines and AVERAGE in lines
    ]
    text = f"On {stream} ({stream_meaning(stream)}), beside the plain average: {'; '.join(clauses)}."
    alternative = f"Accuracy of all images so far on {stream}: " + ", ".join(
        f"{label} {100 * line[-1]:.1f} %" for label, line in lines.items()
    )
    drawing = panel("story-adapting", alternative, draw_lines_over_time, lines, width=6.4, height=3.2)
    caption = f"Accuracy of all images so far on {stream}, mean over targets and seeds."
    return PageSection("Adapting", text, panels=[drawing], keys=keys_of(lines), caption=caption)


def _running(report: ReportFindings, label: str, stream: str) -> np.ndarray:
    """Running accuracy [T], mean over the runs of a method on a stream; T is that of the shortest."""
    runs = [run for run in report.provenance.runs if (run.label, run.stream) == (label, stream)]
    lines = [line for run in runs if (line := trace_of(run).running_accuracy) is not None]
    shortest = min(map(len, lines))
    return np.mean([line[:shortest] for line in lines], axis=0)


def _gain(lines: Mapping[str, np.ndarray], label: str, batch: int) -> str:
    return f"{100 * (lines[label] - lines[AVERAGE])[min(batch, len(lines[label]) - 1)]:+.1f} points"


def _changing_mixes(report: ReportFindings) -> PageSection:
    """The story's methods on every stream."""
    streams = report.bench.streams
    levels = {stream: _levels(report, stream) for stream in streams}
    labels = list(levels[streams[0]])
    rows = tuple((name, *(_percent(levels[stream].get(name)) for stream in streams)) for name in labels)
    clauses = []
    for label in labels[1:]:
        low, high = (_percent(pick(levels[stream][label] for stream in streams)) for pick in (min, max))
        clauses.append(f"{plain_method(label)} {low} to {high} %" if low != high else f"{plain_method(label)} {low} %")
    text = "The same images arrive in other orders, so that the mix of classes changes along the way. "
    text += f"From the worst order to the best: {'; '.join(clauses)}."
    note = "Accuracy in %, mean over targets and seeds. All methods are under Results."
    table = ResultTable("The same images in other orders", ("method", *streams), rows, note=note)
    return PageSection("Changing mixes", text, table=mark_best(table, bounds=(EXPERT,)))


def _percent(value: float | None) -> str:
    return format_number(value, 1, 100)


def _price(report: ReportFindings) -> PageSection:
    """Forward passes of the story's methods."""
    forwards = {label: report.forwards[label] for label in STORY_METHODS if label in report.forwards}
    listed = ", ".join(f"{plain_method(label)} {shown(passes)}" for label, passes in forwards.items())
    return PageSection("Price", f"Forward passes per image, scoring included: {listed}. No labels, no backward passes.")
