"""The experts' weights [K,P] as two segments: a changed head needs no copy of the encoder."""

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
        """All experts' weights [K,n] from start to stop, which lie both in the encoder or both in the head."""
        border = self.encoder.shape[1]
        if stop <= border:
            return self.encoder[:, start:stop]
        assert start >= border, "a span must not cross from the encoder into the head"
        return self.head[:, start - border : stop - border]

    def segments(self) -> tuple[tuple[int, int], tuple[int, int]]:
        border = self.encoder.shape[1]
        return (0, border), (border, border + self.head.shape[1])


def fill_unseen(
    head: Tensor, classes: Sequence[tuple[slice, int]], seen: Tensor, coefficients: Tensor | None = None
) -> Tensor:
    """Fill the head rows of classes that an expert never saw with the mean of the experts that saw them. head [K,H].

    classes: the spans of the head that belong to one class each. seen [K,C]. coefficients [K]: weights of that mean,
    uniform by default. Any average over all experts is then an average over those that saw the class. A class that no
    expert saw is unchanged.
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
