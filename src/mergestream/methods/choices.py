"""Checks of options that several methods share."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mergestream.errors import InputError, unknown_name
from mergestream.pool import ExpertPool


def one_of(option: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise unknown_name(f"choice for '{option}'", value, allowed)
    return value


def number(
    option: str, value: float, *, low: float = -math.inf, above: float = -math.inf, below: float = math.inf
) -> float:
    """A finite number within bounds."""
    plain = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not plain or not math.isfinite(value) or value < low or value <= above or value >= below:
        bounds = [f"at least {low}"] * (low > -math.inf) + [f"above {above}"] * (above > -math.inf)
        bounds += [f"below {below}"] * (below < math.inf)
        raise InputError(f"The option '{option}' is a finite number {' and '.join(bounds)}; got {value!r}.")
    return float(value)


def whole_number(option: str, value: int, *, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
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
    return tuple(listed)


def resolve_temperature(temperature: float | Sequence[float] | str, pool: ExpertPool) -> Tensor:
    """tau_e as a tensor [K]: one number for all, one per expert, or 'card' for those in the experts' cards."""
    if isinstance(temperature, str):
        one_of("temperature", temperature, ("card",))
        return pool.temperatures
    try:
        values = torch.as_tensor(temperature, dtype=torch.float32, device=pool.device)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"A temperature is a number, one per expert, or 'card'; got {temperature!r}.") from None
    if values.ndim and len(values) != len(pool):
        raise InputError(f"Give one temperature, or {len(pool)}: one per expert; got {len(values)}.")
    if not bool(torch.isfinite(values).all()) or not bool((values > 0).all()):
        raise InputError(f"A temperature must be finite and above 0, got {temperature}.")
    return values.expand(len(pool))


def resolve_lambda(value: float | Sequence[float] | str, experts: int, *, single: bool = False) -> list[float]:
    """What each task vector is multiplied by: a number for all, '1/K', or (unless `single`) one number per expert."""
    if isinstance(value, str):
        one_of("lambda", value, ("1/K",))
        return [1 / experts] * experts
    if not isinstance(value, list | tuple):
        return [number("lambda", value)] * experts  # type: ignore[arg-type]
    if single or len(value) != experts:
        wanted = "one number or '1/K'" if single else f"one number, '1/K', or {experts}: one per expert"
        raise InputError(f"The option 'lambda' is {wanted}; got {value!r}.")
    return [number("lambda", each) for each in value]
