"""Any method's answers, corrected for the mix of classes in the long run, the recent past and the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from mergestream.functional import class_mix
from mergestream.functional.neighbours import TINY
from mergestream.methods.base import option
from mergestream.methods.card_values import resolve_home, variance_between_sites
from mergestream.methods.correction import Correction, CorrectionState, LongRun
from mergestream.methods.fading_window import FadingWindow
from mergestream.methods.seen_classes import SeenClasses
from mergestream.methods.site_evidence import variances_by_sites
from mergestream.methods.state import PART, Step
from mergestream.methods.wrapper import Wrapper, WrapperState
from mergestream.networks.preprocessing import ORIGINAL
from mergestream.pool.runner import Batch
from mergestream.runtime.errors import InputError
from mergestream.runtime.option_checks import number, one_of


@dataclass(frozen=True)
class CorrectedState(WrapperState):
    correction: CorrectionState = field(metadata=PART)


@dataclass(kw_only=True, eq=False, repr=False)
class Corrected(Wrapper[CorrectedState]):
    """The base answers; then the answers are corrected by what the stream says about its classes."""

    name: ClassVar[str] = "corrected"
    revision: ClassVar[int] = 2
    corrects_mix = True
    base: str = "ensemble(views=(hflip))"
    # Share of the long run's departure from home that is bias; 'experts': by theirs here; 'sites': by site reports.
    anchor: float | str = 0.0
    home: str | Sequence[float] = "card"  # the mix there: 'card' (from the experts' cards), 'uniform', or shares
    memory: float = option(4096, number, low=1)  # over how many images the long run fades to 1/e
    batch_bias: float = option(Correction.batch_bias, number, low=0, later=True)  # nats; 0: a batch has none

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.anchor, str):
            self.anchor = number("anchor", self.anchor, low=0, high=1)
        elif one_of("anchor", self.anchor, ("experts", "sites")) == "experts" and not self.asks_experts:
            raise InputError(f"anchor='experts' needs a base that asks the experts, and '{self.base}' does not.")
        self._seen = SeenClasses.of(self.pool)
        home = class_mix.as_mix(resolve_home(self.home, self.pool)).to(self.pool.device)
        prevalence, bias = variance_between_sites(self.pool), None
        if self.anchor == "sites":
            prevalence, bias = variances_by_sites(self.pool)
        anchor = None if isinstance(self.anchor, str) else self.anchor
        self._correction = Correction(LongRun(home, prevalence, anchor, bias), self.batch_bias)

    def start(self) -> CorrectedState:
        return CorrectedState(self._base.start(), self._correction.start(len(self.pool)))

    def advance(self, batch: Batch, state: CorrectedState) -> tuple[Step, CorrectedState]:
        step, base = self._base.advance(batch, state.base)
        window, answers = FadingWindow.of(batch, self.memory), torch.softmax(step.logits.float(), dim=-1)
        own = None
        if self.anchor == "experts" and ORIGINAL in batch.expert_logits and ORIGINAL not in batch.given:
            own = torch.softmax(self._seen.filled(batch.expert_logits[ORIGINAL]).float(), dim=-1)
        (corrected,), _, correction = self._correction.correct_all(
            state.correction, answers, own, None, window, fused=self.pool.is_recording
        )
        return replace(step, logits=corrected.clamp_min(TINY).log()), CorrectedState(base, correction)

    def own_card_values(self) -> dict[str, Any]:
        long_run = self._correction.long_run
        values = self._seen.card_values() if self.anchor == "experts" else {}
        values |= {} if long_run.bias is None else {"bias": long_run.bias.tolist()}
        return {"home": long_run.home.tolist(), "prevalence": long_run.prevalence.tolist(), **values}
