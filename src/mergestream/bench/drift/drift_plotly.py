"""Interactive figures of drift, by plotly. The plotting library is inside the page, so that it opens offline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mergestream.bench.drift.drift_figures import GREY, VERMILION, DriftFigure
from mergestream.bench.report.page import InteractiveFigure
from mergestream.runtime.errors import InputError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# No button leads out of the page.
CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "showSendToCloud": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d"],
}
LEGEND_PAIRS = 15  # with more pairs the legend would hide the figure


def interactive_figures(figures: Sequence[DriftFigure]) -> list[InteractiveFigure]:
    """The figures as HTML; the first one carries the library, which is nearly five megabytes."""
    try:
        from plotly import graph_objects
    except ImportError as error:
        raise InputError(
            "The interactive page needs plotly: pip install 'mergestream[report]'. Static figures and numbers do not."
        ) from error
    drawings = [(_draw(graph_objects, figure), figure.title) for figure in figures]
    return [
        InteractiveFigure(drawing.to_html(full_html=False, include_plotlyjs=number == 0, config=CONFIG), title)
        for number, (drawing, title) in enumerate(drawings)
    ]


def _draw(graphs: Any, figure: DriftFigure) -> Figure:
    drawing = graphs.Figure() if figure.heat is None else graphs.Figure(_heat_map(graphs, figure, figure.heat))
    thin = {"line": {"width": 1}, "marker": {"size": 4}, "opacity": 0.6}
    for name, values in figure.pairs.items():
        line = _line(graphs, figure, name, values, GREY)
        drawing.add_trace(line.update(thin | {"showlegend": len(figure.pairs) <= LEGEND_PAIRS}))
    for each in figure.lines:
        drawing.add_trace(_line(graphs, figure, each.name, each.values, each.colour))
    for guide in figure.guides:
        drawing.add_hline(
            y=guide, line={"color": GREY, "dash": "dot", "width": 1}, annotation_text=f"{guide:g}{figure.unit}"
        )
    if figure.shaded_from is not None:
        note = {"annotation_text": f"≥ {figure.shaded_from:g} % lost", "annotation_position": "top left"}
        drawing.add_hrect(y0=figure.shaded_from, y1=100, fillcolor=VERMILION, opacity=0.12, line_width=0, **note)
    if figure.heat is not None:
        drawing.update_yaxes(autorange="reversed")
    else:
        drawing.update_yaxes(title=figure.y_label, range=figure.y_range, rangemode="tozero" if figure.is_log else None)
    drawing.update_xaxes(title="layer, in order of depth", type="category")
    return drawing.update_layout(
        template="plotly_white",
        height=450,
        margin={"l": 60, "r": 20, "t": 30, "b": 60},
        legend={"orientation": "h", "y": -0.25},
    )


def _line(graphs: Any, figure: DriftFigure, name: str, values: np.ndarray, colour: str) -> Any:
    return graphs.Scatter(
        x=[layer.name for layer in figure.layers],
        y=_without_nan(values),
        name=name,
        mode="lines+markers",
        line={"color": colour, "width": 2.5},
        hovertemplate=f"%{{x}}: %{{y:.2f}}{figure.unit}",
    )


def _heat_map(graphs: Any, figure: DriftFigure, angles: np.ndarray) -> Any:
    return graphs.Heatmap(
        z=_without_nan(angles),
        x=[layer.name for layer in figure.layers],
        y=figure.heat_rows,
        zmin=0,
        zmax=max(90, float(np.nanmax(angles))),
        colorscale="Cividis",
        hoverongaps=False,
        colorbar={"title": "degrees"},
        hovertemplate="%{y}, %{x}: %{z:.2f}°<extra></extra>",
    )


def _without_nan(values: np.ndarray) -> Any:
    """Lists with None for NaN, which JSON does not have."""
    return np.where(np.isfinite(values), values.astype(object), np.array(None)).tolist()
