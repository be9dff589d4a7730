"""Orders that need a column of the data: time of acquisition, slide or patient, or domain of each sample."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mergestream.data.streams.stream import Labels, Stream, cut_batches, read_labels, seeded_random
from mergestream.runtime.errors import InputError, unknown_name
from mergestream.runtime.option_checks import one_of


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


def slides(
    labels: Labels,
    *,
    groups: Sequence[Any] | None,
    batch_size: int = 32,
    seed: int = 0,  # noqa: ARG001
) -> Stream:
    """One slide or patient after the other, all in the data's own order. `seed` has no effect."""
    if groups is None:
        raise InputError("These data name no slides or patients, so the stream 'slides' has no order to follow.")
    values = read_labels(labels)
    if len(groups) != len(values):
        raise InputError(f"{len(values)} labels but {len(groups)} groups.")
    place = {group: number for number, group in enumerate(dict.fromkeys(groups))}
    return cut_batches("slides", np.argsort([place[group] for group in groups], kind="stable"), batch_size)


def mixture(
    labels: Labels, *, domains: Sequence[Any] | None, change: str = "smooth", batch_size: int = 32, seed: int = 0
) -> Stream:
    """Mix several target domains whose shares drift ('smooth') or jump ('abrupt') over the stream.

    Every sample gets an arrival time from its domain's density over [0,1]; sorting by it keeps every sample once.
    """
    names, random = _several_domains("mixture", labels, domains), seeded_random(seed)
    kinds = np.unique(names)
    one_of("mixture", change, tuple(CHANGES))
    time = np.empty(len(names))
    for position, kind in enumerate(random.permutation(kinds)):
        mine = names == kind
        time[mine] = CHANGES[change](random, position, len(kinds), int(mine.sum()))
    return cut_batches(f"mixture:{change}", np.argsort(time, kind="stable"), batch_size)


def recurrence(
    labels: Labels, *, domains: Sequence[Any] | None, back: str | None = None, batch_size: int = 32, seed: int = 0
) -> Stream:
    """Half of a domain, then the other domains, then its other half: A, B, A.

    `back` is the domain that comes back, by default the first in the data. Samples of a domain are shuffled.
    """
    names, random = _several_domains("recurrence", labels, domains), seeded_random(seed)
    kinds = dict.fromkeys(names.tolist())
    if back is not None and back not in kinds:
        raise unknown_name("domain in this target", back, map(str, kinds))
    first = next(iter(kinds)) if back is None else back
    parts = [random.permutation(np.flatnonzero(names == kind)) for kind in (first, *(k for k in kinds if k != first))]
    if len(parts[0]) < 2:
        raise InputError(f"recurrence splits the domain '{first}' in two halves, but it has one image only.")
    half = (len(parts[0]) + 1) // 2
    order = np.concatenate([parts[0][:half], *parts[1:], parts[0][half:]])
    return cut_batches("recurrence" if back is None else f"recurrence:{back}", order, batch_size)


def _several_domains(stream: str, labels: Labels, domains: Sequence[Any] | None) -> np.ndarray:
    """The domain of every sample; fewer than two domains are refused."""
    if domains is None:
        raise InputError(f"{stream} needs the domain of every sample: hold out two or more target domains.")
    names, kinds = np.asarray(domains), len(set(domains))
    if len(names) != len(read_labels(labels)) or kinds < 2:
        raise InputError(f"{stream} needs one domain per label and at least two domains; got {kinds}.")
    return names


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
