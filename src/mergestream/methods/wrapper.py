"""Methods that change the answers of another method, their base. What they take over from it is all here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from mergestream.methods.base import Method
from mergestream.methods.spelling import create_from_text
from mergestream.methods.state import State
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.runner import ExpertLogits
from mergestream.runtime.errors import InputError


@dataclass(frozen=True)
class WrapperState(State):
    """The base's state. A wrapper that carries something adds fields."""

    base: State = field(metadata={"prefix": "base_"})


W = TypeVar("W", bound=WrapperState)


@dataclass(kw_only=True, eq=False, repr=False)
class Wrapper(Method[W]):
    """A subclass defines `advance`, and `start` if it carries something. It adds no cost but its own."""

    base: str = "mean"  # any method with its options, as on the command line: 'ensemble(views=hflip)'

    def __post_init__(self) -> None:
        self._base = create_from_text(self.base, self.pool, inside=self.name)
        self.base = self._base.label()
        super().__post_init__()
        base = self._base
        if self.corrects_mix and base.corrects_mix:
            raise InputError(
                f"'{self.name}' and its base '{self.base}' both correct for the mix of classes: the same images would "
                f"count twice. Take one of them."
            )
        self.corrects_mix = self.corrects_mix or base.corrects_mix
        self.needs, self.asks_experts, self.looks_ahead = base.needs, base.asks_experts, base.looks_ahead
        self.capturable, self.takes_padding, self.period = base.capturable, base.takes_padding, base.period
        self.weights_follow_state = base.weights_follow_state

    def start(self) -> W:
        return WrapperState(self._base.start())  # type: ignore[return-value]

    def looked_ahead(self, state: W, expert_logits: ExpertLogits) -> W:
        return replace(state, base=self._base.looked_ahead(state.base, expert_logits))

    # --- taken over from the base ---------------------------------------------------------------------------

    def weights(self, state: W) -> Tensor | None:
        """The weights [P] of the network behind the answers; None where the base has no single one."""
        return self._base.weights(state.base)

    def merged_from(self, state: W) -> tuple[Tensor, ...]:
        return self._base.merged_from(state.base)

    def merge_into(self, state: W, out: Tensor) -> None:
        self._base.merge_into(state.base, out)

    def merged(self, state: W) -> Tensor:
        return self._base.merged(state.base)

    @property
    def reuses_weights(self) -> bool:
        return self._base.reuses_weights

    @property
    def held_from(self) -> tuple[Tensor, ...] | None:
        return self._base.held_from

    @held_from.setter
    def held_from(self, tensors: tuple[Tensor, ...] | None) -> None:
        self._base.held_from = tensors

    def asked_views(self) -> tuple[str, ...]:
        return self._base.asked_views()

    def require_statistics(self, pool: ExpertPool) -> None:
        self._base.require_statistics(pool)

    def source_hashes(self) -> dict[str, str]:
        return self._base.source_hashes()

    def wrapped(self) -> dict[str, Any]:
        described = self._base.provenance
        keys = ("method", "revision", "plugin", "options", "wrapped")
        return {key: described[key] for key in keys if key in described}

    def card_values(self) -> dict[str, Any]:
        return {**{f"base_{name}": value for name, value in self._base.card_values().items()}, **self.own_card_values()}

    def own_card_values(self) -> dict[str, Any]:
        """What the wrapper itself resolved from the experts' cards."""
        return {}
