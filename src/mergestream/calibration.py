"""Statistics that experts' sites measure on their own images, so that merging needs no image of theirs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TypedDict

import torch
from torch import Tensor

from mergestream.errors import InputError, unknown_name
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
from mergestream.pool import ExpertPool
from mergestream.scoring import require_finite

BLOCKWISE = "gram_pp"
KINDS = ("gram", *(f"fisher_{kind}" for kind in FISHERS), BLOCKWISE)
OnBatch = Callable[[], None]


class Settings(TypedDict):
    ratio: float
    ridge: float
    convolutions: bool


def measure_statistics(
    pool: ExpertPool,
    images: Mapping[str, Tensor],
    kinds: Sequence[str] = ("gram", "fisher_exact"),
    *,
    batch_size: int = 32,
    ratio: float = 1.0,
    ridge: float = 0.01,
    convolutions: bool = True,
    on_batch: OnBatch = lambda: None,
) -> ExpertPool:
    """The pool with statistics of the experts named in `images`, each measured on its own site's images [N,c,H,W].

    A site that has only its own expert gives a pool of one, and sends its folder after `save`. Kinds: 'gram' (for
    regmean), 'fisher_exact' and 'fisher_mergelm' (for fisher). 'gram_pp' (for regmean_pp) takes a round for every
    block, in which all experts' sites take part, and belongs to one `ratio`, `ridge` and `convolutions`.
    """
    for kind in kinds:
        if kind not in KINDS:
            raise unknown_name("kind of statistics", kind, KINDS)
    batches = {name: _batches(pool, own, batch_size) for name, own in images.items()}
    measured = {name: pool.statistics[pool.index(name)] or Statistics({}, {}) for name in images}
    for name, own in batches.items():
        for kind in kinds:
            if kind != BLOCKWISE:
                with pool.input_errors(own[0]):
                    tensors = _measure(pool, pool.index(name), own, kind, on_batch)
                measured[name] = measured[name].with_kind(kind, tensors, sum(map(len, own)))
    if BLOCKWISE in kinds:
        missing = [name for name in pool.names if name not in images]
        if missing:
            raise InputError(f"'{BLOCKWISE}' needs images of every expert's site; those of {missing[0]} are missing.")
        every = [batches[name] for name in pool.names]
        settings: Settings = {"ratio": ratio, "ridge": ridge, "convolutions": convolutions}
        with pool.input_errors(every[0][0]):
            grams = merge_block_by_block(pool, every, **settings, on_batch=on_batch)
        kind = blockwise_kind(pool, **settings)
        for name, own, found in zip(pool.names, every, grams, strict=True):
            tensors = {weight: gram.mean for weight, gram in found.items()}
            measured[name] = measured[name].with_kind(kind, tensors, sum(map(len, own)))
    return pool.with_statistics(measured)


def _batches(pool: ExpertPool, images: Tensor, size: int) -> list[Tensor]:
    if not isinstance(images, Tensor) or len(images) == 0:
        raise InputError("Statistics need at least one image [N,c,H,W]; got none.")
    return [require_finite(pool.prepare(batch), "The input") for batch in images.split(size)]


def _measure(
    pool: ExpertPool, expert: int, batches: Sequence[Tensor], kind: str, on_batch: OnBatch
) -> dict[str, Tensor]:
    if kind == "gram":
        grams: Grams = {}
        for batch in batches:
            grams = add_grams(grams, input_grams(pool, expert, batch))
            on_batch()
        return {name: gram.mean for name, gram in grams.items()}
    total: dict[str, Tensor] = {}
    for batch in batches:
        found = fisher_information(pool, expert, batch, kind.removeprefix("fisher_"))
        total = {name: total[name] + value if name in total else value for name, value in found.items()}
        on_batch()
    count = sum(map(len, batches))
    return {name: value / count for name, value in total.items()}


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
