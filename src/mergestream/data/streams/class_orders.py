"""Orders that follow from the labels: shuffled, skewed, sorted, and lone positives."""

import numpy as np

from mergestream.data.streams.stream import (
    Labels,
    Stream,
    cut,
    cut_batches,
    read_labels,
    seeded_random,
    shuffled_by_class,
)
from mergestream.runtime.errors import InputError
from mergestream.runtime.option_checks import number, whole_number

LEAST = 1e-6  # of alpha and delta


def iid(labels: Labels, *, batch_size: int = 32, seed: int = 0) -> Stream:
    """A plain shuffle."""
    return cut_batches("iid", seeded_random(seed).permutation(len(read_labels(labels))), batch_size)


def dirichlet(labels: Labels, *, alpha: float, batch_size: int = 32, seed: int = 0) -> Stream:
    """Each batch draws its own class mix q ~ Dir(alpha), without replacement; used-up classes are left out."""
    number("alpha", alpha, low=LEAST)
    whole_number("batch_size", batch_size, low=1)
    values, random = read_labels(labels), seeded_random(seed)
    remaining = shuffled_by_class(values, random)
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


def lone(labels: Labels, *, positive: int | None = None, batch_size: int = 32, seed: int = 0) -> Stream:
    """Lone positives: no batch has more than one image of the rare class; batches without any take up the rest.

    `positive` is the rare class, by default the least frequent one. Its images that no batch has room for are left out.
    """
    whole_number("batch_size", batch_size, low=1)
    values, random = read_labels(labels), seeded_random(seed)
    counts = np.bincount(values)
    if positive is None:
        positive = int(np.where(counts > 0, counts, len(values)).argmin())
    rare, others = (random.permutation(np.flatnonzero(mine)) for mine in (values == positive, values != positive))
    if not len(rare) or not len(others):
        raise InputError(f"Lone positives need images of the class and others; here are {len(rare)} and {len(others)}.")
    name = "lone"
    if batch_size == 1:
        return Stream(name, cut(random.permutation(len(values)), 1), lone=positive)
    company = cut(others, batch_size - 1)[: len(rare)]  # of every lone positive
    batches = [np.insert(batch, random.randint(len(batch) + 1), rare[i]) for i, batch in enumerate(company)]
    batches += cut(others[len(company) * (batch_size - 1) :], batch_size)
    short = batches[-1:] if len(batches[-1]) < batch_size else []
    full = batches[: len(batches) - len(short)]
    return Stream(name, (*(full[i] for i in random.permutation(len(full))), *short), lone=positive)


def _log_dirichlet(random: np.random.RandomState, alpha: float, count: int) -> np.ndarray:
    """log q for q ~ Dir(alpha·1), up to a constant: Gamma(a) = Gamma(a+1)·U^(1/a), which at small a underflows."""
    return np.log(random.gamma(alpha + 1, size=count)) + np.log(random.uniform(1e-300, 1, count)) / alpha


def _note_chunks(values: np.ndarray, random: np.random.RandomState, delta: float, count: int) -> list[list[np.ndarray]]:
    chunks: list[list[np.ndarray]] = [[] for _ in range(count)]
    for indices in shuffled_by_class(values, random):
        full = np.array([sum(map(len, chunk)) >= len(values) / count for chunk in chunks])
        log_share = np.where(full, -np.inf, _log_dirichlet(random, delta, count))
        share = np.exp(log_share - log_share.max())
        cuts = np.floor(np.cumsum(share / share.sum()) * len(indices)).astype(int)[:-1]
        for chunk, part in zip(chunks, np.split(np.array(indices, dtype=np.int64), cuts), strict=True):
            chunk.append(part)
    return chunks
