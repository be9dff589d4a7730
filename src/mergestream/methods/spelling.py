"""Methods as texts, `name(option=value)`: one grammar for the command line, for tables and for bases of wrappers."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from mergestream.runtime.errors import InputError, MergestreamError, unknown_name
from mergestream.runtime.option_checks import parse_choices, split_outside_brackets

if TYPE_CHECKING:
    from mergestream.methods.base import Method
    from mergestream.pool.expert_pool import ExpertPool
    from mergestream.runtime.open_table import OpenTable

BASE_OPTION = "base"  # the option of a wrapper that is a method itself
# Other names of a method with options. The paper's rule has a moving average; its one tau is that of Eq. 3 and of
# Eq. 9, here `temperature` and `head_sharpness`, both 1. It prints no value of mu: 0.9 is ours.
PRESETS: dict[str, tuple[str, dict[str, Any]]] = {"paper": ("entropy_adaptive", {"momentum": 0.9})}
REPLACED = {"prior_adaptive": "merge_and_fit"}  # old runs with these names can still be read


@dataclass(frozen=True)
class Variant:
    """A method and the options that are not left at their defaults."""

    method: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        # A base comes first and needs no name: lame(mean, k=3).
        parts = [str(value) for name, value in self.options if name == BASE_OPTION]
        parts += [f"{name}={_spelt(value)}" for name, value in self.options if name != BASE_OPTION]
        return f"{self.method}({', '.join(parts)})" if parts else self.method

    @property
    def innermost(self) -> str:
        """The name of the method at the bottom of all wrappers."""
        base = dict(self.options).get(BASE_OPTION, default_base(self.method))
        return self.method if base is None else parse_variant(base).innermost


def _spelt(value: Any) -> str:
    return f"({', '.join(map(_spelt, value))})" if isinstance(value, tuple | list) else str(value)


def parse_variants(text: str) -> tuple[Variant, ...]:
    """Methods separated by commas; values separated by | make a grid. 'all' is every method at its defaults."""
    variants: list[Variant] = []
    for item in split_outside_brackets(text, ","):
        variants += [Variant(name) for name in _methods().usable()] if item.strip() == "all" else list(_grid(item))
    if not variants:
        raise InputError("No methods are named. Write for example --methods all, or --methods 'mean, ensemble'.")
    return tuple(dict.fromkeys(variants))


def parse_variant(text: Any, *, inside: str | None = None) -> Variant:
    """One method with its options, which may not hold the method `inside` which it stands."""
    if not isinstance(text, str):
        raise InputError(f"A base is written as a text, such as 'mean' or 'ensemble(views=hflip)'; got {text!r}.")
    variants = list(_grid(text, () if inside is None else (inside,)))
    if len(variants) != 1:
        raise InputError(f"'{text}' stands for {len(variants)} methods; name one.")
    return variants[0]


def create_from_text(text: str, pool: "ExpertPool", *, inside: str) -> "Method[Any]":
    """Create a wrapper's base."""
    from mergestream.methods import create_method

    variant = parse_variant(text, inside=inside)
    return create_method(variant.method, pool, **dict(variant.options))


def default_base(method: str) -> str | None:
    """The base that a wrapper has by default; None where the method is no wrapper."""
    parameter = _methods()[method]._parameters().get(BASE_OPTION)
    return None if parameter is None else str(parameter.default)


def unknown_method(name: str) -> MergestreamError:
    """The error for a method that does not exist, or no longer."""
    if name in REPLACED:
        return InputError(f"The method '{name}' of version 0.1 is gone; use '{REPLACED[name]}' instead.")
    return unknown_name("method", name, _methods())


def _methods() -> "OpenTable[type[Method[Any]]]":
    from mergestream.methods import METHODS  # the table holds the wrappers, which need this grammar

    return METHODS


def _grid(item: str, outside: tuple[str, ...] = ()) -> Iterator[Variant]:
    """All combinations of the listed values of one method, which stands inside others."""
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", item, flags=re.DOTALL)
    if not match:
        raise InputError(f"'{item.strip()}' is not a method. Write name, or name(option=value, option=this|that).")
    name, inside = match.groups()
    name, preset = PRESETS.get(name, (name, {}))
    if name not in _methods():
        raise unknown_method(name)
    if name in outside:
        raise InputError(f"'{name}' cannot be its own base.")
    choices: dict[str, list[tuple[str, Any]]] = {}
    for place, text in enumerate(split_outside_brackets(inside or "", ",")):
        option, values = _option(name, text, place, outside)
        if option in choices:
            raise InputError(f"The option '{option}' of '{name}' is given twice.")
        choices[option] = [(option, value) for value in values]
    choices = {option: [(option, value)] for option, value in preset.items()} | choices
    for picked in product(*choices.values()):
        yield Variant(name, tuple(sorted(picked, key=lambda pair: pair[0])))


def _option(name: str, text: str, place: int, outside: tuple[str, ...]) -> tuple[str, list[Any]]:
    """Name and values of one option; the first may be a base without its name."""
    allowed = _methods()[name].option_names()
    if place == 0 and BASE_OPTION in allowed and not re.match(r"\s*\w+\s*=", text):
        text = f"{BASE_OPTION}={text}"
    option, values = parse_choices(text, f"'{name}'", allowed)
    if option == BASE_OPTION:
        values = [str(variant) for value in values for variant in _grid(str(value), (*outside, name))]
    return option, values
