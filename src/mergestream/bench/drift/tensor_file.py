"""Reads a safetensors file in slices, none of which stays in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mergestream.pool.checkpoint import DTYPES
from mergestream.runtime.errors import CheckpointError

# Numbers in a slice: half a megabyte in float64, so that a pool of twenty experts still needs little memory.
SLICE = 1 << 16


class TensorFile:
    """One expert's weights on disk."""

    def __init__(self, path: Path, owner: str) -> None:
        self.path, self.owner = path, owner

    def floating_shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the floating tensors, without reading one."""
        with safe_open(str(self.path), framework="pt") as file:
            headers = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118
            return [(name, tuple(header.get_shape())) for name, header in headers if header.get_dtype() in DTYPES]

    def slices(self, name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
        """A tensor as float64 vectors of about SLICE numbers, cut along its first dimension."""
        rows = shape[0] if shape else 1
        step = max(1, SLICE // max(1, math.prod(shape[1:])))
        for start in range(0, rows, step):
            yield self._read(name, shape, slice(start, min(start + step, rows)))

    def _read(self, name: str, shape: tuple[int, ...], rows: slice) -> Tensor:
        try:
            # Opened anew each time: mapped pages count as this process's memory until the file is closed.
            with safe_open(str(self.path), framework="pt") as file:
                own_shape = tuple(file.get_slice(name).get_shape())
                if own_shape != shape:
                    raise CheckpointError(
                        f"'{self.owner}': '{name}' has shape {own_shape}, the pool's network needs {shape}. "
                        f"Run 'mergestream pool verify'."
                    )
                part = file.get_slice(name)[rows] if shape else file.get_tensor(name)
                numbers = part.reshape(-1).to(torch.float64, copy=True)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"'{self.owner}': '{name}' cannot be read from {self.path} ({error}). Run 'mergestream pool verify'."
            ) from error
        if not bool(torch.isfinite(numbers).all()):
            raise CheckpointError(f"'{self.owner}': '{name}' holds NaN or Inf. Train or export this expert again.")
        return numbers
