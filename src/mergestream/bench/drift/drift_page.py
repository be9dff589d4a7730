"""A pool's drift as one interactive page. The plotting library is inside it, so that it opens offline."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from mergestream.bench.drift.drift_figures import (
    BLUE,
    FIGURES,
    GREEN,
    GREY,
    GUIDES,
    HALF,
    VERMILION,
    angles_from_base,
    component_angles,
    distances_from_base,
    values,
)
from mergestream.bench.drift.drift_text import drift_in_words
from mergestream.bench.drift.weights import Drift
from mergestream.bench.report.figures import colours_of
from mergestream.bench.report.page import NOTICE, Section, bullets, paragraph, preformatted, render
from mergestream.runtime.errors import InputError

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

HOW = "Point at a value to read it; click on a name in the legend to hide it, twice to see it alone; drag to zoom."
# No button leads out of the page.
CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "showSendToCloud": False,
    "modeBarButtonsToRemove": ["select2d", "lasso2d"],
}
MANY = 15  # pairs: beyond, the legend would hide the figure


def render_drift(drift: Drift, command: str) -> str:
    """The page as text: sentences, interactive figures, where the numbers come from."""
    graphs = _graph_objects()
    figures = _figures(graphs, drift)
    parts = []
    for number, (name, figure) in enumerate(figures.items()):
        # The library once, with the first figure: it is nearly five megabytes.
        html = figure.to_html(full_html=False, include_plotlyjs=number == 0, config=CONFIG)
        parts.append(f"<figure><figcaption>{escape(FIGURES[name][1])}</figcaption>{html}</figure>")
    sections = [
        Section("In words", [bullets(drift_in_words(drift))]),
        Section("Figures", [paragraph(HOW), *parts] if parts else [paragraph("There is nothing to draw.")]),
        Section("How to get this page again", [preformatted(command), preformatted(_provenance(drift))]),
    ]
    return render(f"Drift of {len(drift.experts)} experts: {drift.network}", NOTICE, sections)


def _graph_objects() -> Any:
    try:
        from plotly import graph_objects
    except ImportError as error:
        raise InputError(
            "The interactive page needs plotly: pip install 'mergestream[report]'. Figures and numbers need it not."
        ) from error
    return graph_objects


def _figures(graphs: Any, drift: Drift) -> dict[str, Figure]:
    drawn = {}
    if drift.pairs:
        drawn["drift_by_depth"] = _angles(graphs, drift)
        drawn["weights_and_biases"] = _apart(graphs, drift)
        drawn["norm_ratios"] = _ratios(graphs, drift)
        drawn["signal_loss"] = _loss(graphs, drift)
        drawn["component_heat_map"] = _heat_map(graphs, drift)
    if drift.has_base:
        drawn["drift_from_base"] = _from_base(graphs, drift)
    if drift.has_base and drift.pairs:
        drawn["angles_from_base"] = _angles_from_base(graphs, drift)
    for figure in drawn.values():
        figure.update_layout(
            template="plotly_white",
            height=450,
            margin={"l": 60, "r": 20, "t": 30, "b": 60},
            legend={"orientation": "h", "y": -0.25},
        )
        figure.update_xaxes(title="layer, in order of depth", type="category")
    return drawn


def _angles(graphs: Any, drift: Drift) -> Figure:
    figure = graphs.Figure(_pair_lines(graphs, drift, values(drift, lambda spread: spread.angles), "°"))
    figure.add_trace(_line(graphs, drift, values(drift, lambda s: s.mean_angle), "mean of all pairs", BLUE, "°"))
    return _with_guides(figure, "angle between experts, degrees")


def _apart(graphs: Any, drift: Drift) -> Figure:
    figure = graphs.Figure()
    for apart, colour in (("weights", BLUE), ("biases", VERMILION)):
        spreads = [getattr(layer, apart) for layer in drift.layers]
        heights = [None if each is None else each.mean_angle for each in spreads]
        figure.add_trace(_line(graphs, drift, heights, apart, colour, "°"))
    return _with_guides(figure, "mean angle of all pairs, degrees")


def _ratios(graphs: Any, drift: Drift) -> Figure:
    figure = graphs.Figure(_pair_lines(graphs, drift, values(drift, lambda spread: spread.norm_ratios), ""))
    figure.add_trace(_line(graphs, drift, values(drift, lambda s: s.mean_norm_ratio), "mean of all pairs", BLUE, ""))
    return figure.update_yaxes(title="norm ratio, larger / smaller")


def _loss(graphs: Any, drift: Drift) -> Figure:
    figure = graphs.Figure()
    implied, measured = values(drift, lambda s: s.implied_loss), values(drift, lambda s: s.measured_loss)
    figure.add_trace(_line(graphs, drift, implied, "implied by the mean angle of two", GREEN, " %"))
    figure.add_trace(_line(graphs, drift, measured, "measured on the mean of all", BLUE, " %"))
    note = {"annotation_text": f"≥ {HALF} % lost", "annotation_position": "top left"}
    figure.add_hrect(y0=HALF, y1=100, fillcolor=VERMILION, opacity=0.12, line_width=0, **note)
    return figure.update_yaxes(title="signal lost by averaging, %", range=[0, 100])


def _heat_map(graphs: Any, drift: Drift) -> Figure:
    angles = component_angles(drift)
    return graphs.Figure(
        graphs.Heatmap(
            z=_plain(angles),
            x=_names(drift),
            y=drift.components,
            zmin=0,
            zmax=max(90, float(np.nanmax(angles))),
            colorscale="Cividis",
            hoverongaps=False,
            colorbar={"title": "degrees"},
            hovertemplate="%{y}, %{x}: %{z:.2f}°<extra></extra>",
        )
    ).update_yaxes(autorange="reversed")


def _from_base(graphs: Any, drift: Drift) -> Figure:
    figure = graphs.Figure()
    for (name, colour), shares in zip(colours_of(drift.experts).items(), distances_from_base(drift).T, strict=True):
        figure.add_trace(_line(graphs, drift, 100 * shares, name, colour, " %"))
    return figure.update_yaxes(title="‖expert − base‖ / ‖base‖, %", rangemode="tozero")


def _angles_from_base(graphs: Any, drift: Drift) -> Figure:
    each, means = angles_from_base(drift)
    figure = graphs.Figure(_pair_lines(graphs, drift, each, "°"))
    figure.add_trace(_line(graphs, drift, means, "mean of all pairs", BLUE, "°"))
    return _with_guides(figure, "angle between (expert − base), degrees")


def _pair_lines(graphs: Any, drift: Drift, heights: np.ndarray, unit: str) -> list[Any]:
    """One thin line a pair; heights [layers, pairs]."""
    named = zip(drift.pairs, heights.T, strict=True)
    lines = [_line(graphs, drift, each, f"{one} – {other}", GREY, unit) for (one, other), each in named]
    thin = {"line": {"width": 1}, "marker": {"size": 4}, "opacity": 0.6, "showlegend": len(lines) <= MANY}
    return [line.update(thin) for line in lines]


def _line(
    graphs: Any, drift: Drift, heights: Sequence[float | None] | np.ndarray, name: str, colour: str, unit: str
) -> Any:
    return graphs.Scatter(
        x=_names(drift),
        y=_plain(np.array(heights, dtype=float)),
        name=name,
        mode="lines+markers",
        line={"color": colour, "width": 2.5},
        hovertemplate=f"%{{x}}: %{{y:.2f}}{unit}",
    )


def _with_guides(figure: Figure, title: str) -> Figure:
    for guide in GUIDES:
        figure.add_hline(y=guide, line={"color": GREY, "dash": "dot", "width": 1}, annotation_text=f"{guide}°")
    return figure.update_yaxes(title=title, rangemode="tozero")


def _names(drift: Drift) -> list[str]:
    return [layer.name for layer in drift.layers]


def _plain(values: np.ndarray) -> Any:
    """Lists with None for NaN: JSON knows no NaN."""
    return np.where(np.isfinite(values), values.astype(object), np.array(None)).tolist()


def _provenance(drift: Drift) -> str:
    return "\n".join(f"{name}: sha-256 {digest}" for name, digest in drift.weights_sha256.items())
