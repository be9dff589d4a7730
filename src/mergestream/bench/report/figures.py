"""Basics of all figures: palette, new figures, and figures as SVG in a page's own ink and colours."""

import base64
import io
import re
from collections.abc import Callable, Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from mergestream.runtime.files import write_atomically

FORMATS = ("png", "pdf", "svg")
# Okabe and Ito's palette, safe for colour-blind readers.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5F5F5F", "#B8A800")
GOLDEN_RATIO = 0.618034
INK = "#010203"  # used for nothing else, and replaced by the page's text colour
METHOD = "method="  # an artist whose gid begins so is hidden and shown with its method
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "legend.edgecolor": "none",
}


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, np.ndarray]:
    """A figure outside pyplot: no global state, no display needed. Axes have no frame at the top and the right."""
    figure = Figure(figsize=(width, height), layout="constrained")
    with mpl.rc_context({"axes.spines.top": False, "axes.spines.right": False}):
        return figure, figure.subplots(rows, columns, squeeze=False)


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """One colour per name, the same in every panel and of no other name."""
    return {name: _colour(position) for position, name in enumerate(names)}


def _colour(position: int) -> str:
    """A colour of the palette, then hues that are as far apart as possible and legible on white and on black."""
    if position < len(PALETTE):
        return PALETTE[position]
    lightness = (0.42, 0.5, 0.58)[position % 3]
    return str(to_hex(hls_to_rgb(position * GOLDEN_RATIO % 1, lightness, 0.55)))


def draw_heat(
    ax: Axes, grid: np.ndarray, rows: Sequence[str], low: float, high: float, number: Callable[[float], str], size: int
) -> AxesImage:
    """A heat map [rows, columns] with `number` of every value in its cell, in a font of `size`."""
    image = ax.imshow(grid, cmap="cividis", vmin=low, vmax=high, aspect="auto")
    for (row, column), value in np.ndenumerate(grid):
        ink = "white" if value < low + 0.55 * (high - low) else "black"
        if text := number(value):
            ax.text(column, row, text, ha="center", va="center", fontsize=size, color=ink)
    ax.set_yticks(range(len(rows)), rows)
    ax.spines[:].set_visible(False)
    return image


def write_figure(figure: Figure, folder: Path, name: str, dpi: int) -> None:
    """Write FOLDER/name.png, .pdf and .svg."""
    for kind in FORMATS:
        save = partial(figure.savefig, format=kind, dpi=dpi, facecolor="white")
        write_atomically(folder / f"{name}.{kind}", save)


def to_data_uri(figure: Figure) -> str:
    """The figure as an inline PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, facecolor="white")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


@dataclass(frozen=True)
class Panel:
    """One drawing; its SVG element carries the text alternative."""

    svg: str
    size: str = "small"  # small, half (of a page's width) or wide
    is_card: bool = False  # on white in the dark theme too: its colours were chosen for paper


def panel(
    name: str,
    alternative: str,
    draw: Callable[..., Any],
    *what: Any,
    width: float = 5.2,
    height: float = 3.4,
    title: str = "",
    is_card: bool = False,
) -> Panel:
    """Let draw(axis, *what) draw on a new axis. `name` is unique on the page: marks and clips are referred to by it."""
    ground = "white" if is_card else "none"
    with mpl.rc_context({**STYLE, "svg.hashsalt": name, "legend.facecolor": ground}):
        figure, axes = new_figure(width, height)
        draw(axes[0, 0], *what)
        if title:
            axes[0, 0].set_title(title)
        buffer = io.StringIO()
        # The page itself says when and by what it was made.
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    size = "small" if width < 4 else "half" if width < 7 else "wide"
    return Panel(_embeddable(buffer.getvalue(), name, alternative), size, is_card)


def _embeddable(text: str, name: str, alternative: str) -> str:
    """Turn an SVG file into a page element: no declarations, unique ids, the page's colours and fonts."""
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    view = re.search(r'viewBox="[^"]*"', text)
    opening = f'<svg role="img" aria-label="{escape(alternative, quote=True)}" {view.group() if view else ""}>'
    text = re.sub(rf'id="{METHOD}([^"]*)"', r'data-method="\1"', text)
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda match: f' id="{name}-{match[1]}"' if match[1] in used else "", text)
    text = re.sub(r'(url\(|href=")#', rf"\1#{name}-", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = text.replace("stroke: #000000", "stroke: currentColor")
    for place, colour in enumerate(PALETTE):
        text = re.sub(colour, f"var(--c{place})", text, flags=re.IGNORECASE)
    text = re.sub(r"\s*\n\s*", " ", re.sub(INK, "currentColor", text, flags=re.IGNORECASE))
    return opening + text[text.index(">") + 1 :]


def css_colour(colour: str) -> str:
    """The page's variable for a colour of the palette."""
    return f"var(--c{PALETTE.index(colour)})" if colour in PALETTE else colour
