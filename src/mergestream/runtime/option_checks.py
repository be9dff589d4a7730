"""Option values: read from the command line (numbers, words, lists in brackets), and checked by kind and range."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from numbers import Integral, Real
from typing import Any
from urllib.parse import urlsplit

from mergestream.runtime.errors import InputError, UnknownNameError, require_known, suggestion

OPENING, CLOSING = "([", ")]"
WORDS = {"true": True, "false": False, "none": None}


def option(default: Any, check: Callable[..., Any], *arguments: Any, later: bool = False, **bounds: Any) -> Any:
    """An option with its default, whose values pass through check(name, value, *arguments, **bounds).

    `later`: records older than the option name none, so no record names it where it has its default.
    """
    checks = {"check": lambda name, value: check(name, value, *arguments, **bounds), "later": later}
    return field(default=default, metadata=checks)


def one_of(option: str, value: str, allowed: Sequence[str]) -> str:
    if not isinstance(value, str):
        raise InputError(f"The option '{option}' is one of {', '.join(allowed)}; got {value!r}.")
    if value not in allowed:
        raise UnknownNameError(f"'{value}' is not a choice for '{option}'. {suggestion(value, allowed)}")
    return value


def number(
    option: str,
    value: float,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    above: float = -math.inf,
    below: float = math.inf,
) -> float:
    """Check for a finite number within bounds: low and high are inclusive, above and below exclusive."""
    result = _as_float(value)
    if not math.isfinite(result) or not low <= result <= high or not above < result < below:
        limits = {"of at least": low, "of at most": high, "above": above, "below": below}
        bounds = [f"{word} {limit:g}" for word, limit in limits.items() if math.isfinite(limit)]
        text = " ".join(["a finite number", " and ".join(bounds)]).strip()
        raise InputError(f"The option '{option}' is {text}; got {value!r}.")
    return result


def _as_float(value: Any) -> float:
    """A number of Python or numpy; NaN for anything else."""
    try:
        return math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        return math.inf


def whole_number(option: str, value: Any, *, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) < 2**63:
        raise InputError(f"The option '{option}' is a whole number of at least {low}; got {value!r}.")
    return int(value)


def yes_or_no(option: str, value: bool) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"The option '{option}' is True or False; got {value!r}.")
    return value


def names(option: str, value: Sequence[str]) -> tuple[str, ...]:
    listed = (value,) if isinstance(value, str) else value
    if not isinstance(listed, list | tuple) or not all(isinstance(name, str) for name in listed):
        raise InputError(f"The option '{option}' is a list of names; got {value!r}.")
    if len(set(listed)) != len(listed):
        raise InputError(f"The option '{option}' names something twice: {list(listed)}.")
    return tuple(listed)


def is_http_url(value: Any, *, with_user: bool = False) -> bool:
    """Whether a value is a URL by http or https that names a host, and no user unless that is allowed."""
    try:
        parts = urlsplit(value) if isinstance(value, str) and not set(value) & set(" \t\r\n") else urlsplit("")
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and (with_user or parts.username is None)


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


def parse_choices(text: str, owner: str, allowed: Sequence[str]) -> tuple[str, list[Any]]:
    """Parse 'name=this|that' into the name of an option of `owner` and its values."""
    name, equals, values = (part.strip() for part in text.partition("="))
    if not equals:
        raise InputError(f"'{name}' is not an option of {owner}: write option=value.")
    require_known(f"option of {owner}", name, allowed)
    choices = [parse_value(value) for value in split_outside_brackets(values, "|")]
    if not choices:
        raise InputError(f"The option '{name}' of {owner} has no value.")
    return name, choices


def parse_options(texts: Sequence[str] | Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Pairs sorted by name from 'name=value' texts or from a mapping; refuse a name given twice."""
    if isinstance(texts, Mapping):
        return tuple(sorted((name, tuple(v) if isinstance(v, list) else v) for name, v in texts.items()))
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise InputError(f"'{text}' is not an option: write name=value.")
        if name.strip() in options:
            raise InputError(f"The option '{name.strip()}' is given twice.")
        options[name.strip()] = parse_value(value)
    return tuple(sorted(options.items()))


def parse_numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    """Parse '0.5,0.3,0.2'; None stays None."""
    try:
        return None if text is None else tuple(map(float, text.split(",")))
    except ValueError:
        raise InputError(f"{option} is numbers with commas between, as in 0.5,0.3,0.2; got {text!r}.") from None


def plain(value: Any) -> Any:
    """A value of an option in a form JSON can hold."""
    listed = value.tolist() if hasattr(value, "tolist") else value
    return [plain(item) for item in listed] if isinstance(listed, tuple | list) else listed
