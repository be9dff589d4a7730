"""The state of a stream: carried from batch to batch, to other experts, and over a restart, bit for bit.

A small state is JSON, in its audit line and in its stream's file. A large one is a file of its own, and the line holds
its hash.
"""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergestream.methods import State
from mergestream.methods.state import for_experts, tensors, to_plain
from mergestream.pool.expert_pool import sha256_of_tensor
from mergestream.runtime.errors import CheckpointError, MergestreamError
from mergestream.runtime.files import sha256_of_json
from mergestream.runtime.json_record import parsed
from mergestream.serving.audit.lines import Encoded, canonical
from mergestream.serving.engine.lineup import Lineup
from mergestream.serving.guards.stream_guards import Memory

MOST_NUMBERS = 4096  # of a state inside an audit line
CONTENT_SHA256 = "content_sha256"  # the only field of a larger one
SPELT_OUT = 256  # numbers of a tensor that are written as numbers
OTHER_POOL = "the pool was loaded again, and its experts are others."
OTHER_METHOD = "the service was started with another method or other options."
CHANGED_EXPERTS = "the pool's experts were changed, and this method learns from all of them together."
OTHER_EXPERTS = "an expert was switched on or off, and this method learns from all of them together."


@dataclass(frozen=True)
class StreamState:
    """The method's state on these experts, and the guard rails' memory."""

    pool_sha256: str
    provenance: str  # hash of all that the answers depend on
    experts: tuple[str, ...]
    method: State | None  # None at the start of a stream
    memory: Memory
    # sha-256 of the experts' weights: a state goes on with those that a changed pool still has. Not in the JSON.
    weights: tuple[str, ...] = field(default=(), compare=False)
    cards: str = field(default="", compare=False)  # hash of the experts' cards. Not in the JSON.

    @cached_property
    def content(self) -> dict[str, Any]:
        """JSON values, and the method's tensors."""
        about = {"pool_sha256": self.pool_sha256, "provenance": self.provenance, "experts": list(self.experts)}
        method = {} if self.method is None else to_plain(self.method)
        return {**about, "method": method, "guards": self.memory.to_json()}

    @cached_property
    def is_large(self) -> bool:
        return _numbers(self.content) > MOST_NUMBERS

    @cached_property
    def sha256(self) -> str:
        return sha256_of_json({**self.content, "method": self.method_sha256})

    @cached_property
    def method_sha256(self) -> str:
        """Hash of the part that the merged model follows from."""
        return method_sha256(self.content["method"])

    @cached_property
    def in_line(self) -> dict[str, Any]:
        """The state as an audit line holds it: whole, or its hash where it is too large."""
        return {CONTENT_SHA256: self.sha256} if self.is_large else encoded(self.content)

    @cached_property
    def encoded_in_line(self) -> Encoded:
        """Encoded once for its line, the next one and its stream's file."""
        return Encoded(canonical(self.in_line))

    def as_logged(self, logged: Mapping[str, Any]) -> dict[str, Any]:
        """The state in the form of a line. Lines of version 0.1 hold the hash of a large state's JSON."""
        return {"sha256": sha256_of_json(encoded(self.content))} if logged.keys() == {"sha256"} else self.in_line

    @classmethod
    def start(cls, lineup: Lineup) -> "StreamState":
        identity = lineup.identity
        names = lineup.active.names
        hashes = _hashes(lineup, names), lineup.cards_sha256
        return cls(identity["pool_sha256"], identity["provenance"], names, None, Memory(), *hashes)

    @classmethod
    def from_content(cls, value: Mapping[str, Any], lineup: Lineup) -> "StreamState":
        """Read a state, with its tensors or as JSON, on the line-up's pool, of whichever experts it is."""
        try:
            plain, experts = decoded(value["method"]), tuple(value["experts"])
            own = lineup.of(experts)
            method = own.active_method.read_state(plain) if plain else None
            memory, hashes = parsed(Memory, value["guards"]), (_hashes(lineup, experts), own.cards_sha256)
            return cls(value["pool_sha256"], value["provenance"], experts, method, memory, *hashes)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"This is not the state of a stream: {error!r}.") from error

    def on(self, lineup: Lineup) -> "tuple[StreamState, str | None]":
        """The state to go on from with the experts in use, and the reason if the stream starts anew."""
        start, experts = StreamState.start(lineup), lineup.active.names
        if not belongs_to({"pool_sha256": self.pool_sha256, "provenance": self.provenance}, lineup):
            return self._on_another_pool(start, lineup)
        if self.experts == experts:
            return self, None
        if self.method is None:
            return start, None
        method = for_experts(self.method, self.experts, lineup.active_method.start(), experts)
        if method is None:
            return start, OTHER_EXPERTS
        return replace(start, method=method), None

    def _on_another_pool(self, start: "StreamState", lineup: Lineup) -> "tuple[StreamState, str | None]":
        """The state on a pool with other experts, carried over for those that stayed as they were."""
        before, after = self._versions(), start._versions()
        # The same experts may be left of two pools. But their cards may be others, too.
        other_cards = before == after and self.cards != start.cards
        if not set(before) & set(after) or other_cards:
            return start, OTHER_POOL
        if self.method is None:
            return start, None
        initial = lineup.active_method.start()
        method = for_experts(self.method, before, initial, after)
        if method is None:
            return start, CHANGED_EXPERTS
        shapes, expected = ({key: each.shape for key, each in tensors(state).items()} for state in (method, initial))
        return (replace(start, method=method), None) if shapes == expected else (start, OTHER_POOL)

    def _versions(self) -> list[str]:
        """Each expert with the hash of its weights; one without a hash is nobody else."""
        pairs = zip(self.experts, self.weights or [""] * len(self.experts), strict=True)
        return [f"{name} {sha256 or id(self)}" for name, sha256 in pairs]


def _hashes(lineup: Lineup, experts: Sequence[str]) -> tuple[str, ...]:
    hashes = {card.name: card.weights_sha256 for card in lineup.pool.cards}
    return tuple(hashes.get(name, "") for name in experts)


def belongs_to(state: Mapping[str, Any], lineup: Lineup) -> bool:
    """Whether answers still depend on the weights, cards, options and code that a state, as JSON, was computed with."""
    return all(state[name] == lineup.identity[name] for name in ("pool_sha256", "provenance"))


def restored(
    saved: Mapping[str, Any], lineup: Lineup, read_large: Callable[[str, str], dict[str, Any]]
) -> tuple[StreamState | None, str | None]:
    """The state that an earlier process saved, or the reason why the stream starts anew.

    `read_large`: the content of a large state by its stream's name and its hash.
    """
    state = saved.get("state")
    if saved.get("lost") or state is None:
        return None, saved.get("lost")
    if (saved["method"], saved["options"]) != (lineup.method, lineup.options):
        return None, OTHER_METHOD
    try:
        if not is_whole(state):
            state = read_large(saved["stream"], state[CONTENT_SHA256])
        return (StreamState.from_content(state, lineup), None) if belongs_to(state, lineup) else (None, OTHER_POOL)
    except (KeyError, TypeError):
        return None, "its saved state cannot be read."
    except MergestreamError as error:
        return None, str(error)


def is_whole(state: Mapping[str, Any] | None) -> bool:
    return state is None or "method" in state


def content_sha256(content: Mapping[str, Any]) -> str:
    """`StreamState.sha256` of a state's content."""
    return sha256_of_json({**content, "method": method_sha256(content["method"])})


def method_sha256(plain: Mapping[str, Any]) -> str:
    """Hash of a method's state, whatever kind of file it is in: of its JSON, which has the hashes of longer tensors."""
    return sha256_of_json(encoded(plain, _hashed))


def _hashed(tensor: Tensor) -> dict[str, str]:
    return {"sha256": sha256_of_tensor(tensor)}


def _written(tensor: Tensor) -> dict[str, str]:
    return {"base64": base64.b64encode(tensor.view(torch.uint8).numpy().tobytes()).decode()}


def encoded(value: Any, longer: Callable[[Tensor], dict[str, str]] = _written) -> Any:
    """Nested tensors, numbers and text as JSON, bit for bit: a 32-bit number is read back from its digits as it was.

    `longer`: how tensors above a few numbers are written.
    """
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        about = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        return {**about, **({"values": flat.tolist()} if flat.numel() <= SPELT_OUT else longer(flat))}
    if isinstance(value, Mapping):
        return {str(key): encoded(item, longer) for key, item in value.items()}
    return [encoded(item, longer) for item in value] if isinstance(value, list | tuple) else value


def decoded(value: Any) -> Any:
    """What `encoded` was given."""
    if isinstance(value, Mapping) and value.keys() >= {"dtype", "shape"}:
        dtype = getattr(torch, value["dtype"])
        if "values" in value:
            return torch.tensor(value["values"], dtype=dtype).reshape(value["shape"])
        raw = torch.from_numpy(np.frombuffer(base64.b64decode(value["base64"]), dtype=np.uint8).copy())
        return raw.view(dtype).reshape(value["shape"])
    if isinstance(value, Mapping):
        return {key: decoded(item) for key, item in value.items()}
    return [decoded(item) for item in value] if isinstance(value, list) else value


def _numbers(value: Any) -> int:
    """How many numbers and texts a state holds."""
    if isinstance(value, Tensor):
        return value.numel()
    items = value.values() if isinstance(value, Mapping) else value
    return sum(map(_numbers, items)) if isinstance(value, Mapping | list | tuple) else 1
