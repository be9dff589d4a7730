"""The correction of answers as one GPU kernel, between the states of `correction` and the kernel's flat vectors."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mergestream.methods.fading_window import FadingWindow
from mergestream.methods.state import replaced, tensors

if TYPE_CHECKING:
    from mergestream.methods.correction import Correction, CorrectionState, LongRunState


def can_run(answers: Tensor) -> bool:
    """Whether there is a kernel for answers [B,C]."""
    return _kernel() is not None and _kernel().can_run(answers)


def corrected(
    unit: Correction,
    state: CorrectionState,
    answers: Tensor,
    other: tuple[LongRunState, Tensor] | None,
    window: FadingWindow,
) -> tuple[Tensor, LongRunState, CorrectionState]:
    """As `unit.correct_all` without experts and without an anchor."""
    named = tensors(state)
    del named["long_run_expert_counts"]
    names = sorted(named, key=lambda name: -named[name].ndim)  # vectors [C] first
    long_run = state.long_run if other is None else other[0]
    past = [*map(named.__getitem__, names), *(() if other is None else (long_run.counts, long_run.images))]
    sizes = [value.numel() for value in past]
    sets = [answers] if other is None else [answers, other[1]]
    flat = torch.cat([value.reshape(-1) for value in past])
    bias, home = unit.batch_bias, unit.long_run.home
    result, after = _kernel().answered(sets, window.shares, window.images, window.faded, bias, home, flat)
    values = [part.view(value.shape) for part, value in zip(after.split(sizes), past, strict=True)]
    state = replaced(state, dict(zip(names, values, strict=False)))
    return result, state.long_run if other is None else replace(long_run, counts=values[-2], images=values[-1]), state


@lru_cache(maxsize=1)
def _kernel() -> Any:
    """The kernel's module; None without Triton, which comes with torch's CUDA builds."""
    try:
        from mergestream.functional import mix_kernel
    except ImportError:
        return None
    return mix_kernel
