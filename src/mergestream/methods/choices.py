"""Options that several methods share and that need the pool to be understood."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergestream.functional import class_mix
from mergestream.pool.expert_card import ExpertCard
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError
from mergestream.runtime.option_checks import number, one_of

NO_TILT = 1e-4  # log-odds: what rounding leaves of even classes


def resolve_temperature(temperature: float | Sequence[float] | str, pool: ExpertPool) -> Tensor:
    """tau_e as a tensor [K]: one number for all, one per expert, or 'card' for those in the experts' cards."""
    if isinstance(temperature, str):
        one_of("temperature", temperature, ("card",))
        # Without an error at home the best temperature is 0, whatever the scale: it says nothing, and would say "sure".
        unsaid = torch.tensor([_never_erred(card) for card in pool.cards], device=pool.device)
        return torch.where(unsaid, pool.temperatures.clamp_min(1.0), pool.temperatures)
    try:
        values = torch.as_tensor(temperature, dtype=torch.float32, device=pool.device)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"A temperature is a number, one per expert, or 'card'; got {temperature!r}.") from None
    if values.ndim and len(values) != len(pool):
        raise InputError(f"Give one temperature, or {len(pool)}: one per expert; got {len(values)}.")
    if not bool(torch.isfinite(values).all()) or not bool((values > 0).all()):
        raise InputError(f"A temperature must be finite and above 0, got {temperature}.")
    return values.expand(len(pool))


def _never_erred(card: ExpertCard) -> bool:
    return bool(_on_validation(card, "accuracy") == 1)


def _on_validation(card: ExpertCard, metric: str) -> Any:
    validation = card.metrics.get("validation", {})
    return validation.get(metric) if isinstance(validation, dict) else None


def resolve_home(home: str | Sequence[float], pool: ExpertPool) -> Tensor:
    """The mix of classes [C] that experts answer with at home: given, uniform, or the mean over their cards.

    A card tells it by the mean probabilities on the expert's own validation split; else its class counts stand for
    them. Where no card tells anything it is uniform.
    """
    if isinstance(home, str):
        one_of("home", home, ("card", "uniform"))
        known = [_home_of(card) for card in pool.cards] if home == "card" else []
        return _mean_mix(known, pool)
    listed = [number("home", value, low=0) for value in home]
    if len(listed) != len(pool.classes) or not sum(listed) > 0:
        raise InputError(f"The option 'home' is one share for each of the {len(pool.classes)} classes; got {home!r}.")
    return torch.tensor(listed, dtype=torch.float32)


def resolve_tilt(home: str | Sequence[float], pool: ExpertPool) -> Tensor | None:
    """Log-odds [C] that class-weighted losses took from the classes: added to logits, answers count as shares again.

    Of the cards' class counts, the mean over the experts, centred; a class that an expert lacks is left. Where another
    home is given, answers are to count as shares there. None where no card tells of such a loss, or it took nothing.
    """
    if _is_card(home):
        tilt = torch.stack([_tilt_of(card, pool.classes) for card in pool.cards]).mean(dim=0)
    else:
        logs = class_mix.as_mix(resolve_home(home, pool)).log()
        tilt = (logs - logs.mean()) * sum(_is_weighted(card) for card in pool.cards) / len(pool)
    return tilt if bool(tilt.abs().max() > NO_TILT) else None


def resolve_untilted_home(home: str | Sequence[float], pool: ExpertPool) -> Tensor:
    """The mix [C] that answers at home have once weights of losses are taken off: the classes' own, by their counts."""
    if not _is_card(home):
        return resolve_home(home, pool)
    told = [_is_weighted(card) and sum(card.class_counts.values()) > 0 for card in pool.cards]
    known = [card.class_counts if counts else _home_of(card) for card, counts in zip(pool.cards, told, strict=True)]
    return _mean_mix(known, pool)


def _is_card(home: str | Sequence[float]) -> bool:
    return isinstance(home, str) and home == "card"


def _is_weighted(card: ExpertCard) -> bool:
    return card.recipe.get("loss") == "weighted"


def _tilt_of(card: ExpertCard, classes: Sequence[str]) -> Tensor:
    counts = torch.tensor([float(card.class_counts.get(name, 0)) for name in classes])
    there = counts > 0
    if not _is_weighted(card) or not bool(there.any()):
        return torch.zeros_like(counts)
    logs = counts.clamp_min(1).log()
    return torch.where(there, logs - logs[there].mean(), 0.0)


def _mean_mix(mixes: Iterable[Mapping[str, float]], pool: ExpertPool) -> Tensor:
    shares = [[mix.get(name, 0.0) for name in pool.classes] for mix in mixes if mix]
    values = torch.tensor(shares or [[1.0] * len(pool.classes)], dtype=torch.float32)
    return (values / values.sum(dim=1, keepdim=True)).mean(dim=0)


def _home_of(card: ExpertCard) -> dict[str, float]:
    told = _on_validation(card, "mean_probability")
    mix = told if isinstance(told, dict) and sum(told.values()) > 0 else card.class_counts
    return dict(mix) if sum(mix.values()) > 0 else {}


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
