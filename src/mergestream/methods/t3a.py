"""T3A (Iwasawa and Matsuo 2021): class prototypes that move with the features of confident images."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from mergestream.functional import class_mix
from mergestream.methods.base import option
from mergestream.methods.feature_wrapper import FeatureWrapper
from mergestream.methods.state import OF_ALL_EXPERTS, Step
from mergestream.methods.wrapper import WrapperState
from mergestream.pool.runner import Batch
from mergestream.runtime.option_checks import whole_number, yes_or_no


@dataclass(frozen=True)
class T3AState(WrapperState):
    """The images of the lowest entropy per class: M places, however long the stream is."""

    supports: Tensor = field(metadata=OF_ALL_EXPERTS)  # unit features [C,M,D]
    entropy: Tensor = field(metadata=OF_ALL_EXPERTS)  # of the base's answers to them [C,M]; infinite for a free place


@dataclass(kw_only=True, eq=False, repr=False)
class T3A(FeatureWrapper[T3AState]):
    """An image joins the class that the base predicts; the answer is the product of its feature with prototypes.

    A prototype is the mean of a class's supports, of which the row of the last layer is one, as long as its entropy is
    among the lowest M.
    """

    name: ClassVar[str] = "t3a"
    supports: int = option(100, whole_number, low=1)  # M
    unit_prototypes: bool = option(False, yes_or_no)  # bring prototypes to length 1, as the published code does

    def start(self) -> T3AState:
        (classes, inputs), device = self._last_layer.shape, self.pool.device
        free = torch.full((classes, self.supports), torch.inf, device=device)
        return T3AState(self._base.start(), torch.zeros(classes, self.supports, inputs, device=device), free)

    def advance(self, batch: Batch, state: T3AState) -> tuple[Step, T3AState]:
        step, base, features = self.answered(batch, state)
        features = torch.nn.functional.normalize(features, dim=-1)
        present = class_mix.counted(batch.shares, batch.images) > 0
        supports, entropy = self._joined(state, features, step.logits.float(), present)
        prototypes = self._prototypes(supports, entropy, *self.last_layer_of(base))
        return replace(step, logits=features @ prototypes.T), T3AState(base, supports, entropy)

    def _joined(self, state: T3AState, features: Tensor, logits: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """Supports [C,M,D] and their entropy [C,M] with a batch's unit features [B,D] and the base's logits [B,C]."""
        classes, inputs = self._last_layer.shape
        own_class = torch.arange(classes, device=logits.device)[:, None] == logits.argmax(dim=-1)  # [C,B]
        joining = torch.where(own_class & present, _entropy(logits), torch.inf)
        lowest = torch.cat([state.entropy, joining], dim=1).sort(dim=1, stable=True)
        entropy, places = lowest.values[:, : self.supports], lowest.indices[:, : self.supports]
        first = torch.arange(classes, device=logits.device)[:, None] * self.supports
        images = classes * self.supports + places - self.supports  # where the batch stands behind all supports
        rows = torch.where(places < self.supports, first + places, images)
        return torch.cat([state.supports.reshape(-1, inputs), features])[rows], entropy

    def _prototypes(self, supports: Tensor, entropy: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """[C,D]: means over the M lowest of each class's supports and the row of the last layer."""
        row_entropy = _entropy(weight @ weight.T + bias)
        # The row takes a place unless all of them hold images of lower entropy.
        row_counts = (row_entropy <= entropy[:, -1]).float()
        counts = entropy.isfinite().float()
        counts[:, -1] = counts[:, -1] * (1 - row_counts)
        total = (supports * counts[:, :, None]).sum(dim=1)
        total = total + row_counts[:, None] * torch.nn.functional.normalize(weight, dim=-1)
        if self.unit_prototypes:
            return torch.nn.functional.normalize(total, dim=-1)
        return total / (counts.sum(dim=1) + row_counts)[:, None]


def _entropy(logits: Tensor) -> Tensor:
    """Of answers [n,C]: [n]."""
    logs = torch.log_softmax(logits, dim=-1)
    return -(logs.exp() * logs).sum(dim=-1)
