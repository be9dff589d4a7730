"""Graphs outlive the pool they were recorded on: the next pool of the same make pours its weights into theirs."""

from __future__ import annotations

import json
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mergestream.methods.captured import Captured, Way

if TYPE_CHECKING:
    from mergestream.methods.base import Method

# Of one make; each holds a bank of its own.
MOST_IDLE = 1
_idle: dict[str, list[Captured]] = defaultdict(list)
_met: dict[str, Callable[[], Tensor | None]] = {}  # by make, the bank that its first method is on, while it lives


def lease(method: Method, way: Way) -> Captured:
    """Graphs for a method: on its own pool where that is the first of its make, else on weights that are lent.

    So one pool never lies in memory twice, however many streams it answers, and a leave-one-out loop over pools
    records twice, not for every pool.
    """
    make, bank = _make(method), method.pool.bank
    if not method.portable or make not in _met or _met[make]() is bank:
        _met.setdefault(make, weakref.ref(bank))
        return Captured(way)
    captured = _idle[make].pop() if _idle[make] else Captured(way, _copy(method))
    assert captured.lent is not None
    captured.lent.pool.bank.copy_(bank)
    captured.forget()
    weakref.finalize(method, _give_back, make, captured)
    return captured


def free() -> None:
    """Let go of all graphs that nobody uses, and of their memory."""
    _idle.clear()
    _met.clear()


def _give_back(make: str, captured: Captured) -> None:
    captured.forget()
    if len(_idle[make]) < MOST_IDLE:
        _idle[make].append(captured)


def _copy(method: Method) -> Method:
    pool = method.pool._with(bank=torch.empty_like(method.pool.bank))
    parameters = {name: getattr(method, name) for name in method._parameters()}
    return type(method)(pool, **parameters)


def _make(method: Method) -> str:
    """What two methods must have in common to share graphs: all but the experts' weights and names."""
    pool, options = method.pool, method.options()
    temperatures = [card.temperature for card in pool.cards] if options.get("temperature") == "card" else None
    described = {
        "method": method.name,
        "options": options,
        "network": pool.template.describe(),
        "experts": len(pool),
        "size": pool.layout.size,
        "classes": len(pool.classes),
        "device": str(pool.device),
        "dtype": str(pool.bank.dtype),
        "execution": vars(pool.execution),
        "temperatures": temperatures,
        "integers": [{name: tensor.tolist() for name, tensor in own.items()} for own in pool.integers],
    }
    return json.dumps(described, sort_keys=True, default=str)
