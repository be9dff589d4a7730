"""Result of one step."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Step:
    """Result of one step: logits [B,C], and one number per expert [K] where the method has them."""

    logits: Tensor
    encoder_coefficients: Tensor | None = None
    head_coefficients: Tensor | None = None
    entropy: Tensor | None = None
    scores: Tensor | None = None
    consistency: Tensor | None = None
    head_expert_index: Tensor | None = None
    # Multipliers of the task vectors, [K] or one per tensor [K,L]: any number, not a share.
    lambdas: Tensor | None = None
    # What was added to every image's logits, by class [C]: the shift of the head's bias.
    class_shift: Tensor | None = None
    # The experts' own logits [K,B,C] on the batch; only with step(..., with_experts=True).
    expert_logits: Tensor | None = None
    # How often an image passed through an expert, through a merged model, and backwards, on average over the batch.
    # Expert logits that were given to the step count as if it had run the experts.
    expert_forwards: float | None = None
    merged_forwards: float | None = None
    backwards: float | None = None
    graph: int | None = None  # batch size of the CUDA graph that was replayed; None for an eager step
    names: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def head_expert(self) -> str | None:
        return None if self.head_expert_index is None else self.names[int(self.head_expert_index)]
