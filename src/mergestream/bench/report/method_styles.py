"""How a method looks in every figure: one colour for it and its variants, dashed once the colours repeat."""

from collections.abc import Iterable

from mergestream.bench.report.figures import PALETTE, colours_of
from mergestream.bench.report.page import LegendKey
from mergestream.bench.report.svg import INK, METHOD, css_colour
from mergestream.methods import list_methods


def colour_of(label: str) -> str:
    """The method's colour; the page's ink for a row that is not a method."""
    return colours_of(list_methods()).get(_method_of(label), INK)


def is_dashed(label: str) -> bool:
    """There are more methods than colours that everyone can tell apart."""
    return _method_of(label) in list_methods()[len(PALETTE) :]


def gid_of(label: str) -> str:
    """The id by which a page finds what was drawn for a method."""
    return METHOD + label


def keys_of(labels: Iterable[str]) -> list[LegendKey]:
    return [LegendKey(label, css_colour(colour_of(label)), is_dashed(label), is_method=True) for label in labels]


def _method_of(label: str) -> str:
    return label.partition("(")[0]
