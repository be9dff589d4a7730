"""Layout of a network's tensors in one flat vector [P]: encoder parameters, float buffers, then the head."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from mergestream.runtime.errors import CheckpointError, NetworkError

Integers = dict[str, Tensor]
# Tensors start at multiples of this many numbers, like separate allocations: kernels choose by alignment.
ALIGNMENT = 64
HINT = "It does not belong to this network; check the network's name and arguments."


@dataclass(frozen=True)
class LayoutEntry:
    """One tensor: its name, its place, and other names that are tied to it."""

    name: str
    shape: torch.Size
    start: int
    stop: int
    end: int  # start of the next tensor; the padding between is zero
    is_parameter: bool
    tied: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Places of all tensors in the flat vector; integer buffers are listed apart."""

    entries: tuple[LayoutEntry, ...]
    integers: dict[str, tuple[torch.Size, torch.dtype]]
    encoder_size: int
    size: int

    @classmethod
    def of(cls, module: nn.Module, head: tuple[str, ...]) -> "Layout":
        """Lay out a module. Floating buffers belong to the encoder wherever they are: they follow its coefficients."""
        names = _persistent_names(module)
        parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        floats = {name: tensor for name, tensor in names.items() if tensor.is_floating_point()}
        groups = _tied(floats)
        in_head = [n for n in groups if n in parameters and n.startswith(tuple(f"{part}." for part in head))]
        if not in_head:
            raise NetworkError(f"No parameter of {type(module).__name__} lies under its head {head}.")
        encoder = [n for n in groups if n in parameters and n not in in_head]
        encoder += [n for n in groups if n not in parameters]
        entries, start = [], 0
        for name in encoder + in_head:
            shape = floats[name].shape
            stop = start + shape.numel()
            end = -(-stop // ALIGNMENT) * ALIGNMENT
            entries.append(LayoutEntry(name, shape, start, stop, end, name in parameters, groups[name]))
            start = end
        encoder_size = entries[len(encoder)].start
        integers = {n: (tensor.shape, tensor.dtype) for n, tensor in names.items() if n not in floats}
        return cls(tuple(entries), integers, encoder_size, start)

    @property
    def numbers(self) -> int:
        """How many numbers a row holds, without padding."""
        return sum(entry.stop - entry.start for entry in self.entries)

    @property
    def buffers(self) -> slice:
        """Place of the floating buffers: between the encoder's parameters and the head."""
        starts = [entry.start for entry in self.entries if not entry.is_parameter]
        return slice(starts[0] if starts else self.encoder_size, self.encoder_size)

    @property
    def parameters(self) -> tuple[LayoutEntry, ...]:
        return tuple(entry for entry in self.entries if entry.is_parameter)

    @cached_property
    def required_names(self) -> set[str]:
        """Names that every state dict must have."""
        return {entry.name for entry in self.entries} | set(self.integers)

    @cached_property
    def allowed_names(self) -> set[str]:
        """Required names, and those tied to them."""
        return self.required_names | {name for entry in self.entries for name in entry.tied}

    def write_row(self, state: Mapping[str, Tensor], row: Tensor, owner: str, hint: str = HINT) -> Integers:
        """Copy a state dict into row [P], one tensor at a time, and return its integer buffers."""
        require_names(state, self.required_names, self.allowed_names, owner, hint)
        for entry in self.entries:
            tensor = state[entry.name]
            if tensor.shape != entry.shape:
                raise CheckpointError(
                    f"{owner}: '{entry.name}' has shape {tuple(tensor.shape)}, the network needs {tuple(entry.shape)}. "
                    f"Was it trained with another architecture or class list?"
                )
            if not tensor.is_floating_point():
                raise CheckpointError(f"{owner}: '{entry.name}' is {tensor.dtype}, but the network's is floating.")
            for other in entry.tied:
                if other in state and not torch.equal(state[other], tensor):
                    raise CheckpointError(f"{owner}: '{other}' and '{entry.name}' are tied but differ.")
            row[entry.start : entry.stop].copy_(tensor.reshape(-1))
            row[entry.stop : entry.end].zero_()
        if not _finite(row):  # once for all tensors: a pass over each would cost far more than the copies
            first = next(entry.name for entry in self.entries if not _finite(row[entry.start : entry.stop]))
            raise CheckpointError(
                f"{owner}: '{first}' holds NaN or Inf in {row.dtype}. Train or export this expert again, "
                f"or load it in a wider type."
            )
        return {name: self._integer(state[name], name, owner) for name in self.integers}

    def _integer(self, tensor: Tensor, name: str, owner: str) -> Tensor:
        shape, dtype = self.integers[name]
        if tensor.shape != shape or tensor.dtype != dtype:
            given, needed = f"{tuple(tensor.shape)} {tensor.dtype}", f"{tuple(shape)} {dtype}"
            raise CheckpointError(f"{owner}: the buffer '{name}' is {given}, the network needs {needed}.")
        return tensor.clone()

    def views(self, row: Tensor) -> dict[str, Tensor]:
        """Named tensors that share the memory of row [P]."""
        return {entry.name: row[entry.start : entry.stop].view(entry.shape) for entry in self.entries}

    def attach(self, module: nn.Module, row: Tensor, integers: Integers) -> nn.Module:
        """Make the module's parameters and buffers views of row [P]; nothing is copied."""
        views = self.views(row)
        for entry in self.entries:
            view = views[entry.name]
            value = nn.Parameter(view, requires_grad=False) if entry.is_parameter else view
            for name in (entry.name, *entry.tied):
                _assign(module, name, value)
        for name, integer in integers.items():
            _assign(module, name, integer.to(row.device, copy=True))
        return module

    def call(self, module: nn.Module, parameters: Mapping[str, Tensor], batch: Tensor) -> Any:
        """Run the module with other parameters, through which gradients flow; tied ones are given once."""
        replaced: dict[tuple[int, str], tuple[str, Tensor]] = {}
        for entry in self.entries:
            if entry.name in parameters:
                for name in (entry.name, *entry.tied):
                    parent, _, leaf = name.rpartition(".")
                    # A layer under two names is one place: swapped twice, it would not be restored.
                    replaced[id(module.get_submodule(parent)), leaf] = name, parameters[entry.name]
        return torch.func.functional_call(module, dict(replaced.values()), (batch,), tie_weights=False)

    def strip(self, module: nn.Module) -> nn.Module:
        """Free the module's own weights, keeping its structure and its non-persistent buffers."""
        return self.attach(module, torch.empty(self.size, device="meta"), {}).requires_grad_(False)

    def move_rest(self, module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Move the buffers that are not saved with the weights."""
        for name, buffer in list(module.named_buffers(remove_duplicate=False)):
            if name not in self.allowed_names:
                _assign(module, name, buffer.to(device, dtype if buffer.is_floating_point() else None))
        return module


def _finite(values: Tensor) -> bool:
    """Whether all numbers are finite; takes no memory."""
    return values.numel() == 0 or all(math.isfinite(end) for end in torch.stack(torch.aminmax(values)).tolist())


def require_names(names: Iterable[str], required: set[str], allowed: set[str], owner: str, hint: str) -> None:
    """Refuse a state dict with missing or unexpected tensors, and name them."""
    missing, odd = sorted(required - set(names)), sorted(set(names) - allowed)
    misfits = [
        f"{verb} {len(some)} tensor(s): {', '.join(some[:8])}{', …' if len(some) > 8 else ''}"
        for verb, some in (("lacks", missing), ("has unexpected", odd))
        if some
    ]
    if misfits:
        prefix = odd[0].split(".")[0] if odd else "PREFIX"
        raise CheckpointError(f"{owner} {' and '.join(misfits)}. {hint.format(prefix=prefix)}")


def _persistent_names(module: nn.Module) -> dict[str, Tensor]:
    state = module.state_dict()
    odd = [name for name, value in state.items() if not isinstance(value, Tensor) or value.is_complex()]
    if odd:
        raise NetworkError(f"{type(module).__name__} keeps state that is not a real tensor and cannot merge: {odd}.")
    # state_dict detaches tensors, which hides ties; the live objects show them.
    live = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    missing = [name for name in state if name not in live]
    if missing:
        raise NetworkError(f"{type(module).__name__} keeps extra state that cannot merge: {missing[:3]}.")
    return {name: live[name] for name in state}


def _tied(tensors: dict[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """Map the first name of each distinct tensor to its other names."""
    names = defaultdict(list)
    for name, tensor in tensors.items():
        names[id(tensor)].append(name)
    return {first: tuple(rest) for first, *rest in names.values()}


def _assign(module: nn.Module, name: str, value: Tensor) -> None:
    # setattr, not _parameters[...]: recurrent layers refresh their flat weights in their own __setattr__.
    parent, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(parent), leaf, value)
