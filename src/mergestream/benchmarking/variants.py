"""Methods with options, as a table spells them: 'mean, entropy_adaptive(head=shared|select, momentum=0.9)'."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from mergestream.errors import InputError, unknown_name
from mergestream.methods import METHODS

OPENING, CLOSING = "([", ")]"
WORDS = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class Variant:
    """A method and the options that are not left at their defaults."""

    method: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        told = ", ".join(f"{name}={_spelt(value)}" for name, value in self.options)
        return f"{self.method}({told})" if told else self.method


def parse_variants(text: str) -> tuple[Variant, ...]:
    """Methods separated by commas; values separated by | make a grid. 'all' is every method at its defaults."""
    variants: list[Variant] = []
    for item in _split(text, ","):
        variants += [Variant(name) for name in METHODS] if item == "all" else list(_grid(item))
    if not variants:
        raise InputError("No methods are named. Write for example --methods all, or --methods 'mean, ensemble'.")
    return tuple(dict.fromkeys(variants))


def _grid(item: str) -> Iterator[Variant]:
    found = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", item, flags=re.DOTALL)
    if not found:
        raise InputError(f"'{item.strip()}' is not a method. Write name, or name(option=value, option=this|that).")
    name, inside = found.groups()
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    choices = [_choices(name, option) for option in _split(inside or "", ",")]
    for picked in product(*choices):
        yield Variant(name, tuple(sorted(picked, key=lambda pair: pair[0])))


def _choices(method: str, option: str) -> list[tuple[str, Any]]:
    name, equals, values = option.partition("=")
    name = name.strip()
    if not equals:
        raise InputError(f"'{option.strip()}' in {method}(…) is not an option: write option=value.")
    if name not in METHODS[method].option_names():
        raise unknown_name(f"option of '{method}'", name, METHODS[method].option_names())
    found = [(name, parse_value(value)) for value in _split(values, "|")]
    if not found:
        raise InputError(f"The option '{name}' in {method}(…) has no value.")
    return found


def parse_value(text: str) -> Any:
    text = text.strip()
    if text[:1] in OPENING and text[-1:] in CLOSING and text:
        return tuple(parse_value(item) for item in _split(text[1:-1], ","))
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for number in (int, float):
        try:
            # Python reads 0_1 as 1; here it is a name, such as that of a trap set.
            return text if "_" in text else number(text)
        except ValueError:
            continue
    return text


def _split(text: str, separator: str) -> list[str]:
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


def _spelt(value: Any) -> str:
    return f"({', '.join(map(_spelt, value))})" if isinstance(value, tuple) else str(value)
