"""A stream: batches of sample indices in order of arrival, and what every maker of streams shares."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mergestream.runtime.errors import InputError
from mergestream.runtime.option_checks import whole_number

Labels = Any  # any one-dimensional sequence of integers: list, array or tensor


@dataclass(frozen=True)
class Stream(Sequence[np.ndarray]):
    """Batches of sample indices, in order of arrival."""

    name: str
    batches: tuple[np.ndarray, ...]
    repeats: bool = False  # samples may come more than once
    lone: int | None = None  # the class of which no batch has more than one image

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, position: Any) -> Any:
        return self.batches[position]

    @property
    def hash(self) -> str:
        """sha-256 of the batch sizes and the indices."""
        digest = hashlib.sha256(np.array([len(b) for b in self.batches], dtype="<i8").tobytes())
        for batch in self.batches:
            digest.update(batch.astype("<i8").tobytes())
        return digest.hexdigest()


def seeded_random(seed: int, *purpose: int) -> np.random.RandomState:
    """Random numbers of a seed; those of another `purpose` are independent of them."""
    if not isinstance(seed, int | np.integer) or not 0 <= seed < 2**32:
        raise InputError(f"A seed is a whole number from 0 to 2**32 - 1, got {seed!r}.")
    # RandomState, not Generator: numpy freezes its sequences, so a stream's hash holds across versions.
    return np.random.RandomState([seed, *purpose] if purpose else seed)


def read_labels(labels: Labels) -> np.ndarray:
    values = np.asarray(labels)
    if values.ndim != 1 or len(values) == 0:
        raise InputError(f"A stream needs a non-empty list of labels, got shape {values.shape}.")
    if not np.issubdtype(values.dtype, np.integer) or values.min() < 0:
        raise InputError(f"Labels are whole numbers from 0, got {values.dtype} with minimum {values.min()}.")
    return values.astype(np.int64)


def shuffled_by_class(values: np.ndarray, random: np.random.RandomState) -> list[list[int]]:
    """Shuffled indices of each class that occurs, in the order of the classes."""
    return [random.permutation(np.flatnonzero(values == c)).tolist() for c in np.unique(values)]


def cut(order: np.ndarray, batch_size: int) -> tuple[np.ndarray, ...]:
    whole_number("batch_size", batch_size, low=1)
    order = np.ascontiguousarray(order, dtype=np.int64)
    return tuple(order[start : start + batch_size] for start in range(0, len(order), batch_size))


def cut_batches(name: str, order: np.ndarray, batch_size: int) -> Stream:
    return Stream(name, cut(order, batch_size))


def in_order(count: int, batch_size: int) -> Stream:
    """The data's own order, for results that do not depend on it."""
    return cut_batches("in_order", np.arange(count), batch_size)
