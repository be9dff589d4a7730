"""The one interface of all methods: a batch in, a Step out, never a label."""

from __future__ import annotations

import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mergestream.errors import InputError
from mergestream.pool import ExpertPool

# Key of the unaltered batch among precomputed expert logits; the other keys are names of views.
ORIGINAL = "original"
ExpertLogits = Mapping[str, Tensor]


@dataclass(frozen=True)
class Step:
    """What one batch brought: logits [B,C], and one number per expert [K] where the method has them."""

    logits: Tensor
    encoder_coefficients: Tensor | None = None
    head_coefficients: Tensor | None = None
    entropy: Tensor | None = None
    scores: Tensor | None = None
    consistency: Tensor | None = None
    head_expert_index: Tensor | None = None
    # What a task vector is multiplied by, [K] or one per tensor [K,L]: any number, not a share.
    lambdas: Tensor | None = None
    names: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def head_expert(self) -> str | None:
        return None if self.head_expert_index is None else self.names[int(self.head_expert_index)]


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

    def __init__(self, pool: ExpertPool) -> None:
        self.pool = pool

    @abstractmethod
    def _step(self, images: Tensor, expert_logits: ExpertLogits) -> Step:
        """One step on a prepared batch [B,c,H,W]."""

    @torch.no_grad()
    def step(self, images: Tensor, *, expert_logits: ExpertLogits | None = None) -> Step:
        """Answer one batch. `expert_logits` may hold logits [K,B,C] computed before, by view name or 'original'."""
        started, before = time.perf_counter(), self._state()
        try:
            step = self._step(self.pool.prepare(images), expert_logits or {})
        except BaseException:
            # A refused batch must leave no trace in the stream.
            self._restore(before)
            raise
        return replace(step, names=self.pool.names, seconds=time.perf_counter() - started)

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

    def _logits(self, images: Tensor, known: ExpertLogits, view: str | None = None) -> Tensor:
        """Expert logits [K,B,C]: those computed before, or computed now."""
        logits = known.get(view or ORIGINAL)
        return self.pool.logits(images, view) if logits is None else logits.to(self.pool.device)

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options().items())
        return f"{type(self).__name__}({options})"


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _short(value: Any) -> str:
    return "(" + ", ".join(map(str, value)) + ")" if isinstance(value, list) else str(value)
