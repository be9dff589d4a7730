"""A stream: batches of sample indices in order of arrival, and the checks that every stream shares."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mergestream.runtime.errors import InputError

Labels = Any  # any one-dimensional sequence of integers: list, array or tensor


@dataclass(frozen=True)
class Stream(Sequence[np.ndarray]):
    """Batches of sample indices, in order of arrival."""

    name: str
    batches: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, position: Any) -> Any:
        return self.batches[position]

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self.batches)

    @property
    def hash(self) -> str:
        """sha-256 of the batch sizes and the indices."""
        digest = hashlib.sha256(np.array([len(b) for b in self.batches], dtype="<i8").tobytes())
        for batch in self.batches:
            digest.update(batch.astype("<i8").tobytes())
        return digest.hexdigest()

    def majority_share(self, labels: Labels) -> float:
        """Mean over batches of the most frequent class's share of a batch."""
        values = read_labels(labels)
        return float(np.mean([np.bincount(values[batch]).max() / len(batch) for batch in self.batches]))


def require_positive(stream: str, parameter: str, value: float) -> None:
    if not 1e-6 <= value < np.inf:
        raise InputError(f"{stream} needs {parameter} above 0 (at least 1e-6) and finite, got {value}.")


def require_batch_size(batch_size: int) -> None:
    if not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise InputError(f"A batch holds at least one sample, got batch_size={batch_size}.")


def seeded_random(seed: int) -> np.random.RandomState:
    if not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise InputError(f"A seed is a whole number from 0 to 2**32 - 1, got {seed!r}.")
    # RandomState, not Generator: numpy freezes its sequences, so a stream's hash holds across versions.
    return np.random.RandomState(seed)


def read_labels(labels: Labels) -> np.ndarray:
    values = np.asarray(labels)
    if values.ndim != 1 or len(values) == 0:
        raise InputError(f"A stream needs a non-empty list of labels, got shape {values.shape}.")
    if not np.issubdtype(values.dtype, np.integer) or values.min() < 0:
        raise InputError(f"Labels are whole numbers from 0, got {values.dtype} with minimum {values.min()}.")
    return values.astype(np.int64)


def cut_batches(name: str, order: np.ndarray, batch_size: int) -> Stream:
    require_batch_size(batch_size)
    order = np.ascontiguousarray(order, dtype=np.int64)
    return Stream(name, tuple(order[start : start + batch_size] for start in range(0, len(order), batch_size)))
