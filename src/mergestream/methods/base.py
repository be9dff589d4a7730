"""The interface of all methods: a pure step over a state, and the shell that keeps the state for the user."""

import inspect
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from operator import is_not
from typing import Any, ClassVar, Generic

import torch
from torch import Tensor

from mergestream.functional.scores import require_finite
from mergestream.methods.capture import Graphs, recorder_for
from mergestream.methods.recorded_step import ANSWER
from mergestream.methods.spelling import Variant
from mergestream.methods.state import S, State, Step, from_plain, numbers, to_plain
from mergestream.networks.preprocessing import ORIGINAL
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.runner import Batch, ExpertLogits
from mergestream.runtime.errors import InputError, MergestreamError
from mergestream.runtime.messages import log_once
from mergestream.runtime.option_checks import option as option
from mergestream.runtime.option_checks import plain, whole_number
from mergestream.runtime.plugins import plugin_provenance

_log = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class Method(ABC, Generic[S]):
    """A way to answer a stream with the pool's experts. The constructor's keyword-only parameters are its options.

    A subclass is a dataclass of its options and defines `start` and `advance`. `revision` is raised whenever its
    numbers change; `static` says that every batch gets the same model, so that a stream only reorders its answers.
    """

    pool: ExpertPool
    name: ClassVar[str]
    revision: ClassVar[int] = 1
    static = False
    asks_experts = False  # whether every expert answers batches for it
    looks_ahead = False  # whether it wants the whole target's images before the stream begins
    corrects_mix = False  # whether it is a wrapper that corrects answers for the mix of classes, or has one inside
    # What it cannot do without, beside experts and images: 'base', 'statistics', 'candidates', 'gradients'.
    needs: tuple[str, ...] = field(default=(), init=False)
    # A step can be recorded as a CUDA graph if `advance` reads nothing back to the host, ...
    capturable = False
    weights_follow_state = True  # False where a batch's own BatchNorm statistics are in them, too
    takes_padding = True  # ... a smaller batch can be padded to a recorded size if padding changes no answer, ...
    period = 1  # ... and host decisions depend on the state's whole numbers modulo this period, or `phase` says on what

    def __post_init__(self) -> None:
        """Check the options. A subclass derives what it needs from them afterwards."""
        for about in fields(self):
            if "check" in about.metadata:
                checked = about.metadata["check"](about.name.removesuffix("_"), getattr(self, about.name))
                setattr(self, about.name, checked)
        self.held_from: tuple[Tensor, ...] | None = None  # what the merged weights at hand were merged from
        self.graphs: Graphs | None = None
        self._recorder = recorder_for(self.pool.device)
        self._repeated: tuple[int | None] | None = None  # the graph, or none, that steps must come from; None: any
        self._not_capturable = False  # recording failed once

    def start(self) -> S:
        """The state before the first batch of a stream: empty, unless the method carries something."""
        return State()  # type: ignore[return-value]

    @abstractmethod
    def advance(self, batch: Batch, state: S) -> tuple[Step, S]:
        """Answer one batch: the step, and the state after it. Neither the state nor the pool is changed."""

    def looked_ahead(self, state: S, expert_logits: ExpertLogits) -> S:
        """The state after the experts' logits [K,N,C] on the whole target, where the method `looks_ahead`."""
        return state

    def alarm(self, state: S) -> Tensor | None:
        """A number [] of a state that `before_step` decides by: it travels to the host while the next step runs."""
        return None

    def before_step(self, state: S, alarm: float | None = None) -> S:
        """The state that a step starts from, never found in a graph: it reads the device, or `alarm` on the host."""
        return state

    def phase(self, state: S) -> Hashable | None:
        """What the host decides for the next step, each with a graph of its own; None: take that step eagerly."""
        return tuple(value % self.period for value in numbers(state).values())

    def merged_from(self, state: S) -> tuple[Tensor, ...]:
        """The tensors of a state that its merged weights are a function of."""
        return ()

    def merge_into(self, state: S, out: Tensor) -> None:
        """Write the merged weights of a state into out [P]."""
        raise NotImplementedError

    def merged(self, state: S) -> Tensor:
        """The merged weights [P] of a state, in the method's one buffer: merged anew only if they are others."""
        source = self.merged_from(state)
        if self.held_from is None or any(map(is_not, source, self.held_from)):
            self.merge_into(state, self._buffer)
            self.held_from = source
        return self._buffer

    @cached_property
    def _buffer(self) -> Tensor:
        return self.pool.new_weights()

    @property
    def reuses_weights(self) -> bool:
        """Whether some batches are answered with weights that were merged for an earlier one."""
        return self.period > 1

    def weights(self, state: S) -> Tensor | None:
        """The weights [P] that answer in a state, not a copy; None where no single network answers."""
        return None

    @torch.no_grad()
    def merged_weights(self) -> Tensor | None:
        """The merged weights [P] in use, not a copy; None where no single network answers."""
        return self.weights(self.state)

    @cached_property
    def state(self) -> S:
        """What is carried to the next batch. It is replaced, never changed."""
        return self.start()

    @torch.no_grad()
    def step(
        self,
        images: Tensor | Batch,
        *,
        expert_logits: ExpertLogits | None = None,
        with_experts: bool = False,
        preprocessed: bool = False,
    ) -> Step:
        """Answer one batch. `expert_logits` may hold logits [K,B,C] computed before, by view name or 'original'.

        `with_experts`: the Step also holds the experts' logits. `preprocessed`: accept floats that look like pixels.
        """
        started = time.perf_counter()
        step = None if self._recorder is None else self._replayed(images, expert_logits or {}, with_experts)
        if step is None:
            passes, before = self.pool.passes, self.pool.passes.copy()
            batch = images if isinstance(images, Batch) else Batch(self.pool.prepare(images, preprocessed=preprocessed))
            for view, logits in (expert_logits or {}).items():
                batch.expert_logits[view] = logits.to(self.pool.device)
                batch.given.add(view)
            step, state = self.advance(batch, self.state)
            if not bool(torch.isfinite(step.logits).all()):
                require_finite(step.logits, ANSWER)
            if with_experts:
                step = replace(step, expert_logits=self.pool.logits_of_views(batch)[ORIGINAL])
            self.state, count = state, len(batch.images)
            expert, merged = (
                (passes["expert"] - before["expert"]) / count,
                (passes["merged"] - before["merged"]) / count,
            )
            backward = (passes["backward"] - before["backward"]) / count
            step = replace(step, expert_forwards=expert, merged_forwards=merged, backwards=backward)
        return replace(step, names=self.pool.names, seconds=time.perf_counter() - started)

    def __call__(self, images: Tensor, *, preprocessed: bool = False) -> Tensor:
        return self.step(images, preprocessed=preprocessed).logits

    @torch.no_grad()
    def look_ahead(self, images: Tensor | Batch) -> None:
        """Show the whole target, without labels, to a method that `looks_ahead`: before the first step."""
        batch = images if isinstance(images, Batch) else Batch(self.pool.prepare(images))
        self.state = self.looked_ahead(self.state, self.pool.logits_of_views(batch))

    def settle(self) -> None:
        """Wait for the device, and refuse now what a captured step could not refuse at once."""
        if self.graphs is not None:
            self.graphs.look(self, wait=True)

    def repeat(self, graph: int | None) -> None:
        """Take steps from now on as a Step with this `graph` was taken: for the same bits on the same device."""
        self._repeated = (graph if graph is None else whole_number("graph", graph, low=1),)

    def _replayed(self, images: Tensor | Batch, expert_logits: ExpertLogits, with_experts: bool) -> Step | None:
        """The step from a CUDA graph; None where it is to be taken eagerly."""
        if self._not_capturable or not (self.pool.execution.capture and self.capturable):
            return None
        if isinstance(images, Batch):
            expert_logits, images = images.expert_logits, images.images
        if not isinstance(images, Tensor) or images.ndim != 4 or not len(images):
            return None  # the eager step refuses it
        try:
            with torch.inference_mode(False), torch.no_grad():
                assert self._recorder is not None
                self.graphs = self.graphs or Graphs(self._recorder)
                step = self.graphs.step(self, images, expert_logits, with_experts)
        except MergestreamError:
            raise
        except Exception as error:
            # Whatever a network does that a graph cannot hold. The eager step is the reference, and always works.
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            log_once(_log, logging.WARNING, f"Steps of '{self.name}' are eager: they cannot be captured ({reason}).")
            self._not_capturable, self.graphs = True, None
            return None
        if step is not None:
            log_once(_log, logging.INFO, f"Steps of '{self.name}' on {self.pool.device} are replayed from CUDA graphs.")
        return step

    @classmethod
    def option_names(cls) -> list[str]:
        """Names of the options. Python reserves 'lambda', so that parameter is spelt `lambda_`."""
        return [name.removesuffix("_") for name in cls._parameters()]

    @classmethod
    def _parameters(cls) -> dict[str, inspect.Parameter]:
        """The constructor's options: its own, then those of the classes it is built on."""
        signature = inspect.signature(cls.__init__).parameters
        names = [name for kind in cls.__mro__ for name in vars(kind).get("__annotations__", ()) if name in signature]
        return {name: signature[name] for name in [*names, *signature] if name not in ("self", "pool")}

    def options(self) -> dict[str, Any]:
        """The constructor's options, in a form JSON can hold, as records name them."""
        unnamed = {a.name for a in fields(self) if a.metadata.get("later") and getattr(self, a.name) == a.default}
        return {n.removesuffix("_"): plain(getattr(self, n)) for n in self._parameters() if n not in unnamed}

    def label(self) -> str:
        """Its name with the options that differ from their defaults, for tables."""
        defaults = {n.removesuffix("_"): plain(p.default) for n, p in self._parameters().items()}
        return str(Variant(self.name, tuple((n, value) for n, value in self.options().items() if value != defaults[n])))

    def asked_views(self) -> tuple[str, ...]:
        """The views of a batch that the experts answer for it."""
        return tuple(getattr(self, "views", ()))

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options().items())
        return f"{type(self).__name__}({options})"

    def require_statistics(self, pool: ExpertPool) -> None:
        """Refuse a pool of other experts whose sites shipped no statistics that this method merges by."""

    def reset(self) -> None:
        """Forget the stream, keep the options."""
        if self.graphs is not None:
            self.graphs.forget()
        vars(self).pop("state", None)

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on in the middle of a stream, in another process."""
        return {**self.provenance, "state": to_plain(self.state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping):
            raise InputError(f"A method's state is what state_dict() gave, not {type(state).__name__}.")
        for key, value in self.provenance.items():
            if state.get(key) != value and not (key == "revision" and key not in state):  # as earlier versions saved it
                raise InputError(f"This state is of another {key}: {state.get(key)!r}, not {value!r}.")
        if "state" not in state:
            raise InputError("This is not a method's state: 'state' is missing in it.")
        self.state = self.read_state(state["state"])

    def read_state(self, plain: Mapping[str, Any]) -> S:
        """A state from its plain form; refused with a sentence where it does not fit this method and pool."""
        try:
            return from_plain(self.start(), plain, self.pool.device)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(f"This state does not fit '{self.name}' on this pool: {error}.") from error

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """Everything that answers depend on, beside images and state: run hashes, state checks, audit lines go by it.

        pool    hash of the experts' weights, order and classes, the network, its preprocessing and its type of numbers
        plugin  package and source hash of a method that is not mergestream's own
        cards   values that the method resolved from the experts' cards: another card is another value, or no change
        """
        described = {
            "method": self.name,
            "revision": self.revision,
            "plugin": plugin_provenance(type(self)),
            "options": self.options(),
            "wrapped": self.wrapped(),
            "pool": self.pool.fingerprint(),
            "base": self.pool.base_fingerprint() if "base" in self.needs else None,
            **self.source_hashes(),
            "cards": self.card_values() or None,
        }
        return {name: value for name, value in described.items() if value is not None}

    def wrapped(self) -> dict[str, Any] | None:
        """Method, revision and options of the base that a wrapper asks."""
        return None

    def source_hashes(self) -> dict[str, str]:
        """Hashes of statistics or candidates, where it merges by them."""
        return {}

    def card_values(self) -> dict[str, Any]:
        """What it resolved from the experts' cards, exactly, in a form JSON can hold."""
        return {}
