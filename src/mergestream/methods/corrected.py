"""Any method's answers, corrected for the mix of classes in the long run, the recent past and the batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from mergestream.functional import class_mix
from mergestream.functional.neighbours import TINY
from mergestream.methods.base import Method, option
from mergestream.methods.card_values import resolve_home, variance_between_sites
from mergestream.methods.correction import Correction, CorrectionState, LongRun
from mergestream.methods.ensemble import Ensemble
from mergestream.methods.entropy_adaptive import EntropyAdaptive
from mergestream.methods.mean import Mean
from mergestream.methods.prior_units import FadingWindow
from mergestream.methods.regmean import RegMean
from mergestream.methods.state import PART, State, Step
from mergestream.networks.preprocessing import ORIGINAL, view_names
from mergestream.pool.runner import Batch
from mergestream.runtime.errors import InputError
from mergestream.runtime.option_checks import number, one_of

BASES: dict[str, type[Method[Any]]] = {
    "ensemble": Ensemble,
    "mean": Mean,
    "regmean": RegMean,
    "entropy_adaptive": EntropyAdaptive,
}


@dataclass(frozen=True)
class CorrectedState(State):
    base: State = field(metadata={"prefix": "base_"})
    correction: CorrectionState = field(metadata=PART)


@dataclass(kw_only=True, eq=False, repr=False)
class Corrected(Method[CorrectedState]):
    """The base answers; then the answers are corrected by what the stream says about its classes."""

    name: ClassVar[str] = "corrected"
    base: str = option("ensemble", one_of, tuple(BASES))
    views: Sequence[str] = option(("hflip",), view_names)  # of the base, if it takes views
    anchor: float | str = 0.0  # share of the long run's departure from home that is bias; 'experts': by theirs
    home: str | Sequence[float] = "card"  # the mix there: 'card' (from the experts' cards), 'uniform', or shares
    memory: float = option(4096, number, low=1)  # over how many images the long run fades to 1/e

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = BASES[self.base]
        self._base = kind(self.pool, **({"views": self.views} if "views" in kind.option_names() else {}))
        self.needs, self.capturable = self._base.needs, self._base.capturable
        self.takes_padding, self.period = self._base.takes_padding, self._base.period
        if not isinstance(self.anchor, str):
            self.anchor = number("anchor", self.anchor, low=0, high=1)
        elif one_of("anchor", self.anchor, ("experts",)) and not isinstance(self._base, Ensemble | EntropyAdaptive):
            raise InputError(f"anchor='experts' needs a base that asks the experts, and '{self.base}' does not.")
        home = class_mix.as_mix(resolve_home(self.home, self.pool)).to(self.pool.device)
        prevalence = variance_between_sites(self.pool)
        long_run = LongRun(home, prevalence, None if isinstance(self.anchor, str) else self.anchor)
        self._correction = Correction(long_run)

    def start(self) -> CorrectedState:
        return CorrectedState(self._base.start(), self._correction.start(len(self.pool)))

    def advance(self, batch: Batch, state: CorrectedState) -> tuple[Step, CorrectedState]:
        step, base = self._base.advance(batch, state.base)
        window, answers = FadingWindow.of(batch, self.memory), torch.softmax(step.logits.float(), dim=-1)
        own = None
        if self.anchor == "experts":
            own = torch.softmax(batch.expert_logits[ORIGINAL].float(), dim=-1)
        corrected, correction = self._correction.correct(state.correction, answers, own, window)
        return replace(step, logits=corrected.clamp_min(TINY).log()), CorrectedState(base, correction)

    def card_values(self) -> dict[str, Any]:
        own = {
            "home": self._correction.long_run.home.tolist(),
            "prevalence": self._correction.long_run.prevalence.tolist(),
        }
        return {**self._base.card_values(), **own}

    def source_hashes(self) -> dict[str, str]:
        return self._base.source_hashes()
