"""Representation surgery in closed form (after Yang et al. 2024): the mean model with a last layer that is fitted."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from mergestream.functional import coefficients as simplex
from mergestream.functional.head_fit import writes_logits
from mergestream.methods.base import option
from mergestream.methods.fading_window import FadingWindow
from mergestream.methods.fitted_head import FitState, FittedHead
from mergestream.methods.merged_model import MergedModel, MergedState
from mergestream.methods.seen_classes import SeenClasses
from mergestream.methods.state import PART, Step
from mergestream.networks.preprocessing import ORIGINAL
from mergestream.pool.runner import Batch
from mergestream.runtime.errors import NetworkError
from mergestream.runtime.option_checks import number

FOREVER = float("inf")  # images until a sum fades
REFUSAL = "'{}' fits the last layer, and {} does not end in one linear layer with a bias that writes the logits."


@dataclass(frozen=True)
class SurgeryState(MergedState):
    fit: FitState = field(metadata=PART)


@dataclass(kw_only=True, eq=False, repr=False)
class Surgery(MergedModel[SurgeryState]):
    """The last layer of the mean is fitted by ridge regression to the experts' mean logits on the stream so far."""

    name: ClassVar[str] = "surgery"
    learns = True
    asks_experts = True
    before: float = option(32, number, above=0)  # for how many images the mean's own last layer counts in the fit

    def __post_init__(self) -> None:
        super().__post_init__()
        layer = self.pool.last_layer
        if layer is None:
            raise NetworkError(REFUSAL.format(self.name, self.pool.template.architecture))
        self._layer, self._fitted = layer, FittedHead(layer, self.before, self.pool.device)
        self._seen = SeenClasses.of(self.pool)
        self._coefficients = simplex.uniform(len(self.pool), self.pool.device)
        self.capturable, self.takes_padding = True, self.recalibrate_bn is not True
        self._fits = False  # whether the last layer writes the logits: checked on the first batch

    def start_learning(self) -> SurgeryState:
        return SurgeryState(self._fitted.start())

    def advance(self, batch: Batch, state: SurgeryState) -> tuple[Step, SurgeryState]:
        weights, experts = self._with_averages(state), self._seen.filled(self.pool.logits_of_views(batch)[ORIGINAL])
        if self._window is None or state.window is None:
            on_batch = bool(self.recalibrate_bn)
            logits, inputs = self.pool.forward_with_inputs(weights, batch.images, recalibrate_bn=on_batch)
            window = None
        else:
            with self._window.measuring(batch, state.window, weights, experts) as measured:
                logits, inputs = self.pool.forward_with_inputs(weights, batch.images)
            window = measured.state
        self._require_last_layer(weights, inputs, logits)
        fit = self._fitted.learn(state.fit, inputs, experts.mean(dim=0), FadingWindow.of(batch, FOREVER))
        logits, fit = self._fitted.answer(fit, weights, inputs)
        return Step(logits, encoder_coefficients=self._coefficients.clone()), SurgeryState(fit, window=window)

    def _require_last_layer(self, weights: Tensor, inputs: Tensor, logits: Tensor) -> None:
        """Refuse a network whose last layer does not write the logits: a fact that the first batch shows."""
        self._fits = self._fits or writes_logits(*self._layer.of_weights(weights), inputs, logits)
        if not self._fits:
            raise NetworkError(REFUSAL.format(self.name, self.pool.template.architecture))

    def merge_parameters(self, state: SurgeryState, out: Tensor) -> None:
        self.pool.merge(self._coefficients, out=out, rows=self._rows)

    @property
    def reuses_weights(self) -> bool:
        return True

    def merged_from(self, state: SurgeryState) -> tuple[Tensor, ...]:
        return ()

    def weights(self, state: SurgeryState) -> Tensor:
        """The weights [P] that answered the last batch, with the fitted layer: a copy."""
        weights, started = super().weights(state).clone(), state.fit.sums[0, 0] > 0
        pairs = zip(self._fitted.layer(state.fit, weights), self._layer.of_weights(weights), strict=True)
        self._layer.write(weights, *(torch.where(started, fitted, own) for fitted, own in pairs))
        return weights

    def card_values(self) -> dict[str, Any]:
        return {**super().card_values(), **self._seen.card_values()}
