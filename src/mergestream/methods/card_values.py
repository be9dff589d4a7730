"""Values that methods read from the experts' cards: temperatures, and the mix of classes at home."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mergestream.pool.expert_card import ExpertCard
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError, PoolError
from mergestream.runtime.option_checks import number, one_of


def resolve_temperature(temperature: float | Sequence[float] | str, pool: ExpertPool) -> Tensor:
    """tau_e as a tensor [K]: one number for all, one per expert, or 'card' for those in the experts' cards."""
    if isinstance(temperature, str):
        one_of("temperature", temperature, ("card",))
        # Without an error at home the best temperature is 0 at any scale of logits: it tells nothing.
        faultless = torch.tensor([card.validation("accuracy") == 1 for card in pool.cards], device=pool.device)
        return torch.where(faultless, pool.temperatures.clamp_min(1.0), pool.temperatures)
    try:
        values = torch.as_tensor(temperature, dtype=torch.float32, device=pool.device)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"A temperature is a number, one per expert, or 'card'; got {temperature!r}.") from None
    if values.ndim and len(values) != len(pool):
        raise InputError(f"Give one temperature, or {len(pool)}: one per expert; got {len(values)}.")
    if not bool(torch.isfinite(values).all()) or not bool((values > 0).all()):
        raise InputError(f"A temperature must be finite and above 0, got {temperature}.")
    return values.expand(len(pool))


def resolve_home(home: str | Sequence[float], pool: ExpertPool) -> Tensor:
    """The mix of classes [C] that experts answer with at home: given, uniform, or the mean over their cards.

    A card's mix is the expert's mean probabilities on its own validation split, or its class counts where it has none.
    Without any card the mix is uniform.
    """
    if isinstance(home, str):
        mixes = [_home_of(card) for card in pool.cards] if one_of("home", home, ("card", "uniform")) == "card" else []
        shares = [[mix.get(name, 0.0) for name in pool.classes] for mix in mixes if mix]
        values = torch.tensor(shares or [[1.0] * len(pool.classes)], dtype=torch.float32)
        return (values / values.sum(dim=1, keepdim=True)).mean(dim=0)
    listed = [number("home", value, low=0) for value in home]
    if len(listed) != len(pool.classes) or not sum(listed) > 0:
        raise InputError(f"The option 'home' is one share for each of the {len(pool.classes)} classes; got {home!r}.")
    return torch.tensor(listed, dtype=torch.float32)


def resolve_confusion(pool: ExpertPool) -> Tensor:
    """How often class i was answered (row) to an image of class j (column) [C,C], at the experts' own validation.

    A class that no site had in its validation images counts as always recognised.
    """
    tables = {card.name: (card.metrics.get("validation") or {}).get("confusion") or [] for card in pool.cards}
    lacking = [name for name, table in tables.items() if not table]
    if lacking:
        raise PoolError(
            f"method='bbse' needs the confusion matrix of every expert on its own validation images, and the cards of "
            f"{', '.join(lacking)} have none. 'mergestream train' writes it; or use method='em', which needs none."
        )
    size = len(pool.classes)
    for name, table in tables.items():
        if len(table) != size or any(len(row) != size for row in table):
            raise PoolError(f"The confusion matrix in the card of '{name}' must have {size} rows of {size} counts.")
    counts = torch.tensor(list(tables.values()), dtype=torch.float32).sum(dim=0)  # truth by row
    images = counts.sum(dim=1, keepdim=True)
    shares = torch.where(images > 0, counts / images.clamp_min(1.0), torch.eye(size))
    return shares.T.contiguous().to(pool.device)


def resolve_base_head(base_head: str, pool: ExpertPool) -> str:
    """'saved' or 'zero'; 'auto' is 'zero' where a card says that the experts' heads started apart."""
    if base_head != "auto":
        return base_head
    apart = any(str(card.recipe.get("head_init")).startswith("independent") for card in pool.cards)
    return "zero" if apart else "saved"


def variance_between_sites(pool: ExpertPool) -> Tensor:
    """The variance of the classes' log-odds [C] between the experts' sites, by the class counts in their cards.

    Few sites say little about a variance, so one more site is thought of, whose log-odds are off by 1.
    """
    counts = [[card.class_counts.get(name, 0) for name in pool.classes] for card in pool.cards if card.class_counts]
    if not counts:
        return torch.ones(len(pool.classes), device=pool.device)
    logs = (torch.tensor(counts, dtype=torch.float32) + 0.5).log()
    odds = logs - logs.mean(dim=1, keepdim=True)
    return (((odds - odds.mean(dim=0)).square().sum(dim=0) + 1) / len(odds)).to(pool.device)


def _home_of(card: ExpertCard) -> dict[str, float]:
    validation: Any = card.metrics.get("validation")
    mean = validation.get("mean_probability") if isinstance(validation, dict) else None
    mix = mean if isinstance(mean, dict) and sum(mean.values()) > 0 else card.class_counts
    return dict(mix) if sum(mix.values()) > 0 else {}
