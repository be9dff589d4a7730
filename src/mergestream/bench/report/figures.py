"""Basics of all figures: palette, new figures, and drawings that draw on a given axis."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, safe for colour-blind readers.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5F5F5F", "#B8A800")


def new_figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, np.ndarray]:
    """A figure outside pyplot: no global state, no display needed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """One colour per name, the same in every panel."""
    return {name: PALETTE[position % len(PALETTE)] for position, name in enumerate(names)}


def draw_samples(ax: Axes, images: np.ndarray, title: str) -> None:
    """Images [n,H,W,3] side by side."""
    ax.imshow(np.concatenate(list(images), axis=1), interpolation="nearest")
    ax.set_title(title, fontsize=9, loc="left")
    ax.set_axis_off()


def to_data_uri(figure: Figure) -> str:
    """The figure as an inline PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, facecolor="white")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
