"""Answers for the mix of classes of the recent stream: Saerens et al. 2002 (em) and Lipton et al. 2018 (bbse)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mergestream.functional import class_mix
from mergestream.functional.neighbours import TINY
from mergestream.methods.base import option
from mergestream.methods.card_values import resolve_confusion, resolve_home
from mergestream.methods.state import OF_ALL_EXPERTS, Step
from mergestream.methods.wrapper import Wrapper, WrapperState
from mergestream.pool.runner import Batch
from mergestream.runtime.option_checks import one_of, whole_number

ROUNDS = 100


@dataclass(frozen=True)
class LabelShiftState(WrapperState):
    """The base's answers to the last images."""

    answers: Tensor = field(metadata=OF_ALL_EXPERTS)  # the newest last [N,C]; even in free places
    filled: Tensor = field(metadata=OF_ALL_EXPERTS)  # 1 where the window has an image yet [N]


@dataclass(kw_only=True, eq=False, repr=False)
class LabelShift(Wrapper[LabelShiftState]):
    """p π/π₀ renormalised: π is the mix in a window of the stream, π₀ the mix of the experts' homes."""

    name: ClassVar[str] = "label_shift"
    corrects_mix = True
    # 'em': the mix under which the answers in the window are most likely; 'bbse': from the classes that were answered,
    # by the experts' confusion on their own validation images.
    method: str = option("em", one_of, ("em", "bbse"))
    window: int = option(512, whole_number, low=1)  # images
    home: str | Sequence[float] = "card"  # π₀: 'card' (from the experts' cards), 'uniform', or shares

    def __post_init__(self) -> None:
        super().__post_init__()
        self._home = class_mix.as_mix(resolve_home(self.home, self.pool)).to(self.pool.device)
        self._confusion = resolve_confusion(self.pool) if self.method == "bbse" else None
        self._mix_of_answers = None if self._confusion is None else torch.linalg.pinv(self._confusion)

    def start(self) -> LabelShiftState:
        even = torch.full((self.window, len(self.pool.classes)), 1 / len(self.pool.classes), device=self.pool.device)
        return LabelShiftState(self._base.start(), even, torch.zeros_like(even[:, 0]))

    def advance(self, batch: Batch, state: LabelShiftState) -> tuple[Step, LabelShiftState]:
        step, base = self._base.advance(batch, state.base)
        answers = torch.softmax(step.logits.float(), dim=-1)
        present = (class_mix.counted(batch.shares, batch.images) > 0).float()
        every, filled = torch.cat([state.answers, answers]), torch.cat([state.filled, present])
        newest = filled.sort(stable=True).indices[-self.window :]  # free places and padding first
        every, filled = every[newest], filled[newest]
        mix = self._expected(every, filled) if self._mix_of_answers is None else self._solved(every, filled)
        logits = torch.log_softmax(step.logits.float(), dim=-1) + (mix / self._home).clamp_min(TINY).log()
        return replace(step, logits=torch.log_softmax(logits, dim=-1)), LabelShiftState(base, every, filled)

    def _expected(self, answers: Tensor, filled: Tensor) -> Tensor:
        """π [C] by expectation maximisation over answers [N,C]."""
        mix, shares = self._home, filled / filled.sum()
        for _ in range(ROUNDS):
            mix = (class_mix.reweighted(answers, mix, self._home) * shares[:, None]).sum(dim=0)
        return mix

    def _solved(self, answers: Tensor, filled: Tensor) -> Tensor:
        """π [C] whose answered classes, through the confusion, are those in the window [N,C]."""
        assert self._mix_of_answers is not None
        answered = torch.nn.functional.one_hot(answers.argmax(dim=-1), answers.shape[1]).float()
        mix = (self._mix_of_answers @ (answered * filled[:, None]).sum(dim=0)).clamp_min(0.0)
        return torch.where(mix.sum() > 0, mix / mix.sum().clamp_min(TINY), self._home)

    def own_card_values(self) -> dict[str, Any]:
        confusion = {} if self._confusion is None else {"confusion": self._confusion.tolist()}
        return {"home": self._home.tolist(), **confusion}
