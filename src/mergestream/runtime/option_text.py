"""Option values on the command line: numbers, words, and lists in brackets."""

from collections.abc import Sequence
from typing import Any

from mergestream.runtime.errors import InputError

OPENING, CLOSING = "([", ")]"
WORDS = {"true": True, "false": False, "none": None}


def parse_value(text: str) -> Any:
    """Parse a number, true, false, none or a list in brackets; anything else stays text."""
    text = text.strip()
    if text[:1] in OPENING and text[-1:] in CLOSING and text:
        return tuple(parse_value(item) for item in split_outside_brackets(text[1:-1], ","))
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for number in (int, float):
        try:
            # Python reads 0_1 as 1; here it is a name, such as a camera trap set.
            return text if "_" in text else number(text)
        except ValueError:
            continue
    return text


def split_outside_brackets(text: str, separator: str) -> list[str]:
    """Split at separators outside all brackets; empty pieces are left out."""
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
    """Parse 'name=value' texts into pairs sorted by name; refuse a name given twice."""
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise InputError(f"'{text}' is not an option: write name=value.")
        if name.strip() in options:
            raise InputError(f"The option '{name.strip()}' is given twice.")
        options[name.strip()] = parse_value(value)
    return tuple(sorted(options.items()))
