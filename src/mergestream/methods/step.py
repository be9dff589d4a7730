"""What one batch brought."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Step:
    """What one batch brought: logits [B,C], and one number per expert [K] where the method has them."""

    logits: Tensor
    encoder_coefficients: Tensor | None = None
    head_coefficients: Tensor | None = None
    entropy: Tensor | None = None
    scores: Tensor | None = None
    consistency: Tensor | None = None
    head_expert_index: Tensor | None = None
    # What a task vector is multiplied by, [K] or one per tensor [K,L]: any number, not a share.
    lambdas: Tensor | None = None
    names: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def head_expert(self) -> str | None:
        return None if self.head_expert_index is None else self.names[int(self.head_expert_index)]
