"""How options are spelt on a command line: values of all kinds, lists in brackets, separators outside of them."""

from collections.abc import Sequence
from typing import Any

from mergestream.runtime.errors import InputError

OPENING, CLOSING = "([", ")]"
WORDS = {"true": True, "false": False, "none": None}


def parse_value(text: str) -> Any:
    """A number, true, false, none, a list in brackets, or else the text itself."""
    text = text.strip()
    if text[:1] in OPENING and text[-1:] in CLOSING and text:
        return tuple(parse_value(item) for item in split_outside_brackets(text[1:-1], ","))
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for number in (int, float):
        try:
            # Python reads 0_1 as 1; here it is a name, such as that of a trap set.
            return text if "_" in text else number(text)
        except ValueError:
            continue
    return text


def split_outside_brackets(text: str, separator: str) -> list[str]:
    """Pieces between separators that stand outside all brackets; empty ones are left out."""
    pieces, depth = [""], 0
    for character in text:
        depth += (character in OPENING) - (character in CLOSING)
        if depth < 0:
            break
        if character == separator and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += character
    if depth:
        raise InputError(f"A bracket is open or missing in '{text}'.")
    return [piece for piece in pieces if piece.strip()]


def parse_options(texts: Sequence[str]) -> tuple[tuple[str, Any], ...]:
    """'name=value' texts as pairs in the order of their names; none twice."""
    found = [_option(text) for text in texts]
    for name, _ in found:
        if [each for each, _ in found].count(name) > 1:
            raise InputError(f"The option '{name}' is given twice.")
    return tuple(sorted(found, key=lambda option: option[0]))


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise InputError(f"'{text}' is not an option: write name=value.")
    return name.strip(), parse_value(value)
