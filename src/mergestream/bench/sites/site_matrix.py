"""Tables and sentences from site reports: who answers well where, who disagrees, how sites differ in prevalence."""

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import numpy as np

from mergestream.bench.report.result_table import ResultTable, format_number, grid_table
from mergestream.bench.sites.site_report import ModelAnswers, SiteReport
from mergestream.functional.masked_counts import recall_bounds

SCORES = {"balanced_accuracy": "balanced accuracy", "accuracy": "accuracy", "auroc": "AUROC"}
MASKED_NOTE = (
    "In percent, estimated from counts that are rounded down to multiples of five; in brackets, the bounds that "
    "follow from them. A star marks the site's own expert, on images that its training held out."
)


def experts_of(reports: Sequence[SiteReport]) -> list[str]:
    return list(dict.fromkeys(name for report in reports for name in report.experts))


def methods_of(reports: Sequence[SiteReport]) -> list[str]:
    return list(dict.fromkeys(name for report in reports for name in report.candidates))


def scores_by_site(reports: Sequence[SiteReport]) -> dict[str, Any]:
    """Scores of all experts and methods by site, and the estimated prevalence there."""
    return {
        report.site: {
            "prevalence": dict(zip(report.classes, report.prevalence.round(4).tolist(), strict=True)),
            "experts": {name: report.scores(model) for name, model in report.answers.items()},
            "methods": {name: report.scores(model) for name, model in report.candidates.items()},
        }
        for report in reports
    }


def score_grid(reports: Sequence[SiteReport], names: Sequence[str], score: str) -> np.ndarray:
    """A score [rows, sites]; NaN where a site did not measure the expert or method."""
    models = [[(report.answers | report.candidates).get(name) for report in reports] for name in names]
    values = [
        [None if model is None else report.scores(model)[score] for model, report in zip(row, reports, strict=True)]
        for row in models
    ]
    return np.array(values, dtype=float).reshape(len(names), len(reports))


def matrix_table(reports: Sequence[SiteReport]) -> ResultTable:
    """Balanced accuracy of every expert at every site, with its bounds."""
    places = product(experts_of(reports), reports)
    cells = {(name, each.site): _cell(each, each.answers[name]) for name, each in places if name in each.answers}
    return grid_table("Balanced accuracy of every expert at every site", "expert", cells, str, note=MASKED_NOTE)


def method_table(reports: Sequence[SiteReport]) -> ResultTable:
    """Balanced accuracy of the candidate methods, without the site's own experts."""
    places = product(methods_of(reports), reports)
    cells = {(name, each.site): _cell(each, each.candidates[name]) for name, each in places if name in each.candidates}
    note = "The site's own experts do not take part: a method is measured as at a new site."
    return grid_table("Balanced accuracy of the candidate methods", "method", cells, str, note=note)


def _cell(report: SiteReport, model: ModelAnswers) -> str:
    value = report.scores(model)["balanced_accuracy"]
    present = [each for each in recall_bounds(model.confusion, report.class_counts) if each is not None]
    low, high = np.mean(present, axis=0)
    return f"{format_number(value, 1, 100)} [{100 * low:.0f}, {100 * high:.0f}]{' *' if model.is_home else ''}"


def prevalence_table(reports: Sequence[SiteReport]) -> ResultTable:
    """Images per class and site, as the reports have them."""
    cells = {
        (report.site, name): "1–4" if count is None else f"{count}–{count + 4}" if count else "none"
        for report in reports
        for name, count in zip(report.classes, report.class_counts, strict=True)
    }
    return grid_table("Images per site and class", "site", cells, str)


def report_table(report: SiteReport) -> ResultTable:
    """One site's experts and methods."""
    models = report.answers | report.candidates
    rows = tuple(
        (name, _cell(report, model), format_number(model.auroc, 2), format_number(model.nll, 3))
        for name, model in models.items()
    )
    return ResultTable(
        f"Answers at {report.site}", ("model", "balanced accuracy", "AUROC", "NLL"), rows, note=MASKED_NOTE
    )


def describe_report(report: SiteReport) -> list[str]:
    lacking = [name for name, count in zip(report.classes, report.class_counts, strict=True) if count == 0]
    lines = (
        [f"This site lacks {', '.join(lacking)}: the report says so, and measures the other classes."]
        if lacking
        else []
    )
    hidden = sum(row is None for model in report.answers.values() for row in model.confusion)
    if hidden:
        lines.append(f"{hidden} rows of confusion tables are hidden: a count below five could be computed from them.")
    return [*lines, "The file holds masked counts and rounded means. Read it before you send it: docs/privacy.md."]


def distance_grid(reports: Sequence[SiteReport], experts: Sequence[str]) -> np.ndarray:
    """How far two experts' answers are apart [K,K], mean over sites; NaN on the diagonal and where no site measured."""
    gaps: dict[frozenset[str], list[float]] = {}
    for report in reports:
        for pair in report.distances:
            gaps.setdefault(frozenset((pair.one, pair.other)), []).append(pair.distance)
    grid = np.full((len(experts), len(experts)), np.nan)
    for k, j in combinations(range(len(experts)), 2):
        if own := gaps.get(frozenset((experts[k], experts[j]))):
            grid[k, j] = grid[j, k] = float(np.mean(own))
    return grid


def describe_matrix(reports: Sequence[SiteReport]) -> list[str]:
    """Where experts answer best and worst, which pair disagrees most, how prevalence varies, and what is missing."""
    experts = experts_of(reports)
    grid = score_grid(reports, experts, "balanced_accuracy")
    lines = []
    for column, report in enumerate(reports):
        measured = np.isfinite(grid[:, column])
        best, worst = (int(pick(grid[:, column])) for pick in (np.nanargmax, np.nanargmin))
        if measured.sum() > 1:
            lines.append(
                f"At {report.site} '{experts[best]}' answers best ({100 * grid[best, column]:.1f} % balanced), "
                f"'{experts[worst]}' worst ({100 * grid[worst, column]:.1f} %)."
            )
        missing = [name for name, is_measured in zip(experts, measured, strict=True) if not is_measured]
        if missing:
            lines.append(f"{report.site} did not measure {', '.join(missing)}: its cells are empty.")
    gaps = distance_grid(reports, experts)
    if np.isfinite(gaps).any():
        k, j = np.unravel_index(np.nanargmax(gaps), gaps.shape)
        lines.append(f"'{experts[k]}' and '{experts[j]}' disagree most: their answers are {gaps[k, j]:.2f} apart.")
    shares = np.stack([report.prevalence for report in reports])
    widest = int((shares.max(axis=0) - shares.min(axis=0)).argmax())
    low, high = shares[:, widest].min(), shares[:, widest].max()
    if len(reports) > 1:
        name = reports[0].classes[widest]
        lines.append(f"Prevalence differs most for {name}: {100 * low:.0f} to {100 * high:.0f} % of a site's images.")
    return lines


def hashes_in(reports: Sequence[SiteReport]) -> dict[str, str]:
    """Weights of every expert by name."""
    return {name: digest for report in reports for name, digest in report.experts.items()}
