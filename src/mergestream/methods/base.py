"""The one interface of all methods: a batch in, a Step out, never a label."""

from __future__ import annotations

import inspect
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mergestream.functional.scores import require_finite
from mergestream.methods.captured import Captured, way_of
from mergestream.methods.leasing import lease
from mergestream.methods.recorded import ANSWER
from mergestream.methods.step import Step
from mergestream.networks.preprocessing import require_batch
from mergestream.networks.views import ORIGINAL
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError, MergestreamError
from mergestream.runtime.log_once import log_once
from mergestream.runtime.option_checks import whole_number

_log = logging.getLogger(__name__)
ExpertLogits = Mapping[str, Tensor]  # by the name of the view, the unaltered batch as ORIGINAL


class Method(ABC):
    """A way to answer a stream with the pool's experts. The constructor's keyword-only parameters are its options.

    A subclass stores every option under its own name, computes `_step`, and lists what it carries from batch to batch
    in `_state` and `_restore`. `revision` is raised whenever its numbers change; `static` says that every batch gets
    the same model, so that a stream only reorders its answers.
    """

    name: ClassVar[str]
    revision: ClassVar[int] = 1
    static: ClassVar[bool] = False
    # What it cannot do without, beside experts and images: 'base', 'statistics', 'candidates', 'gradients'.
    needs: ClassVar[tuple[str, ...]] = ()
    # Whether what it computes with follows from its options and the pool's bank alone, so that graphs can be handed on.
    portable: ClassVar[bool] = False
    # Inside a recorded step: what each image counts [B] where the batch is padded, and the host's decisions.
    _shares: Tensor | None = None
    _decided: Hashable = None
    _with_experts = False  # whether the step is asked for the experts' logits too
    _as_then: tuple[int | None] | None = None  # the graph, or none, that steps are to come from; None: as is best now
    _captured: Captured | None = None
    _cannot_be_captured = False

    def __init__(self, pool: ExpertPool) -> None:
        self.pool = pool

    @abstractmethod
    def _step(self, images: Tensor, expert_logits: ExpertLogits) -> Step:
        """One step on a prepared batch [B,c,H,W]."""

    @torch.no_grad()
    def step(self, images: Tensor, *, expert_logits: ExpertLogits | None = None, with_experts: bool = False) -> Step:
        """Answer one batch. `expert_logits` may hold logits [K,B,C] computed before, by view name or 'original'.

        `with_experts`: the Step also holds the experts' logits on the batch, if the method computes them on it.
        """
        started, known = time.perf_counter(), expert_logits or {}
        self._with_experts = with_experts
        step = self._captured_step(images, known)
        step = self._eager_step(images, known) if step is None else step
        return replace(step, names=self.pool.names, seconds=time.perf_counter() - started)

    def settle(self) -> None:
        """Wait for the device; refuse now what a captured step could not refuse at once. Elsewhere nothing is open."""
        if self._captured is not None:
            self._captured.look(self, wait=True)

    def repeat(self, graph: int | None) -> None:
        """Take steps from now on as a Step with this `graph` was taken: for the same bits on the same device."""
        self._as_then = (graph if graph is None else whole_number("graph", graph, low=1),)

    def _eager_step(self, images: Tensor, known: ExpertLogits) -> Step:
        before = self._state()
        try:
            step = self._step(self.pool.prepare(images), known)
            require_finite(step.logits, ANSWER)
            self._advance(eager=True)
        except BaseException:
            # A refused batch must leave no trace in the stream.
            self._restore(before)
            raise
        return step

    def _captured_step(self, images: Tensor, known: ExpertLogits) -> Step | None:
        """The step from a graph on a device that has them; None where it is to be taken eagerly."""
        way = way_of(self.pool.device)
        if way is None or self._cannot_be_captured or not (self.pool.execution.capture and self._capturable()):
            return None
        require_batch(images, self.pool.preprocessing)
        try:
            with torch.inference_mode(False), torch.no_grad():
                self._captured = self._captured or lease(self, way)
                step = self._captured.step(self, images, known)
        except MergestreamError:
            raise
        except Exception as error:
            # Whatever a network does that a graph cannot hold; the eager step is the reference, and always there.
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            told = f"Steps of '{self.name}' are taken eagerly: they cannot be captured ({why})."
            log_once(_log, logging.WARNING, told)
            self._cannot_be_captured, self._captured = True, None
            step = None
        if step is None:
            self._answers_from(None)
        else:
            told = f"Steps of '{self.name}' on {self.pool.device} are replayed from CUDA graphs."
            log_once(_log, logging.INFO, told)
        return step

    def __call__(self, images: Tensor) -> Tensor:
        return self.step(images).logits

    @classmethod
    def option_names(cls) -> list[str]:
        """What options are called. Python reserves 'lambda', so that parameter is spelt `lambda_`."""
        return [name.removesuffix("_") for name in cls._parameters()]

    @classmethod
    def required_options(cls) -> list[str]:
        empty = inspect.Parameter.empty
        return [name.removesuffix("_") for name, parameter in cls._parameters().items() if parameter.default is empty]

    @classmethod
    def _parameters(cls) -> dict[str, inspect.Parameter]:
        parameters = inspect.signature(cls.__init__).parameters
        return {name: parameter for name, parameter in parameters.items() if name not in ("self", "pool")}

    def options(self) -> dict[str, Any]:
        """The constructor's options, read back in a form JSON can hold."""
        return {name.removesuffix("_"): _plain(getattr(self, name)) for name in self._parameters()}

    def label(self) -> str:
        """Its name with the options that differ from their defaults: what a table calls it."""
        defaults = {n.removesuffix("_"): _plain(p.default) for n, p in self._parameters().items()}
        changed = [f"{n}={_short(value)}" for n, value in self.options().items() if value != defaults[n]]
        return f"{self.name}({', '.join(changed)})" if changed else self.name

    def reset(self) -> None:
        """Forget the stream, keep the options."""
        if self._captured is not None:
            self._captured.forget()
        self._restore({})

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on in the middle of a stream, in another process."""
        return {**self.identity, "state": self._state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping):
            raise InputError(f"A method's state is what state_dict() gave, not {type(state).__name__}.")
        for key, value in self.identity.items():
            if state.get(key) != value:
                raise InputError(f"This state is of another {key}: {state.get(key)!r}, not {value!r}.")
        if "state" not in state:
            raise InputError("This is not a method's state: 'state' is missing in it.")
        before = self._state()
        try:
            self._restore(state["state"])
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            self._restore(before)
            raise InputError(f"This state does not fit '{self.name}' on this pool: {error}.") from error

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a state or a run belongs to; the pool is hashed once, since it never changes."""
        identity = {"method": self.name, "options": self.options(), "pool": self.pool.fingerprint()}
        return identity | {name: value for name, value in self._sources().items() if value is not None}

    def _sources(self) -> dict[str, str | None]:
        """Hashes of what else its numbers depend on, beside the pool's experts."""
        return {"base": self.pool.base_fingerprint()} if "base" in self.needs else {}

    def _state(self) -> dict[str, Any]:
        return {}

    def _restore(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Take up a state made by `_state`; an empty one is the beginning of a stream."""

    # --- what a captured step needs to know -----------------------------------------------------------------

    def _capturable(self) -> bool:
        """Whether its `_step` reads nothing back to the host while the pool is recording."""
        return False

    def _takes_padding(self) -> bool:
        """Whether its `_step` heeds `_shares`, so that a smaller batch can be padded."""
        return False

    def _branch(self) -> Hashable:
        """What its `_step` decides on the host now; every course has a graph of its own."""
        return ()

    def _carried(self) -> dict[str, Tensor]:
        """What it carries from batch to batch on the device, as fp32."""
        return {}

    def _carry(self, tensors: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Take up what `_carried` gave, as it is: nothing is copied, and nothing is written into it."""

    def _tells(self) -> dict[str, Tensor]:
        """What the host wants to know of the step just taken, one number each; it hears of it a batch late."""
        return {}

    def _hear(self, told: Mapping[str, float]) -> None:  # noqa: B027
        """The numbers of `_tells`, arrived."""

    def _advance(self, *, eager: bool) -> None:  # noqa: B027
        """Count the step; called after it. Only an eager one may be looked at on the host."""

    def _answers_from(self, place: object) -> None:  # noqa: B027
        """Where the merged weights lie from now on: its own place (None), or that of graphs which are lent to it."""

    def _logits(self, images: Tensor, known: ExpertLogits, view: str | None = None) -> Tensor:
        """Expert logits [K,B,C]: those computed before, or computed now."""
        logits = known.get(view or ORIGINAL)
        return self.pool.logits(images, view) if logits is None else logits.to(self.pool.device)

    def _asked(self, logits: Tensor) -> Tensor | None:
        """The experts' logits, for a Step that is to hold them: many Steps may be kept, and these are large."""
        return logits if self._with_experts else None

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options().items())
        return f"{type(self).__name__}({options})"


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _short(value: Any) -> str:
    return "(" + ", ".join(map(str, value)) + ")" if isinstance(value, list) else str(value)
