"""The experts' weights [K,P] as two segments, so that a head of its own needs no copy of the encoder."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """encoder [K,E] and head [K,H]; both are usually views of one bank [K,E+H]."""

    encoder: Tensor
    head: Tensor

    @classmethod
    def of(cls, bank: Tensor, encoder_size: int) -> "Rows":
        return cls(bank[:, :encoder_size], bank[:, encoder_size:])

    def __len__(self) -> int:
        return len(self.encoder)

    @property
    def device(self) -> torch.device:
        return self.encoder.device

    def span(self, start: int, stop: int) -> Tensor:
        """All experts' numbers [K,n] between two places; a span never crosses from the encoder into the head."""
        border = self.encoder.shape[1]
        if stop <= border:
            return self.encoder[:, start:stop]
        assert start >= border, "a span lies in the encoder or in the head"
        return self.head[:, start - border : stop - border]

    def segments(self) -> tuple[tuple[int, int], tuple[int, int]]:
        border = self.encoder.shape[1]
        return (0, border), (border, border + self.head.shape[1])


def fill_unseen(
    head: Tensor, classes: Sequence[tuple[slice, int]], seen: Tensor, coefficients: Tensor | None = None
) -> Tensor:
    """head [K,H] in which an expert that never saw a class answers for it as those did that saw it.

    classes: the spans of the head that belong to one class each. seen [K,C]. coefficients [K]: how those that saw it
    are weighed, uniform by default. Any average over all experts is then one over the experts that saw the class. A
    class that nobody saw stays as it is.
    """
    filled = head.clone()
    shares = torch.ones(len(head), device=head.device) if coefficients is None else coefficients
    for span, label in classes:
        saw = seen[:, label]
        if bool(saw.all()) or not bool(saw.any()):
            continue
        weights = torch.where(saw, shares, 0.0)
        weights = weights if bool(weights.sum() > 0) else saw.float()
        typical = (weights / weights.sum()) @ head[:, span].float()
        filled[~saw, span] = typical.to(head.dtype)
    return filled
