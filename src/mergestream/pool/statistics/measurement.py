"""Statistics that experts' sites measure on their own images, so that merging needs no image of theirs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from mergestream.functional.scores import require_finite
from mergestream.networks.architecture import logits_of
from mergestream.pool.blockwise import BlockwiseOptions, OnBatch, merge_block_by_block
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.statistics import FISHERS, Grams, Statistics, add_grams, information, watch_inputs
from mergestream.runtime.errors import CheckpointError, InputError, NetworkError, unknown_name
from mergestream.runtime.option_checks import number, whole_number, yes_or_no

BLOCKWISE = "gram_pp"
KINDS = ("gram", *(f"fisher_{kind}" for kind in FISHERS), BLOCKWISE)
Images = Tensor | Iterable[Any]


def measure_statistics(
    pool: ExpertPool,
    images: Mapping[str, Images],
    kinds: Sequence[str] = ("gram", "fisher_exact"),
    *,
    batch_size: int = 32,
    ratio: float = 1.0,
    ridge: float = 0.01,
    convolutions: bool = True,
    on_batch: OnBatch = lambda: None,
) -> ExpertPool:
    """The pool with statistics of the experts named in `images`, each measured on its own site's images.

    Images are one tensor [N,c,H,W], or batches of them one after the other (a DataLoader's). A site that has only its
    own expert gives a pool of one, and sends its folder after `save`. Kinds: 'gram' (for regmean), 'fisher_exact' and
    'fisher_mergelm' (for fisher). 'gram_pp' (for regmean_pp) takes a round for every block, in which all experts' sites
    take part, so it needs the images of all of them, and belongs to one `ratio`, `ridge` and `convolutions`.
    """
    wanted = _checked_kinds(kinds)
    whole_number("batch_size", batch_size, low=1)
    settings: BlockwiseOptions = {
        "ratio": number("ratio", ratio, low=0, high=1),
        "ridge": number("ridge", ridge, low=0),
        "convolutions": yes_or_no("convolutions", convolutions),
    }
    if not isinstance(images, Mapping) or not images:
        raise InputError("Give the images of each expert by its name: {'lyon': images, ...}.")
    measured = {name: _known(pool, pool.index(name)) for name in images}
    kept: dict[str, list[Tensor]] = {}
    for name, own in images.items():
        batches: Iterable[Tensor] = _batches(pool, own, batch_size)
        if BLOCKWISE in wanted:
            batches = kept[name] = list(_batches(pool, own, batch_size))
        measured[name] = _measure(pool, name, batches, [k for k in wanted if k != BLOCKWISE], measured[name], on_batch)
    if BLOCKWISE in wanted:
        measured |= _measure_blocks(pool, kept, measured, settings, on_batch)
    return pool.with_statistics(measured)


def _checked_kinds(kinds: Sequence[str]) -> list[str]:
    listed = [kinds] if isinstance(kinds, str) else list(kinds) if isinstance(kinds, Iterable) else []
    if not listed:
        raise InputError(f"Which kinds of statistics? Known: {', '.join(KINDS)}.")
    for kind in listed:
        if kind not in KINDS:
            raise unknown_name("kind of statistics", str(kind), KINDS)
    return listed


def _known(pool: ExpertPool, expert: int) -> Statistics:
    """What the expert has already; statistics that cannot be used are measured anew, not added to."""
    try:
        return pool.statistics_of(expert) or Statistics({}, {})
    except CheckpointError:
        return Statistics({}, {})


def _batches(pool: ExpertPool, images: Images, size: int) -> Iterator[Tensor]:
    """Prepared batches, one at a time."""
    if isinstance(images, Tensor):
        images = images.split(size) if images.ndim else [images]
    if isinstance(images, str | Mapping) or not isinstance(images, Iterable):
        raise InputError(f"Images are a tensor [N,c,H,W] or batches of them; got {type(images).__name__}.")
    found = False
    for batch in images:
        # A DataLoader over labelled data gives images and labels.
        own = batch[0] if isinstance(batch, list | tuple) and batch else batch
        if isinstance(own, Tensor) and len(own.shape) and not len(own):
            continue
        found = True
        yield require_finite(pool.prepare(own), "The input")
    if not found:
        raise InputError("Statistics need at least one image; got none.")


def _measure(
    pool: ExpertPool, name: str, batches: Iterable[Tensor], kinds: list[str], known: Statistics, on_batch: OnBatch
) -> Statistics:
    """One expert's statistics of several kinds, in one pass over its images."""
    expert, count, grams = pool.index(name), 0, Grams()
    totals: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds if kind != "gram"}
    for batch in batches:
        with pool.input_errors(batch):
            if "gram" in kinds:
                grams = add_grams(grams, input_grams(pool, expert, batch))
            for kind, total in totals.items():
                for key, value in fisher_information(pool, expert, batch, kind.removeprefix("fisher_")).items():
                    total[key] = total[key] + value if key in total else value
        count += len(batch)
        on_batch()
    if "gram" in kinds:
        if not grams:
            raise NetworkError(
                f"No linear layer of '{name}' was recognised while it ran, so there is nothing to measure."
            )
        known = known.with_kind("gram", {key: gram.mean for key, gram in grams.items()}, count)
    for kind, total in totals.items():
        known = known.with_kind(kind, {key: value / count for key, value in total.items()}, count)
    return known


def _measure_blocks(
    pool: ExpertPool,
    batches: Mapping[str, list[Tensor]],
    known: Mapping[str, Statistics],
    settings: BlockwiseOptions,
    on_batch: OnBatch,
) -> dict[str, Statistics]:
    missing = [name for name in pool.names if name not in batches]
    if missing:
        raise InputError(f"'{BLOCKWISE}' needs images of every expert's site; those of {missing[0]} are missing.")
    every = [batches[name] for name in pool.names]
    with pool.input_errors(every[0][0]):
        grams = merge_block_by_block(pool, every, settings, on_batch=on_batch)
    kind, found = blockwise_kind(pool, settings), {}
    for name, own in zip(pool.names, grams, strict=True):
        tensors = {weight: gram.mean for weight, gram in own.items()}
        found[name] = known[name].with_kind(kind, tensors, sum(map(len, batches[name])))
    return found


def input_grams(pool: ExpertPool, expert: int, batch: Tensor) -> Grams:
    """Gram matrices of the inputs of one expert's layers on a prepared batch, by the name of the layer's weight."""
    with watch_inputs(pool.matrices(pool.bank[expert])) as grams:
        pool.expert_logits(expert, batch)
    return grams


def fisher_information(pool: ExpertPool, expert: int, batch: Tensor, kind: str) -> dict[str, Tensor]:
    """Sums over a prepared batch of the diagonal Fisher information of one expert, by parameter name."""
    views = pool.layout.views(pool.bank[expert])
    parameters = {entry.name: views[entry.name] for entry in pool.layout.parameters}
    module = pool.expert(expert)
    return information(lambda own, images: logits_of(pool.layout.call(module, own, images)), batch, parameters, kind)


def blockwise_kind(pool: ExpertPool, settings: BlockwiseOptions) -> str:
    """The kind of Gram matrices that RegMean++ measured for this very pool and these settings."""
    key = hashlib.sha256(f"{pool.fingerprint()} {sorted(settings.items())}".encode())
    return f"{BLOCKWISE}-{key.hexdigest()[:16]}"
