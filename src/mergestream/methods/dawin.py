"""DaWin (Oh et al. 2025): coefficients for every image by entropy, one merged model for each group of alike images."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from mergestream.functional.clustering import nearest, with_centres
from mergestream.methods.asked_experts import AskedExperts
from mergestream.methods.base import option
from mergestream.methods.state import INSEPARABLE, State, Step
from mergestream.networks.preprocessing import ORIGINAL
from mergestream.pool.runner import Batch, ExpertLogits
from mergestream.runtime.errors import InputError
from mergestream.runtime.option_checks import whole_number, yes_or_no


@dataclass(frozen=True)
class DaWinState(State):
    centres: Tensor | None = field(metadata=INSEPARABLE)  # mean lambda of each group of the whole target [G,K]


@dataclass(kw_only=True, eq=False, repr=False)
class DaWin(AskedExperts[DaWinState]):
    """lambda_k(x) proportional to exp(-H_k(x)); k-means over a batch's lambdas; each group's mean lambda merges.

    With `transductive` the groups are those of the whole target, as published: its images are looked at before the
    stream begins, which no other method may do.
    """

    name: ClassVar[str] = "dawin"
    groups: int = option(3, whole_number, low=1)  # at most so many merged models per batch
    transductive: bool = option(False, yes_or_no)  # groups of the whole target instead of each batch
    recalibrate_bn: bool = option(False, yes_or_no)  # BatchNorm statistics from each group, with one more forward

    def __post_init__(self) -> None:
        super().__post_init__()
        self.looks_ahead = self.transductive

    def start(self) -> DaWinState:
        return DaWinState(None)

    def looked_ahead(self, state: DaWinState, expert_logits: ExpertLogits) -> DaWinState:
        coefficients = self._lambdas(expert_logits[ORIGINAL].to(self.pool.device))[0]
        return DaWinState(with_centres(coefficients, self.groups)[0])

    def advance(self, batch: Batch, state: DaWinState) -> tuple[Step, DaWinState]:
        coefficients, entropies = self._lambdas(self.ask(batch))
        if not self.transductive:
            centres, labels = with_centres(coefficients, self.groups)
        elif state.centres is not None:
            centres, labels = state.centres, nearest(coefficients, state.centres)
        else:
            raise InputError(
                "'dawin(transductive=true)' groups the whole target before the stream begins: call look_ahead(images) "
                "first, as 'mergestream bench' does. A live stream has no such target: use transductive=false there."
            )
        mean = coefficients.mean(dim=0)
        answer = self._answer(batch.images, centres, labels)
        return Step(answer, mean, mean.clone(), entropy=entropies.mean(dim=1)), state

    def _lambdas(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Coefficients of each image [B,K], and the entropies [K,B] they come from."""
        entropies = self._seen.image_entropies(logits, self._temperature)
        return torch.softmax(-entropies, dim=0).T, entropies

    def _answer(self, images: Tensor, centres: Tensor, labels: Tensor) -> Tensor:
        """Logits [B,C]: each group of images is answered by the model merged with the group's coefficients."""
        answer = torch.empty(len(images), len(self.pool.classes), device=self.pool.device)
        for group in labels.unique().tolist():
            members = labels == group
            weights = self.pool.merge(centres[group], out=self._buffer)
            answer[members] = self.pool.forward(weights, images[members], recalibrate_bn=self.recalibrate_bn)
        return answer
