"""Result of one step, and what a method carries from batch to batch.

A state is a frozen dataclass of tensors and numbers; parts of it may be states themselves. The plain form of a state
is one flat dict: it is what is saved, hashed and written into audit lines. A field that is None is left out of it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from mergestream.functional.coefficients import uniform

# Metadata of fields: how they change when experts leave or join the pool. Without it they stay as they are.
COEFFICIENTS = {"experts": "coefficients"}  # [K]: who leaves is masked, the rest renormalised; who joins starts at 0
PER_EXPERT = {"experts": "per expert"}  # [K,...]: who joins starts with the mean of the others
OF_ALL_EXPERTS = {"experts": "of all experts"}  # starts anew
INSEPARABLE = {"experts": "inseparable"}  # cannot be carried over: the whole stream starts anew
PART = {"prefix": ""}  # a state itself; its keys in the plain form begin with the prefix


@dataclass(frozen=True)
class State:
    """Base of all states, and the state of a method that carries nothing."""


S = TypeVar("S", bound=State)


@dataclass(frozen=True)
class Step:
    """Result of one step: logits [B,C], and one number per expert [K] where the method has them."""

    logits: Tensor
    encoder_coefficients: Tensor | None = None
    head_coefficients: Tensor | None = None
    entropy: Tensor | None = None
    scores: Tensor | None = None
    consistency: Tensor | None = None
    head_expert_index: Tensor | None = None
    # Multipliers of the task vectors, [K] or one per tensor [K,L]: any number, not a share.
    lambdas: Tensor | None = None
    # What was added to every image's logits, by class [C]: the shift of the head's bias.
    class_shift: Tensor | None = None
    # The experts' own logits [K,B,C] on the batch; only with step(..., with_experts=True).
    expert_logits: Tensor | None = None
    # How often an image passed through an expert, through a merged model, and backwards, on average over the batch.
    # Expert logits that were given to the step count as if it had run the experts.
    expert_forwards: float | None = None
    merged_forwards: float | None = None
    backwards: float | None = None
    graph: int | None = None  # batch size of the CUDA graph that was replayed; None for an eager step
    names: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def head_expert(self) -> str | None:
        return None if self.head_expert_index is None else self.names[int(self.head_expert_index)]


def to_plain(state: State) -> dict[str, Any]:
    """One flat dict that shares no memory with the state."""
    return {
        key: _nested(value, lambda tensor: tensor.detach().clone())
        for key, _, value in _walk(state)
        if value is not None
    }


def from_plain(start: S, plain: Mapping[str, Any], device: torch.device) -> S:
    """A state from its plain form; what is missing is as at the start of a stream."""
    unknown = plain.keys() - {key for key, _, _ in _walk(start)}
    if unknown:
        raise ValueError(f"it holds {', '.join(sorted(map(repr, unknown)))}, which this method does not carry")

    def read(key: str, about: Field[Any], initial: Any) -> Any:
        value = plain.get(key)
        if value is None:
            return initial
        if isinstance(initial, Tensor):
            if value.shape != initial.shape:
                raise ValueError(f"'{key}' has the shape {tuple(value.shape)}, not {tuple(initial.shape)}")
            return value.to(device, initial.dtype)
        if isinstance(initial, list) and initial and len(value) != len(initial):
            raise ValueError(f"'{key}' is of {len(value)} experts, not {len(initial)}")
        rebuild = about.metadata.get("read") or (lambda nested: nested)
        return rebuild(_nested(value, lambda tensor: tensor.to(device)))

    return _mapped(start, read)


def tensors(state: State) -> dict[str, Tensor]:
    """The tensors among the fields, by their key in the plain form."""
    return {key: value for key, _, value in _walk(state) if isinstance(value, Tensor)}


def replaced(state: S, values: Mapping[str, Any]) -> S:
    """The state with other values of some fields, by their key in the plain form."""
    return _mapped(state, lambda key, _, value: values.get(key, value))


def numbers(state: State) -> dict[str, int]:
    """Whole numbers among the fields, by their key: what `advance` decides by on the host."""
    return {key: value for key, _, value in _walk(state) if isinstance(value, int)}


def leaves(value: Any) -> list[Tensor]:
    """Every tensor inside a state, a dict or a list."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value):
        value = [getattr(value, each.name) for each in fields(value)]
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return [leaf for item in items for leaf in leaves(item)]


def for_experts(state: S, before: Sequence[str], start: S, after: Sequence[str]) -> S | None:
    """The state on other experts, by the marks of its fields; `start` is the start of a stream on those.

    None where a field cannot be carried over, so that the stream has to start anew.
    """
    if list(before) == list(after):
        return state
    if any(about.metadata.items() >= INSEPARABLE.items() for _, about, _ in _walk(state)):
        return None if leaves(state) else start
    initial = {key: value for key, _, value in _walk(start)}

    def carried(key: str, about: Field[Any], value: Any) -> Any:
        if value is None or "experts" not in about.metadata:
            return value
        if about.metadata == COEFFICIENTS:
            return _renormalised(value, before, after)
        return _rows(value, before, after) if about.metadata == PER_EXPERT else initial.get(key)

    return _mapped(state, carried)


@cache
def _fields(kind: Any) -> list[tuple[str, Field[Any], str | None]]:
    """Name, field and prefix; graphs need them for every step, and `fields` is slow."""
    return [(about.name, about, about.metadata.get("prefix")) for about in fields(kind)]


def _walk(state: State, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any]]:
    """Key in the plain form, field and value of everything that is not a state itself."""
    for name, about, own in _fields(type(state)):  # type: ignore[arg-type]
        value = getattr(state, name)
        if isinstance(value, State):
            yield from _walk(value, prefix + (own or ""))
        elif own is None:  # else a part that is absent
            yield prefix + name, about, value


def _mapped(state: S, change: Callable[[str, Field[Any], Any], Any], prefix: str = "") -> S:
    values = {}
    for name, about, own in _fields(type(state)):  # type: ignore[arg-type]
        value = getattr(state, name)
        if isinstance(value, State):
            value = _mapped(value, change, prefix + (own or ""))
        elif own is None:
            value = change(prefix + name, about, value)
        values[name] = value
    return type(state)(**values)


def _nested(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A plain form of nested values with their tensors changed."""
    if isinstance(value, Tensor):
        return change(value)
    if is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _nested(item, change) for key, item in value.items()}
    return [_nested(item, change) for item in value] if isinstance(value, list | tuple) else value


def _renormalised(values: Tensor, before: Sequence[str], after: Sequence[str]) -> Tensor:
    shares = dict(zip(before, values.tolist(), strict=True))
    left = torch.tensor([shares.get(name, 0.0) for name in after], dtype=values.dtype, device=values.device)
    total = left.sum()
    return left / total if bool(total > 0) else uniform(len(after), values.device)


def _rows(rows: Tensor, before: Sequence[str], after: Sequence[str]) -> Tensor:
    own = dict(zip(before, rows, strict=True))
    staying = [own[name] for name in after if name in own]
    usual = torch.stack(staying or list(rows)).mean(dim=0)
    return torch.stack([own.get(name, usual) for name in after])
