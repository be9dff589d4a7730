"""Options that several methods share and that need the pool to be understood."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergestream.errors import InputError
from mergestream.options import number, one_of
from mergestream.pool import ExpertPool


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


def resolve_lambda(value: Any, experts: int, *, single: bool = False) -> list[float]:
    """What each task vector is multiplied by: a number for all, '1/K', or (unless `single`) one number per expert."""
    if isinstance(value, str) and value == "1/K":
        return [1 / experts] * experts
    listed: Any = value.tolist() if isinstance(value, Tensor | np.ndarray) else value
    several = isinstance(listed, list | tuple)
    if isinstance(listed, str) or (several and (single or len(listed) != experts)):
        wanted = "one number or '1/K'" if single else f"one number, '1/K', or {experts}: one per expert"
        raise InputError(f"The option 'lambda' is {wanted}; got {value!r}.")
    return [number("lambda", each) for each in (listed if several else [listed] * experts)]
