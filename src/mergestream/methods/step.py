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
    # The experts' own [K,B,C] on the batch as it is; only where they were asked for and the method has them.
    expert_logits: Tensor | None = None
    # What a task vector is multiplied by, [K] or one per tensor [K,L]: any number, not a share.
    lambdas: Tensor | None = None
    # What was added to every image's logits, by class [C]: the head's bias was moved by it.
    class_shift: Tensor | None = None
    graph: int | None = None  # of how many images the graph was that it came from; None: it was taken eagerly
    names: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def head_expert(self) -> str | None:
        return None if self.head_expert_index is None else self.names[int(self.head_expert_index)]
