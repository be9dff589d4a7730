"""A pool's drift as a summary, as files, and as one interactive page by plotly."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mergestream.bench.drift.drift_figures import (
    GREY,
    GUIDES,
    HALF,
    VERMILION,
    DriftFigure,
    figures_of,
    pair_heat_maps,
    static_figure,
)
from mergestream.bench.drift.pool_drift import Drift, analyse_drift
from mergestream.bench.report.figures import write_figure
from mergestream.bench.report.page import NOTICE, render, render_text
from mergestream.runtime.errors import InputError
from mergestream.runtime.files import make_folder, write_text
from mergestream.runtime.parallel import Track

RECORD, PAGE, FIGURES = "drift.json", "drift.html", "figures"
# No button leads out of the page.
CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "showSendToCloud": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d"],
}
LEGEND_PAIRS = 15  # with more pairs the legend would hide the figure


def run_drift(pool: Path, out: Path, track: Track, command: str, without: Collection[str] = ()) -> Drift:
    """Measure the drift of `pool` and write OUT/drift.json, OUT/figures and OUT/drift.html."""
    make_folder(out)
    drift = analyse_drift(pool, without=without, track=track)
    drift.save(out / RECORD)
    figures, pairs = figures_of(drift), pair_heat_maps(drift) if len(drift.pairs) <= LEGEND_PAIRS else []
    with track("Drawing", len(figures) + len(pairs) + 1) as advance:
        for figure in (*figures, *pairs):
            write_figure(static_figure(figure), out / FIGURES, figure.name, dpi=150)
            advance()
        write_text(out / PAGE, render_drift(drift, command))
        advance()
    return drift


def render_drift(drift: Drift, command: str) -> str:
    """The page as text: summary, interactive figures, provenance."""
    title = f"Drift of {len(drift.experts)} experts: {drift.network}"
    figures, sentences = interactive_figures(figures_of(drift)), describe_drift(drift)
    page, _ = render("drift.html.j2", title, NOTICE, drift=drift, figures=figures, sentences=sentences, command=command)
    return page


def describe_drift(drift: Drift) -> list[str]:
    """Where experts agree, where they differ, and what averaging them loses."""
    moves = []  # what moved from the shared start: subject, relative norms, angles between the directions
    for kind, subject in (("block", "encoder blocks"), ("head", "the head")):
        bases = [layer.whole.from_base for layer in drift.of_kind(kind) if layer.whole.from_base is not None]
        norms = [norm for base in bases for norm in base.relative_norms if norm is not None]
        angles = [base.mean_angle for base in bases if base.mean_angle is not None]
        moves += [(subject, norms, angles)] if norms else []
    return render_text("drift.txt.j2", drift=drift, moves=moves, guides=GUIDES, half=HALF).splitlines()


def interactive_figures(figures: Sequence[DriftFigure]) -> dict[str, str]:
    """The figures as HTML by title; the first one carries the library, which is nearly five megabytes."""
    try:
        from plotly import graph_objects
    except ImportError as error:
        raise InputError(
            "The interactive page needs plotly: pip install 'mergestream[report]'. Static figures and numbers do not."
        ) from error
    drawings = {figure.title: _interactive(graph_objects, figure) for figure in figures}
    return {
        title: drawing.to_html(full_html=False, include_plotlyjs=number == 0, config=CONFIG)
        for number, (title, drawing) in enumerate(drawings.items())
    }


def _interactive(graphs: Any, figure: DriftFigure) -> Any:
    """A plotly figure with the same content as the static one."""
    layers = [layer.name for layer in figure.layers]
    drawing, style = graphs.Figure(), {"mode": "lines+markers", "hovertemplate": f"%{{x}}: %{{y:.2f}}{figure.unit}"}
    thin = {"line": {"color": GREY, "width": 1}, "marker": {"size": 4}, "opacity": 0.6}
    for name, values in figure.pairs.items():
        in_legend = len(figure.pairs) <= LEGEND_PAIRS
        drawing.add_scatter(x=layers, y=_without_nan(values), name=name, showlegend=in_legend, **style, **thin)
    for each in figure.lines:
        line = {"color": each.colour, "width": 2.5}
        drawing.add_scatter(x=layers, y=_without_nan(each.values), name=each.name, line=line, **style)
    for guide in figure.guides:
        line = {"color": GREY, "dash": "dot", "width": 1}
        drawing.add_hline(y=guide, line=line, annotation_text=f"{guide:g}{figure.unit}")
    if figure.shaded_from is not None:
        note = {"annotation_text": f"≥ {figure.shaded_from:g} % lost", "annotation_position": "top left"}
        drawing.add_hrect(y0=figure.shaded_from, y1=100, fillcolor=VERMILION, opacity=0.12, line_width=0, **note)
    if figure.heat is None:
        drawing.update_yaxes(title=figure.y_label, range=figure.y_range, rangemode="tozero" if figure.is_log else None)
    else:
        drawing.add_heatmap(
            z=_without_nan(figure.heat),
            x=layers,
            y=figure.heat_rows,
            zmin=0,
            zmax=max(90, float(np.nanmax(figure.heat))),
            colorscale="Cividis",
            hoverongaps=False,
            colorbar={"title": "degrees"},
            hovertemplate="%{y}, %{x}: %{z:.2f}°<extra></extra>",
        )
        drawing.update_yaxes(autorange="reversed")
    drawing.update_xaxes(title="layer, in order of depth", type="category")
    margin, legend = {"l": 60, "r": 20, "t": 30, "b": 60}, {"orientation": "h", "y": -0.25}
    return drawing.update_layout(template="plotly_white", height=450, margin=margin, legend=legend)


def _without_nan(values: np.ndarray) -> Any:
    """Lists with None for NaN, which JSON does not have."""
    return np.where(np.isfinite(values), values.astype(object), np.array(None)).tolist()
