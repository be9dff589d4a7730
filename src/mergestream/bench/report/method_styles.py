"""How a method looks wherever it is drawn: one colour for it and its variants, a dashed line for the second round."""

from collections.abc import Iterable

from mergestream.bench.analysis.comparison import ORACLE, SINGLES
from mergestream.bench.report.figures import PALETTE, colours_of
from mergestream.bench.report.page import Key
from mergestream.bench.report.svg import INK, METHOD, css_colour
from mergestream.methods import list_methods

BOUNDS = (SINGLES, ORACLE)


def method_of(label: str) -> str:
    """A label without its options."""
    return label.partition("(")[0]


def is_variant(label: str) -> bool:
    return "(" in label


def colour_of(label: str) -> str:
    """The page's ink for what is no method of ours."""
    return colours_of(list_methods()).get(method_of(label), INK)


def is_dashed(label: str) -> bool:
    """There are more methods than colours that everyone can tell apart."""
    return method_of(label) in list_methods()[len(PALETTE) :]


def gid_of(label: str) -> str:
    """The name by which a page finds what was drawn for a method."""
    return METHOD + label


def keys_of(labels: Iterable[str]) -> list[Key]:
    return [Key(label, css_colour(colour_of(label)), is_dashed(label), is_method=True) for label in labels]
