"""What methods share that answer with one merged network: its weights [P], rebuilt only when they change."""

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from mergestream.functional import coefficients as simplex
from mergestream.functional.merging import Rows, weighted_sum
from mergestream.functional.scores import require_finite
from mergestream.methods.base import ExpertLogits, Method
from mergestream.methods.seen import HeadRows
from mergestream.methods.step import Step
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import PoolError
from mergestream.runtime.option_checks import one_of, yes_or_no

BASE_HEADS = ("saved", "zero")


class MergedModel(Method):
    """Options of all of them:

    head_rows        'all', or 'seen': a class's head row is averaged over the experts that saw the class
    recalibrate_bn   re-estimate BatchNorm statistics of the merged model from each batch (one more forward)

    A subclass writes parameters in `_merge`; one that learns from the stream does so in `_observe`. Floating buffers
    are averaged here, by the project's one rule for all methods.
    """

    def __init__(
        self, pool: ExpertPool, *, head_rows: str, recalibrate_bn: bool, members: ExpertPool | None = None
    ) -> None:
        """members: the pool whose rows are merged, where they are not the experts' own."""
        super().__init__(pool)
        self._members = members or pool
        self.head_rows = head_rows
        self._rows_of = HeadRows(self._members, head_rows)
        self.recalibrate_bn = yes_or_no("recalibrate_bn", recalibrate_bn)
        # Re-estimated BatchNorm statistics depend on the batch, and so does the model.
        self.static = not self._learns and not recalibrate_bn  # type: ignore[misc]
        self._weights = pool.new_weights()
        self._stale = True

    @property
    def _learns(self) -> bool:
        """Whether the stream changes the merged weights."""
        return False

    @cached_property
    def _rows(self) -> Rows:
        """The members' weights, with unseen head rows filled in if that was asked for."""
        return self._rows_of()

    @abstractmethod
    def _merge(self, out: Tensor) -> None:
        """Write the merged parameters into out [P]."""

    def _observe(self, images: Tensor) -> None:
        """Learn from a prepared batch before answering it; mark the weights stale if they change."""

    def _told(self) -> dict[str, Any]:
        """What a step says beside its logits."""
        return {}

    def _buffer_coefficients(self) -> Tensor:
        return simplex.uniform(len(self._members), self._members.device)

    def _step(self, images: Tensor, expert_logits: ExpertLogits) -> Step:  # noqa: ARG002
        if self._learns:
            with self.pool.input_errors(images):
                self._observe(require_finite(images, "The input"))
        logits = self._members.forward(self.merged_weights(), images, recalibrate_bn=self.recalibrate_bn)
        return Step(logits, **self._told())

    def _capturable(self) -> bool:
        # Its first batch is taken eagerly, and merges; what follows is a forward pass of weights that stay.
        return self.static and not self._stale and self._members is self.pool

    def _takes_padding(self) -> bool:
        return True  # every image is answered for itself

    @torch.no_grad()
    def merged_weights(self) -> Tensor:
        """The merged weights [P] in use, not a copy."""
        if self._stale:
            self._merge(self._weights)
        if self._stale or self.recalibrate_bn:  # the last batch's estimate has overwritten them
            self._average_buffers()
        self._stale = False
        return self._weights

    def network(self) -> nn.Module:
        """The merged model in use as an ordinary frozen module with weights of its own, in eval mode."""
        return self._members.network_with(self.merged_weights())

    def _average_buffers(self) -> None:
        span = self._members.layout.buffers
        if span.start < span.stop:
            rows = self._members.bank[:, span].to(self._weights.device)  # experts may be kept on the host
            weighted_sum(rows, self._buffer_coefficients(), self._weights[span])

    def _restore(self, state: Mapping[str, Any]) -> None:  # noqa: ARG002
        # The merged weights follow from what is restored: they are rebuilt, not saved.
        self._stale = self._stale or self._learns


def base_of(pool: ExpertPool, method: str, base_head: str) -> Tensor:
    """theta_0 [P], its head as saved or zero; refused where the pool has none."""
    one_of("base_head", base_head, BASE_HEADS)
    if pool.base is None:
        raise PoolError(
            f"'{method}' needs the weights that all experts started from, and this pool has none. Give base= to "
            f"ExpertPool.from_modules or from_state_dicts, or put the shared start into the pool's folder as 'base'."
        )
    if base_head == "saved":
        return pool.base
    base = pool.base.clone()
    base[pool.layout.encoder_size :] = 0
    return base
