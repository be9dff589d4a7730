"""Options and state of entropy-adaptive merging, and when the experts are scored again."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mergestream.functional import coefficients as simplex
from mergestream.functional import scores as scoring
from mergestream.methods.base import Method, option
from mergestream.methods.batchnorm_window import BatchNormWindow, WindowState, batchnorm_choice
from mergestream.methods.card_values import resolve_temperature
from mergestream.methods.expert_rows import HeadRows
from mergestream.methods.seen_classes import SeenClasses
from mergestream.methods.state import COEFFICIENTS, PART, State
from mergestream.networks.preprocessing import view_names
from mergestream.runtime.option_checks import number, one_of, whole_number


@dataclass(frozen=True)
class DriftState(State):
    reference: Tensor  # the merged model's entropy [] when the experts were last scored; NaN before
    drifted: bool  # whether it has moved since


@dataclass(frozen=True)
class EntropyState(State):
    batches: int
    encoder: Tensor = field(metadata=COEFFICIENTS)  # a [K]
    head: Tensor = field(metadata=COEFFICIENTS)  # h [K]
    drift: DriftState | None = field(default=None, metadata=PART)  # with refresh_drift
    # With recalibrate_bn='window'.
    window: WindowState | None = field(default=None, metadata={"prefix": "batchnorm_"})


@dataclass(kw_only=True, eq=False, repr=False)
class EntropyOptions(Method[EntropyState]):
    temperature: float | Sequence[float] | str = (
        1.0  # tau_e in the softmax: one, one per expert, or 'card' (each card's)
    )
    epsilon: float = option(1e-6, number, above=0)  # keeps 1/E finite where an expert is certain
    encoder: str = option("adaptive", one_of, ("adaptive", "uniform"))  # Eq. 4, or 1/K for the ablation
    head: str = option(
        "entropy_gap", one_of, ("entropy_gap", "shared", "select")
    )  # Eq. 9, Eq. 5, Eq. 9 at tau_h -> inf
    head_sharpness: float = option(1.0, number, low=0)  # tau_h of Eq. 9
    momentum: float = option(0.0, number, low=0, below=1)  # share kept of the old coefficients; 0: this batch alone
    views: Sequence[str] = option(("hflip",), view_names)  # label-preserving, for the consistency C_k; () leaves it out
    score: str = option("entropy", one_of, tuple(scoring.SCORES))  # E_k of Eq. 3, or another
    weighting: str = option("inverse", one_of, ("inverse", "softmax"))  # Eq. 4, or a softmax with encoder_sharpness
    encoder_sharpness: float = option(1.0, number, low=0)
    # BatchNorm statistics from the batch, with one more forward, or from a window of the stream ('window').
    recalibrate_bn: bool | str = option(False, batchnorm_choice)
    refresh_every: int = option(1, whole_number, low=1)  # score every n-th batch, reuse the merged model in between
    refresh_drift: float = option(0.0, number, low=0)  # and after its own entropy moved by more nats than this; 0 never
    head_rows: str = "all"  # or 'seen': a class's head row is merged from the experts that saw the class
    score_images: int = option(0, whole_number, low=0)  # score the experts on the batch's first images only; 0: on all

    def __post_init__(self) -> None:
        super().__post_init__()
        self._temperature = resolve_temperature(self.temperature, self.pool)
        self._seen = SeenClasses.of(self.pool)
        self._score, self._entropy = self._seen.score(self.score), self._seen.score("entropy")
        self._rows, self._rows_of = self.pool.rows, HeadRows(self.pool, self.head_rows)
        self.period = self.refresh_every
        # Filling rows of unseen classes and comparing a drift both read the device.
        self.capturable = self.head_rows == "all" and not self.refresh_drift
        self._window = BatchNormWindow.of(self.pool, self.recalibrate_bn)
        # Padding would count in the batch's statistics, and in the forwards per image.
        self.weights_follow_state = self.recalibrate_bn is not True
        self.takes_padding = self.weights_follow_state and not self.score_images
        self.asks_experts = not self.score_images

    def start(self) -> EntropyState:
        share = simplex.uniform(len(self.pool), self.pool.device)
        drift = None
        if self.refresh_drift:
            drift = DriftState(torch.full((), torch.nan, device=self.pool.device), drifted=False)
        return EntropyState(0, share, share, drift, None if self._window is None else self._window.start())

    def card_values(self) -> dict[str, Any]:
        own = {"temperature": self._temperature.tolist()} if isinstance(self.temperature, str) else {}
        window = {} if self._window is None else self._window.card_values()
        return {**own, **self._seen.card_values(), **window}

    def watch_drift(self, state: EntropyState, entropy: Tensor, due: bool) -> EntropyState:
        """Note whether the merged model has become much more or less certain since the experts were last scored."""
        assert state.drift is not None
        before = state.drift.reference
        if due:
            return replace(state, drift=DriftState(entropy, drifted=False))
        moved = bool((entropy - before).abs() > self.refresh_drift)
        return replace(state, drift=DriftState(torch.where(before.isnan(), entropy, before), moved))
