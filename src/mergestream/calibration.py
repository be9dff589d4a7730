"""Statistics that experts' sites measure on their own images, so that merging needs no image of theirs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from mergestream.errors import CheckpointError, InputError, NetworkError, unknown_name
from mergestream.measuring import (
    FISHERS,
    Blocks,
    Grams,
    Statistics,
    add_grams,
    information,
    watch_inputs,
)
from mergestream.merging import Layer, Rows, regression_mean
from mergestream.networks import logits_of
from mergestream.options import number, whole_number, yes_or_no
from mergestream.pool import ExpertPool
from mergestream.scoring import require_finite

BLOCKWISE = "gram_pp"
KINDS = ("gram", *(f"fisher_{kind}" for kind in FISHERS), BLOCKWISE)
OnBatch = Callable[[], None]
Images = Tensor | Iterable[Any]


class Settings(TypedDict):
    ratio: float
    ridge: float
    convolutions: bool


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
    settings: Settings = {
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
    settings: Settings,
    on_batch: OnBatch,
) -> dict[str, Statistics]:
    missing = [name for name in pool.names if name not in batches]
    if missing:
        raise InputError(f"'{BLOCKWISE}' needs images of every expert's site; those of {missing[0]} are missing.")
    every = [batches[name] for name in pool.names]
    with pool.input_errors(every[0][0]):
        grams = merge_block_by_block(pool, every, **settings, on_batch=on_batch)
    kind, found = blockwise_kind(pool, **settings), {}
    for name, own in zip(pool.names, grams, strict=True):
        tensors = {weight: gram.mean for weight, gram in own.items()}
        found[name] = known[name].with_kind(kind, tensors, sum(map(len, batches[name])))
    return found


def input_grams(pool: ExpertPool, expert: int, batch: Tensor) -> Grams:
    """Gram matrices of the inputs of one expert's layers on a prepared batch, by the name of the layer's weight."""
    with watch_inputs(_matrices(pool, pool.bank[expert])) as grams:
        pool.expert_logits(expert, batch)
    return grams


def fisher_information(pool: ExpertPool, expert: int, batch: Tensor, kind: str) -> dict[str, Tensor]:
    """Sums over a prepared batch of the diagonal Fisher information of one expert, by parameter name."""
    views = pool.layout.views(pool.bank[expert])
    parameters = {entry.name: views[entry.name] for entry in pool.layout.parameters}
    module = pool.expert(expert)
    return information(lambda own, images: logits_of(pool.layout.call(module, own, images)), batch, parameters, kind)


def merge_layer(grams: Sequence[Tensor], weights: Sequence[Tensor], *, ratio: float, ridge: float) -> Tensor:
    """One layer by RegMean, from every expert's Gram matrix [groups,in,in] and weight; shaped as the weight."""
    layer = Layer(groups=grams[0].shape[0], inputs=grams[0].shape[-1])
    stacked = torch.stack([layer.matrices(weight) for weight in weights])
    found = torch.stack([gram.to(stacked.device) for gram in grams])
    return regression_mean(stacked, found, ratio=ratio, ridge=ridge).reshape(weights[0].shape)


def blockwise_kind(pool: ExpertPool, *, ratio: float, ridge: float, convolutions: bool) -> str:
    """The kind of Gram matrices that RegMean++ measured for this very pool and these settings."""
    key = hashlib.sha256(f"{pool.fingerprint()} {ratio!r} {ridge!r} {convolutions}".encode())
    return f"{BLOCKWISE}-{key.hexdigest()[:16]}"


@torch.no_grad()
def merge_block_by_block(
    pool: ExpertPool,
    batches: Sequence[Sequence[Tensor]],
    *,
    ratio: float,
    ridge: float,
    convolutions: bool,
    known: Sequence[Grams] | None = None,
    rows: Rows | None = None,
    out: Tensor | None = None,
    on_batch: OnBatch = lambda: None,
) -> list[Grams]:
    """Every expert's Gram matrices, its blocks fed by the blocks merged before them.

    batches: prepared batches for each expert, or one list for all. known: Gram matrices of earlier batches, which the
    new ones join before a block is merged. rows: stand for the experts' own. The merged weights [P] end up in `out`.
    """
    rows = rows or pool.rows
    merged_row = pool.merge([1 / len(pool)] * len(pool), out=out, rows=rows)
    merged, experts = Blocks(pool.module_with(merged_row)), [Blocks(pool.expert(k)) for k in range(len(pool))]
    grams = [dict(own) for own in known or [{} for _ in pool.names]]
    if not known or not known[0]:
        merged.require_chain(batches[0][0][:1])
    calls = [[merged.first_call(batch) for batch in own] for own in batches]

    def settle(found: Sequence[Grams]) -> None:
        """Take new Gram matrices in, and merge the layers they are of."""
        for k, new in enumerate(found):
            grams[k] = add_grams(grams[k], new)
        views = pool.layout.views(merged_row)
        for entry in pool.layout.parameters:
            if entry.name in found[0]:
                weights = [row.view(entry.shape) for row in rows.span(entry.start, entry.stop)]
                means = [own[entry.name].mean for own in grams]
                views[entry.name].copy_(merge_layer(means, weights, ratio=ratio, ridge=ridge))

    for block, prefix in enumerate(merged.names):
        found = []
        for k, expert in enumerate(experts):
            with watch_inputs(_matrices(pool, pool.bank[k], f"{prefix}."), convolutions=convolutions) as new:
                for call in calls[k % len(calls)]:
                    expert.run(block, call)
                    on_batch()
            found.append(new)
        settle(found)
        if block + 1 < len(merged):
            calls = [
                [merged.next_call(block, call, batch) for call, batch in zip(own, images, strict=True)]
                for own, images in zip(calls, batches, strict=True)
            ]
    heads = []
    for own, images in zip(calls, batches, strict=True):
        with watch_inputs(_head_matrices(pool, merged_row), convolutions=convolutions) as new:
            for call, batch in zip(own, images, strict=True):
                merged.finish(call, batch)
        heads.append(new)
    settle([heads[k % len(heads)] for k in range(len(pool))])
    return grams


def _matrices(pool: ExpertPool, row: Tensor, prefix: str = "") -> dict[str, Tensor]:
    """Parameters that may be the weight of a linear map or a convolution, as views of a row [P]."""
    views = pool.layout.views(row)
    return {e.name: views[e.name] for e in pool.layout.parameters if len(e.shape) > 1 and e.name.startswith(prefix)}


def _head_matrices(pool: ExpertPool, row: Tensor) -> dict[str, Tensor]:
    head = {entry.name for entry in pool.layout.parameters if entry.start >= pool.layout.encoder_size}
    return {name: view for name, view in _matrices(pool, row).items() if name in head}
