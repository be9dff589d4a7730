"""Streams: orders in which samples arrive, pure functions of labels and seed; every sample comes exactly once."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mergestream.runtime.errors import InputError, unknown_name
from mergestream.runtime.option_checks import number, one_of, whole_number

LEAST = 1e-6  # of alpha and delta
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

    @property
    def hash(self) -> str:
        """sha-256 of the batch sizes and the indices."""
        digest = hashlib.sha256(np.array([len(b) for b in self.batches], dtype="<i8").tobytes())
        for batch in self.batches:
            digest.update(batch.astype("<i8").tobytes())
        return digest.hexdigest()


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
    whole_number("batch_size", batch_size, low=1)
    order = np.ascontiguousarray(order, dtype=np.int64)
    return Stream(name, tuple(order[start : start + batch_size] for start in range(0, len(order), batch_size)))


def in_order(count: int, batch_size: int) -> Stream:
    """The data's own order, for results that do not depend on it."""
    return cut_batches("in_order", np.arange(count), batch_size)


def iid(labels: Labels, *, batch_size: int = 32, seed: int = 0) -> Stream:
    """A plain shuffle."""
    return cut_batches("iid", seeded_random(seed).permutation(len(read_labels(labels))), batch_size)


def dirichlet(labels: Labels, *, alpha: float, batch_size: int = 32, seed: int = 0) -> Stream:
    """Each batch draws its own class mix q ~ Dir(alpha), without replacement; used-up classes are left out."""
    number("alpha", alpha, low=LEAST)
    whole_number("batch_size", batch_size, low=1)
    values, random = read_labels(labels), seeded_random(seed)
    remaining = _shuffled_by_class(values, random)
    order: list[int] = []
    for start in range(0, len(values), batch_size):
        log_mix = _log_dirichlet(random, alpha, len(remaining))
        for _ in range(min(batch_size, len(values) - start)):
            # Gumbel-max samples q restricted to non-empty classes, even if their q underflows to 0.
            noise = log_mix - np.log(-np.log(random.uniform(1e-300, 1, len(remaining))))
            noise[[not indices for indices in remaining]] = -np.inf
            order.append(remaining[int(noise.argmax())].pop())
    return cut_batches(f"dirichlet:{alpha:g}", np.array(order), batch_size)


def note(labels: Labels, *, delta: float = 0.1, batch_size: int = 32, seed: int = 0) -> Stream:
    """NOTE's temporally correlated stream: classes split over C chunks by Dir(delta), contiguous inside a chunk."""
    number("delta", delta, low=LEAST)
    values, random = read_labels(labels), seeded_random(seed)
    count = len(np.unique(values))
    smallest = min(10, len(values) // count)
    for _ in range(100):
        chunks = _note_chunks(values, random, delta, count)
        if min(sum(map(len, chunk)) for chunk in chunks) >= smallest:
            break
    order = [np.concatenate([chunk[c] for c in random.permutation(len(chunk))]) for chunk in chunks]
    return cut_batches(f"note:{delta:g}", np.concatenate(order), batch_size)


def sorted_by_label(labels: Labels, *, batch_size: int = 32, seed: int = 0) -> Stream:
    """One class after the other, ascending; shuffled inside a class."""
    values, random = read_labels(labels), seeded_random(seed)
    order = random.permutation(len(values))
    return cut_batches("sorted", order[np.argsort(values[order], kind="stable")], batch_size)


def temporal(
    labels: Labels,
    *,
    acquired: Sequence[Any] | None,
    batch_size: int = 32,
    seed: int = 0,  # noqa: ARG001
) -> Stream:
    """Real acquisition order; samples with equal times stay in the data set's order. `seed` has no effect."""
    if acquired is None:
        raise InputError("These data have no acquisition order. For a temporally correlated stream use 'note:0.1'.")
    values = read_labels(labels)
    if len(acquired) != len(values):
        raise InputError(f"{len(values)} labels but {len(acquired)} acquisition times.")
    return cut_batches("temporal", np.argsort(np.asarray(acquired), kind="stable"), batch_size)


def mixture(
    labels: Labels, *, domains: Sequence[Any] | None, change: str = "smooth", batch_size: int = 32, seed: int = 0
) -> Stream:
    """Mix several target domains whose shares drift ('smooth') or jump ('abrupt') over the stream.

    Every sample gets an arrival time from its domain's density over [0,1]; sorting by it keeps every sample once.
    """
    if domains is None:
        raise InputError("mixture needs the domain of every sample: hold out two or more target domains.")
    values, random = read_labels(labels), seeded_random(seed)
    names = np.asarray(domains)
    kinds = np.unique(names)
    if len(names) != len(values) or len(kinds) < 2:
        raise InputError(f"mixture needs one domain per label and at least two domains; got {len(kinds)}.")
    one_of("mixture", change, tuple(CHANGES))
    time = np.empty(len(values))
    for position, kind in enumerate(random.permutation(kinds)):
        mine = names == kind
        time[mine] = CHANGES[change](random, position, len(kinds), int(mine.sum()))
    return cut_batches(f"mixture:{change}", np.argsort(time, kind="stable"), batch_size)


STREAMS: dict[str, tuple[Callable[..., Stream], str | None]] = {
    "iid": (iid, None),
    "dirichlet": (dirichlet, "alpha"),
    "note": (note, "delta"),
    "sorted": (sorted_by_label, None),
    "temporal": (temporal, None),
    "mixture": (mixture, "change"),
}


def parse_stream(spec: str) -> tuple[str, dict[str, Any]]:
    """Parse a stream written as 'name' or 'name:value' into its name and options."""
    name, _, value = spec.partition(":")
    if name not in STREAMS:
        raise unknown_name("stream", name, STREAMS)
    parameter = STREAMS[name][1]
    if value and parameter is None:
        raise InputError(f"The stream '{name}' takes no value; got '{spec}'.")
    if not value and parameter == "alpha":
        raise InputError(f"Write the stream '{name}' with its number, for example '{name}:0.05'.")
    if not value or parameter is None:
        return name, {}
    if parameter == "change":
        return name, {parameter: one_of(name, value, tuple(CHANGES))}
    try:
        parsed = float(value)
    except ValueError:
        raise InputError(f"'{value}' in the stream '{spec}' is not a number.") from None
    return name, {parameter: number(parameter, parsed, low=LEAST)}


def create_stream(spec: str, labels: Labels, *, batch_size: int = 32, seed: int = 0, **columns: Any) -> Stream:
    """Create a stream written as 'name' or 'name:value'; `columns` may hold `acquired` and `domains`."""
    name, options = parse_stream(spec)
    if column := {"temporal": "acquired", "mixture": "domains"}.get(name):
        options[column] = columns.get(column)
    return STREAMS[name][0](labels, batch_size=batch_size, seed=seed, **options)


def _shuffled_by_class(values: np.ndarray, random: np.random.RandomState) -> list[list[int]]:
    return [random.permutation(np.flatnonzero(values == c)).tolist() for c in np.unique(values)]


def _log_dirichlet(random: np.random.RandomState, alpha: float, count: int) -> np.ndarray:
    """log q for q ~ Dir(alpha·1), up to a constant: Gamma(a) = Gamma(a+1)·U^(1/a), which at small a underflows."""
    return np.log(random.gamma(alpha + 1, size=count)) + np.log(random.uniform(1e-300, 1, count)) / alpha


def _note_chunks(values: np.ndarray, random: np.random.RandomState, delta: float, count: int) -> list[list[np.ndarray]]:
    chunks: list[list[np.ndarray]] = [[] for _ in range(count)]
    for indices in _shuffled_by_class(values, random):
        full = np.array([sum(map(len, chunk)) >= len(values) / count for chunk in chunks])
        log_share = np.where(full, -np.inf, _log_dirichlet(random, delta, count))
        share = np.exp(log_share - log_share.max())
        cuts = np.floor(np.cumsum(share / share.sum()) * len(indices)).astype(int)[:-1]
        for chunk, part in zip(chunks, np.split(np.array(indices, dtype=np.int64), cuts), strict=True):
            chunk.append(part)
    return chunks


def _smooth_arrivals(random: np.random.RandomState, position: int, count: int, size: int) -> np.ndarray:
    """Raised-cosine bumps with evenly spaced centres: each domain fades in as the one before fades out."""
    centre, width = position / (count - 1), 1.5 / (count - 1)
    grid = np.linspace(0, 1, 2001)
    density = 0.02 + np.where(abs(grid - centre) < width, 1 + np.cos(np.pi * (grid - centre) / width), 0)
    cumulative = np.cumsum(density)
    return np.interp(random.uniform(size=size), cumulative / cumulative[-1], grid)


def _abrupt_arrivals(random: np.random.RandomState, position: int, count: int, size: int) -> np.ndarray:
    """Two rounds of segments; a domain has 9 of 10 samples in its own segments and few elsewhere."""
    segments = np.arange(2 * count)
    share = np.where(segments % count == position, 0.45, 0.1 / max(2 * count - 2, 1))
    chosen = random.choice(segments, size=size, p=share / share.sum())
    return (chosen + random.uniform(size=size)) / (2 * count)


CHANGES = {"smooth": _smooth_arrivals, "abrupt": _abrupt_arrivals}
