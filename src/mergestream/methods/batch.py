"""One batch on its way through a method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from mergestream.networks.preprocessing import ORIGINAL
from mergestream.pool.expert_pool import ExpertPool

ExpertLogits = Mapping[str, Tensor]  # [K,B,C] by the name of the view, the unaltered batch as ORIGINAL


@dataclass
class Batch:
    """Prepared images [B,c,H,W], and the experts' logits on them, computed when first needed and shared by all.

    `shares` [B] say what each image counts where the batch is padded; they sum to 1, and padding counts 0.
    """

    pool: ExpertPool
    images: Tensor
    expert_logits: dict[str, Tensor] = field(default_factory=dict)
    shares: Tensor | None = None

    @classmethod
    def of(cls, pool: ExpertPool, images: Tensor, expert_logits: ExpertLogits) -> Batch:
        """Prepare a batch as users give it: pixels or prepared images, and logits computed before."""
        moved = {view: logits.to(pool.device) for view, logits in expert_logits.items()}
        return cls(pool, pool.prepare(images), moved)

    def logits(self, views: Sequence[str] = ()) -> dict[str, Tensor]:
        """Every expert's logits [K,B,C], at least of the batch as it is ('original') and of the named views of it."""
        missing = []
        for view in (ORIGINAL, *views):
            if view not in self.expert_logits:
                missing.append(view)
        if missing:  # all at once: one forward per expert where a step is recorded
            self.expert_logits |= self.pool.logits_of_views(self.images, missing)
        return self.expert_logits
