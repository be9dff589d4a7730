"""Checks of options that several methods share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mergestream.errors import InputError, unknown_name
from mergestream.pool import ExpertPool


def one_of(option: str, value: str, allowed: Sequence[str]) -> str:
    if value not in allowed:
        raise unknown_name(f"choice for '{option}'", value, allowed)
    return value


def resolve_temperature(temperature: float | Sequence[float] | str, pool: ExpertPool) -> Tensor:
    """tau_e as a tensor [K]: one number for all, one per expert, or 'card' for those in the experts' cards."""
    if isinstance(temperature, str):
        one_of("temperature", temperature, ("card",))
        return pool.temperatures
    values = torch.as_tensor(temperature, dtype=torch.float32, device=pool.device)
    if values.ndim and len(values) != len(pool):
        raise InputError(f"Give one temperature, or {len(pool)}: one per expert; got {len(values)}.")
    if not bool(torch.isfinite(values).all()) or not bool((values > 0).all()):
        raise InputError(f"A temperature must be finite and above 0, got {temperature}.")
    return values.expand(len(pool))
