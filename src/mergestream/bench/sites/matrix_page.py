"""The page of all sites' reports: heat maps, disagreement, prevalence, calibration. One file, both themes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from mergestream.bench.report.figures import PALETTE, Panel, colours_of, css_colour, draw_heat, panel
from mergestream.bench.report.page import LegendKey, page_notice, render, slug
from mergestream.bench.sites import site_matrix
from mergestream.bench.sites.site_matrix import SCORES, distance_grid, experts_of, methods_of, score_grid
from mergestream.bench.sites.site_report import ModelAnswers, SiteReport
from mergestream.functional.masked_counts import LARGEST_HIDDEN
from mergestream.runtime.files import write_text


def write_matrix(reports: Sequence[SiteReport], out: Path, command: str, signers: Sequence[str] = ()) -> None:
    """Write the page; `signers`: who signed each report, where signatures were checked."""
    experts, methods = experts_of(reports), methods_of(reports)
    title = f"{len(experts)} experts at {len(reports)} sites"
    alternative, height = "Bars: share of every class by site", 1.2 + 0.4 * len(reports)
    page, _ = render(
        "matrix.html.j2",
        title,
        page_notice(any(report.synthetic for report in reports)),
        reports=reports,
        site_matrix=site_matrix,
        expert_panels=_heat_maps(reports, experts, "experts"),
        method_panels=_heat_maps(reports, methods, "methods")[:1] if methods else [],
        distance_panel=_distance_map(reports, experts),
        prevalence_panel=panel("prevalence", alternative, _draw_prevalence, reports, height=height, width=7.5),
        prevalence_keys=_keys(reports[0].classes),
        calibration_panels=[_calibration(reports, name) for name in experts],
        calibration_keys=_keys([report.site for report in reports]),
        signers=signers,
        command=command,
    )
    write_text(out, page)


def _keys(names: Sequence[str]) -> list[LegendKey]:
    return [LegendKey(name, css_colour(colour)) for name, colour in colours_of(names).items()]


def _heat_maps(reports: Sequence[SiteReport], names: Sequence[str], kind: str) -> list[Panel]:
    sites = [report.site for report in reports]
    home = [
        (row, column)
        for row, name in enumerate(names)
        for column, report in enumerate(reports)
        if name in report.answers and report.answers[name].is_home
    ]
    width, height = 1.9 + 0.8 * len(sites) + 0.07 * max(map(len, names)), 1.5 + 0.42 * len(names)
    width = width if kind == "experts" else max(width, 9.0)  # alone in its row, it is as wide as the page
    panels = []
    for score, title in SCORES.items():
        grid = 100 * score_grid(reports, names, score)
        alternative = f"Heat map of {title} in percent: {kind} by row, sites by column"
        what = (grid, names, sites, home)
        shown: dict[str, Any] = {"title": title, "is_card": True, "width": width, "height": height}
        panels.append(panel(f"{kind}-{slug(score)}", alternative, _draw_heat, *what, **shown))
    return panels


def _draw_heat(
    ax: Axes,
    grid: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    framed: Sequence[tuple[int, int]] = (),
    top: float = 100.0,
    digits: int = 0,
) -> None:
    low = 0.0 if top <= 1 else min(50.0, float(np.nanmin(grid, initial=50.0)))

    def number(value: float) -> str:
        return f"{value:.{digits}f}" if np.isfinite(value) else "–"

    draw_heat(ax, grid, rows, low, top, number, size=9)
    for row, column in framed:
        ax.add_patch(
            Rectangle((column - 0.47, row - 0.46), 0.94, 0.92, fill=False, edgecolor=PALETTE[1], linewidth=2.2)
        )
    crowded = max(map(len, columns)) > 9
    ax.set_xticks(range(len(columns)), columns, rotation=30 if crowded else 0, ha="right" if crowded else "center")


def _distance_map(reports: Sequence[SiteReport], experts: Sequence[str]) -> Panel | None:
    grid = distance_grid(reports, experts)
    if not np.isfinite(grid).any():
        return None
    top = max(0.1, float(np.nanmax(grid)))
    width, height = 2.0 + 0.9 * len(experts), 1.5 + 0.45 * len(experts)
    alternative = "Heat map of the distance between two experts' answers, mean over sites"
    what = (grid, experts, experts, (), top, 2)
    return panel("distances", alternative, _draw_heat, *what, is_card=True, width=width, height=height)


def _draw_prevalence(ax: Axes, reports: Sequence[SiteReport]) -> None:
    left, shares = np.zeros(len(reports)), 100 * np.stack([report.prevalence for report in reports])
    for place, colour in enumerate(colours_of(reports[0].classes).values()):
        ax.barh(range(len(reports)), shares[:, place], left=left, color=colour, height=0.7)
        left += shares[:, place]
    ax.set_yticks(range(len(reports)), [report.site for report in reports])
    ax.invert_yaxis()
    ax.set_xlim(0, 100)
    ax.set_xlabel("share of the site's images, %")


def _calibration(reports: Sequence[SiteReport], expert: str) -> Panel:
    alternative = f"Accuracy by confidence of {expert}, one line per site"
    name = f"calibration-{slug(expert)}"
    return panel(name, alternative, _draw_calibration, reports, expert, title=expert, width=3.4, height=3.0)


def _draw_calibration(ax: Axes, reports: Sequence[SiteReport], expert: str) -> None:
    ax.plot([0, 100], [0, 100], ":", color=PALETTE[6], linewidth=1)
    for report, colour in zip(reports, colours_of([report.site for report in reports]).values(), strict=True):
        points = _reliability(report.answers.get(expert))
        if len(points):
            ax.plot(points[:, 0], points[:, 1], "o-", color=colour, markersize=4, linewidth=1.4)
    ax.set_xlim(0, 102)
    ax.set_ylim(0, 102)
    ax.set_xlabel("confidence, %")
    ax.set_ylabel("correct, %")


def _reliability(model: ModelAnswers | None) -> np.ndarray:
    """Mean confidence and estimated accuracy in percent [bins, 2], of bins with five images or more."""
    bins = [] if model is None or model.calibration is None else model.calibration
    middle = LARGEST_HIDDEN / 2
    points = [
        (each.confidence, min(1.0, ((each.correct or 0) + middle) / (each.images + middle)))
        for each in bins
        if each.images and each.confidence is not None
    ]
    return 100 * np.array(points)
