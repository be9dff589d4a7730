"""One batch on its way through a method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from mergestream.networks.views import ORIGINAL
from mergestream.pool.expert_pool import ExpertPool

ExpertLogits = Mapping[str, Tensor]  # [K,B,C] by the name of the view, the unaltered batch as ORIGINAL


class Batch:
    """Prepared images [B,c,H,W], and the experts' logits on them, computed when first needed and shared by all.

    `shares` [B] say what each image counts where the batch is padded; they sum to 1, and padding counts 0.
    """

    def __init__(
        self, pool: ExpertPool, images: Tensor, expert_logits: ExpertLogits | None = None, shares: Tensor | None = None
    ) -> None:
        self.images, self.shares = images, shares
        self._pool = pool
        self._logits = {view: logits.to(pool.device) for view, logits in (expert_logits or {}).items()}

    def logits(self, views: Sequence[str] = ()) -> dict[str, Tensor]:
        """Every expert's logits [K,B,C] of the batch as it is ('original') and of the named views of it."""
        names = (ORIGINAL, *views)
        if not self._logits:  # all together: one forward per expert where a step is recorded
            self._logits = self._pool.logits_of_views(self.images, views)
        for name in names:
            if name not in self._logits:
                self._logits[name] = self._pool.logits(self.images, None if name == ORIGINAL else name)
        return {name: self._logits[name] for name in names}

    @property
    def has_logits(self) -> bool:
        """Whether the experts' logits on the batch as it is are there already."""
        return ORIGINAL in self._logits
