"""Methods that answer with one merged network, whose weights [P] are rebuilt only when they change: three families."""

import hashlib
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from mergestream.functional import coefficients as simplex
from mergestream.functional.merging import Rows, weighted_sum
from mergestream.functional.scores import require_finite
from mergestream.methods.base import Method, option
from mergestream.methods.batchnorm_window import BatchNormWindow, WindowState, batchnorm_choice
from mergestream.methods.card_values import resolve_base_head
from mergestream.methods.expert_rows import HeadRows
from mergestream.methods.state import State, Step, leaves
from mergestream.pool.checkpoint import Statistics
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.runner import Batch
from mergestream.runtime.errors import MissingStatisticsError, PoolError
from mergestream.runtime.option_checks import one_of, whole_number


@dataclass(frozen=True)
class MergedState(State):
    """Base of these methods' states, and the state of a method that carries nothing else."""

    # With recalibrate_bn='window'.
    window: WindowState | None = field(default=None, kw_only=True, metadata={"prefix": "batchnorm_"})


M = TypeVar("M", bound=MergedState)


@dataclass(kw_only=True, eq=False, repr=False)
class MergedModel(Method[M]):
    """Methods whose merged weights are a function of their state.

    A subclass merges parameters in `merge_parameters`; one that learns from the stream does so in `learn`. Floating
    buffers are averaged here, by the project's one rule for all methods.
    """

    head_rows: str = "all"  # or 'seen': a class's head row is averaged over the experts that saw the class
    # BatchNorm statistics from each batch (True), or from a window of the stream ('window'): one more forward.
    recalibrate_bn: bool | str = option(False, batchnorm_choice)
    learns = False  # whether the stream changes the merged weights

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rows_of = HeadRows(self._members, self.head_rows)
        self._window = BatchNormWindow.of(self._members, self.recalibrate_bn)
        self.weights_follow_state = self.recalibrate_bn is not True
        # Re-estimated BatchNorm statistics depend on the batch, and so does the model.
        self.static = not self.learns and not self.recalibrate_bn
        self.capturable = (self.static or (not self.learns and self._window is not None)) and self._members is self.pool

    def start(self) -> M:
        state = self.start_learning()
        return state if self._window is None else replace(state, window=self._window.start())

    def start_learning(self) -> M:
        """The state before the first batch, without BatchNorm statistics."""
        return MergedState()  # type: ignore[return-value]

    @cached_property
    def _members(self) -> ExpertPool:
        """The pool whose rows are merged: the experts, unless the options choose others."""
        return self.pool

    @cached_property
    def _rows(self) -> Rows:
        """The members' weights, with unseen head rows filled in if the option asks for it."""
        return self._rows_of()

    @abstractmethod
    def merge_parameters(self, state: M, out: Tensor) -> None:
        """Write the merged parameters of a state into out [P]."""

    def learn(self, images: Tensor, state: M) -> M:
        """The state after a prepared batch, which is answered with it."""
        return state

    def report(self, state: M) -> dict[str, Any]:
        """What a Step holds beside its logits."""
        return {}

    def advance(self, batch: Batch, state: M) -> tuple[Step, M]:
        if self.learns:
            with self.pool.input_errors(batch.images):
                state = self.learn(require_finite(batch.images, "The input"), state)
        if self._window is None or state.window is None:
            on_batch = bool(self.recalibrate_bn)
            logits = self._members.forward(self._with_averages(state), batch.images, recalibrate_bn=on_batch)
            return Step(logits, **self.report(state)), state
        logits, window = self._window.answer(batch, state.window, self._with_averages(state), None)
        return Step(logits, **self.report(state)), replace(state, window=window)

    @property
    def reuses_weights(self) -> bool:
        return not self.learns and self.recalibrate_bn is not True

    def merged_from(self, state: M) -> tuple[Tensor, ...]:
        return tuple(leaves(replace(state, window=None)))

    def merge_into(self, state: M, out: Tensor) -> None:
        self.merge_parameters(state, out)
        self._average_buffers(out)

    def weights(self, state: M) -> Tensor:
        weights = self._with_averages(state)
        if self._window is not None and state.window is not None:
            self._window.write(state.window, weights)
        return weights

    def _with_averages(self, state: M) -> Tensor:
        """The merged weights [P] of a state, with the experts' averaged BatchNorm statistics."""
        weights = self.merged(state)
        if self.recalibrate_bn:  # the last batch's estimate has overwritten the averages
            self._average_buffers(weights)
        return weights

    def card_values(self) -> dict[str, Any]:
        return {} if self._window is None else self._window.card_values()

    @torch.no_grad()
    def network(self) -> nn.Module:
        """The merged model in use as an ordinary frozen module with weights of its own, in eval mode."""
        return self._members.network_with(self.weights(self.state))

    def _buffer_coefficients(self) -> Tensor:
        return simplex.uniform(len(self._members), self._members.device)

    def _average_buffers(self, out: Tensor) -> None:
        span = self._members.layout.buffers
        if span.start < span.stop:
            weighted_sum(self._members.bank[:, span], self._buffer_coefficients(), out[span])


@dataclass(kw_only=True, eq=False, repr=False)
class TaskVectorModel(MergedModel[M]):
    """Methods that merge what the experts changed in the base theta_0."""

    revision: ClassVar[int] = 2
    needs: tuple[str, ...] = field(default=("base",), init=False)
    # 'zero': for heads that did not start together; 'saved': the base's; 'auto': as the experts' cards say.
    base_head: str = option("auto", one_of, ("auto", "saved", "zero"))

    def __post_init__(self) -> None:
        if self.pool.base is None:
            raise PoolError(
                f"'{self.name}' needs the weights that all experts started from, and this pool has none. Give base= "
                f"to ExpertPool.from_modules or from_state_dicts, or put the shared start into the pool's folder as "
                f"'base'."
            )
        super().__post_init__()
        self._base = self.pool.base  # [P]
        if resolve_base_head(self.base_head, self.pool) == "zero":
            self._base = self.pool.base.clone()
            self._base[self.pool.layout.encoder_size :] = 0

    def card_values(self) -> dict[str, Any]:
        chosen = {"base_head": resolve_base_head(self.base_head, self.pool)} if self.base_head == "auto" else {}
        return {**super().card_values(), **chosen}


@dataclass(kw_only=True, eq=False, repr=False)
class StatisticsModel(MergedModel[M]):
    """statistics='source': each site measured its expert on its own images and shipped the result with it; 'target':
    each expert is measured on the unlabelled stream, this batch included."""

    statistics: str = option("source", one_of, ("source", "target"))
    examples: int = option(1600, whole_number, low=1)  # images of the target to measure; then the model is settled

    def __post_init__(self) -> None:
        self.learns = self.statistics == "target"
        super().__post_init__()
        if not self.learns:
            self.needs, self._shipped = ("statistics",), self._shipped_by_sites(self.pool)

    @abstractmethod
    def _kind_for(self, pool: ExpertPool) -> str:
        """The kind of statistics that sites ship for it in a pool."""

    @cached_property
    def _kind(self) -> str:
        return self._kind_for(self.pool)

    @property
    def _is_usual(self) -> bool:
        """Whether 'mergestream pool statistics' measures this kind with these options."""
        return True

    def _how_to_measure(self) -> str:
        return f"measure_statistics(pool, {{'{self.pool.names[0]}': its_images, ...}}, ['{self._kind}'])"

    def require_statistics(self, pool: ExpertPool) -> None:
        if not self.learns:
            self._shipped_by_sites(pool)

    def _shipped_by_sites(self, pool: ExpertPool) -> dict[str, Statistics]:
        """Every expert's statistics by its name; refused where one has none of this kind."""
        own = {name: each for name, each in zip(pool.names, pool.statistics, strict=True) if each is not None}
        kind = self._kind_for(pool)
        lacking = [name for name in pool.names if name not in own or kind not in own[name].images]
        if lacking:
            family = kind.split("-")[0]
            others = lacking[0] in own and any(kind.split("-")[0] == family for kind in own[lacking[0]].images)
            shipped = "shipped those of another pool or of other options" if others else "shipped none"
            message = (
                f"'{self.name}' needs statistics measured on the experts' own images ('{family}'); "
                f"{', '.join(lacking)} {shipped}. Measure them: pool = mergestream.{self._how_to_measure()}, "
                f"then pool.save(folder). Or use statistics='target', which measures on the stream."
            )
            raise MissingStatisticsError(message, family) if self._is_usual else PoolError(message)
        return own

    def source_hashes(self) -> dict[str, str]:
        if self.learns:
            return {}
        digests = [own.fingerprint(self._kind) for own in self._shipped.values()]
        return {"statistics": hashlib.sha256("".join(digests).encode()).hexdigest()}
