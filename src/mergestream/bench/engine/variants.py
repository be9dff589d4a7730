"""Methods with options, as a table spells them: 'mean, entropy_adaptive(head=shared|select, momentum=0.9)'."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from mergestream.methods import METHODS
from mergestream.runtime.errors import InputError, unknown_name
from mergestream.runtime.option_checks import parse_value, split_outside_brackets


@dataclass(frozen=True)
class Variant:
    """A method and the options that are not left at their defaults."""

    method: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        options = ", ".join(f"{name}={_spelt(value)}" for name, value in self.options)
        return f"{self.method}({options})" if options else self.method


def parse_variants(text: str) -> tuple[Variant, ...]:
    """Methods separated by commas; values separated by | make a grid. 'all' is every method at its defaults."""
    variants: list[Variant] = []
    for item in split_outside_brackets(text, ","):
        variants += [Variant(name) for name in METHODS] if item == "all" else list(_grid(item))
    if not variants:
        raise InputError("No methods are named. Write for example --methods all, or --methods 'mean, ensemble'.")
    return tuple(dict.fromkeys(variants))


def _grid(item: str) -> Iterator[Variant]:
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", item, flags=re.DOTALL)
    if not match:
        raise InputError(f"'{item.strip()}' is not a method. Write name, or name(option=value, option=this|that).")
    name, inside = match.groups()
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    choices = [_choices(name, option) for option in split_outside_brackets(inside or "", ",")]
    for picked in product(*choices):
        yield Variant(name, tuple(sorted(picked, key=lambda pair: pair[0])))


def _choices(method: str, option: str) -> list[tuple[str, Any]]:
    name, equals, values = option.partition("=")
    name = name.strip()
    if not equals:
        raise InputError(f"'{option.strip()}' in {method}(…) is not an option: write option=value.")
    if name not in METHODS[method].option_names():
        raise unknown_name(f"option of '{method}'", name, METHODS[method].option_names())
    choices = [(name, parse_value(value)) for value in split_outside_brackets(values, "|")]
    if not choices:
        raise InputError(f"The option '{name}' in {method}(…) has no value.")
    return choices


def _spelt(value: Any) -> str:
    return f"({', '.join(map(_spelt, value))})" if isinstance(value, tuple) else str(value)
