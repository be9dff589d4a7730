"""Methods that weigh the experts' answers: at a temperature, and over the classes that each expert saw."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mergestream.methods.base import Method
from mergestream.methods.card_values import resolve_temperature
from mergestream.methods.seen_classes import SeenClasses
from mergestream.methods.state import S
from mergestream.networks.preprocessing import ORIGINAL
from mergestream.pool.runner import Batch


@dataclass(kw_only=True, eq=False, repr=False)
class AskedExperts(Method[S]):
    asks_experts = True
    temperature: float | Sequence[float] | str = 1.0  # in scores, as in `entropy_adaptive`

    def __post_init__(self) -> None:
        super().__post_init__()
        self._temperature, self._seen = resolve_temperature(self.temperature, self.pool), SeenClasses.of(self.pool)

    def ask(self, batch: Batch) -> Tensor:
        """The experts' logits [K,B,C]."""
        return self.pool.logits_of_views(batch)[ORIGINAL]

    def card_values(self) -> dict[str, Any]:
        own = {"temperature": self._temperature.tolist()} if isinstance(self.temperature, str) else {}
        return {**own, **self._seen.card_values()}
