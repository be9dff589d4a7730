"""A matplotlib figure as SVG inside a page: the page's ink and colours, so that it reads in light and in dark."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from mergestream.bench.report.figures import PALETTE, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#010203"  # nothing else is drawn in this colour, which becomes the page's
METHOD = "method="  # an artist whose gid begins so is hidden and shown with its method
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "legend.edgecolor": "none",
}


@dataclass(frozen=True)
class Panel:
    """One drawing, and what is seen on it, in words."""

    svg: str
    alternative: str
    size: str = "small"  # small, half (of a page's width) or wide
    is_card: bool = False  # on white in the dark, too: its colours were chosen for paper

    def to_html(self) -> str:
        said = escape(self.alternative, quote=True)
        shape = f"panel {self.size}{' card' * self.is_card}"
        reachable = ' tabindex="0"' if self.size == "wide" else ""  # on a phone it scrolls in its box
        drawing = self.svg.replace("<svg ", f'<svg role="img" aria-label="{said}" ', 1)
        return f'<div class="{shape}"{reachable}>{drawing}</div>'


def panel(
    name: str,
    alternative: str,
    draw: Callable[[Axes], Any],
    *,
    width: float = 5.2,
    height: float = 3.4,
    title: str = "",
    is_card: bool = False,
) -> Panel:
    """What `draw` puts on an axis. `name` is unique on the page: marks and clips are referred to by it."""
    import matplotlib as mpl

    ground = "white" if is_card else "none"
    with mpl.rc_context({**STYLE, "svg.hashsalt": name, "legend.facecolor": ground}):
        figure, axes = new_figure(width, height)
        draw(axes[0, 0])
        if title:
            axes[0, 0].set_title(title)
        buffer = io.StringIO()
        # The page says when and by what it was made.
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=metadata)
    size = "small" if width < 4 else "half" if width < 7 else "wide"
    return Panel(embedded(buffer.getvalue(), name), alternative, size, is_card)


def embedded(text: str, name: str) -> str:
    """A file's SVG as an element of a page: no declarations, names of its own, the page's colours and letters."""
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r"<svg[^>]*?(viewBox=\"[^\"]*\")[^>]*>", r"<svg \1 >", text, count=1)
    text = re.sub(rf'id="{METHOD}([^"]*)"', r'data-method="\1"', text)
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in used else "", text)
    text = re.sub(r'(url\(|href=")#', rf"\1#{name}-", text)
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", text)
    text = text.replace("stroke: #000000", "stroke: currentColor")
    for place, colour in enumerate(PALETTE):
        text = re.sub(colour, f"var(--c{place})", text, flags=re.IGNORECASE)
    return re.sub(r"\s*\n\s*", " ", re.sub(INK, "currentColor", text, flags=re.IGNORECASE))


def css_colour(colour: str) -> str:
    """A colour as the page knows it."""
    return f"var(--c{PALETTE.index(colour)})" if colour in PALETTE else colour
