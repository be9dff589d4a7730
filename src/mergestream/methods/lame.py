"""LAME (Boudiaf et al. 2022): answers of a batch that agree between neighbours in feature space."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from mergestream.functional import class_mix, laplacian
from mergestream.methods.base import option
from mergestream.methods.feature_wrapper import FeatureWrapper
from mergestream.methods.state import Step
from mergestream.methods.wrapper import WrapperState
from mergestream.pool.runner import Batch
from mergestream.runtime.option_checks import whole_number


@dataclass(kw_only=True, eq=False, repr=False)
class Lame(FeatureWrapper[WrapperState]):
    """Y = softmax(log p + W Y), where W says which images are neighbours. Nothing is carried to the next batch."""

    name: ClassVar[str] = "lame"
    k: int = option(5, whole_number, low=0)  # neighbours of an image; 0 gives the base back

    def advance(self, batch: Batch, state: WrapperState) -> tuple[Step, WrapperState]:
        step, base, features = self.answered(batch, state)
        present = (class_mix.counted(batch.shares, batch.images) > 0).double()
        weights = laplacian.affinity(features, self.k, present)
        answers = laplacian.agreed(torch.log_softmax(step.logits.double(), dim=-1), weights, present)
        return replace(step, logits=answers.float()), WrapperState(base)
