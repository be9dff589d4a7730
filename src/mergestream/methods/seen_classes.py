"""Which classes each expert saw, by its card: an expert has no say on a class that it never saw."""

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from mergestream.functional import partial_votes
from mergestream.functional import scores as scoring
from mergestream.pool.expert_pool import ExpertPool


@dataclass(frozen=True)
class SeenClasses:
    """Votes of a pool's experts. `mask` [K,C] is None where, by the cards, every expert saw every class.

    A card without counts says nothing, so its expert votes on all classes; a class that nobody saw stays as it is.
    """

    mask: Tensor | None

    @classmethod
    def of(cls, pool: ExpertPool) -> "SeenClasses":
        rows = []
        for card in pool.cards:
            counts = [card.class_counts.get(name, 0) > 0 for name in pool.classes]
            rows.append(counts if any(counts) else [True] * len(counts))
        seen = torch.tensor(rows)
        seen = seen | ~seen.any(dim=0)
        return cls(None if bool(seen.all()) else seen.to(pool.device))

    def filled(self, logits: Tensor) -> Tensor:
        """Experts' logits [K,B,C], those of unseen classes replaced by what the other experts say."""
        return logits if self.mask is None else partial_votes.filled(logits, self.mask, self._alignment)

    def score(self, kind: str) -> scoring.Score:
        """One of `scoring.SCORES`, over the classes that each expert saw."""
        if self.mask is None:
            return scoring.SCORES[kind]
        return partial(partial_votes.scores, kind, self.mask)

    def masked(self, logits: Tensor) -> Tensor:
        """Experts' logits [K,B,C], -inf for classes that an expert did not see."""
        return logits if self.mask is None else partial_votes.masked(logits, self.mask)

    def image_entropies(self, logits: Tensor, temperature: Tensor) -> Tensor:
        """Entropies [K,B] of the experts' answers to single images, over the classes that each saw."""
        if self.mask is None:
            return scoring.image_entropy(logits, temperature)
        return partial_votes.image_entropies(logits, self.mask, temperature)

    def card_values(self) -> dict[str, Any]:
        return {} if self.mask is None else {"seen_classes": self.mask.tolist()}

    @cached_property
    def _alignment(self) -> Tensor:
        assert self.mask is not None
        return partial_votes.alignment(self.mask.cpu()).to(self.mask.device)
