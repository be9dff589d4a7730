"""Measurement of statistics at the experts' sites, so that merging needs none of their images."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from mergestream.functional.merging import Rows, merge_layer
from mergestream.functional.scores import require_finite
from mergestream.networks.blocks import Blocks
from mergestream.pool.checkpoint import Statistics
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.statistics.fisher_information import FISHERS, add_up, fisher_information
from mergestream.pool.statistics.grams import Grams, add_grams, watch_inputs
from mergestream.runtime.errors import CheckpointError, InputError, NetworkError, require_known
from mergestream.runtime.option_checks import number, whole_number, yes_or_no

OnBatch = Callable[[], None]


class BlockwiseOptions(TypedDict):
    """Options of RegMean++: the merged blocks, and so the Gram matrices of later blocks, depend on them."""

    ratio: float
    ridge: float
    convolutions: bool


# The paper's, and the method's defaults.
REGMEAN_PP: BlockwiseOptions = {"ratio": 1.0, "ridge": 0.01, "convolutions": True}


class BlockwiseMerge:
    """RegMean++: the merged network so far, and the inputs of its next block for every batch of every expert."""

    @torch.no_grad()
    def __init__(
        self,
        pool: ExpertPool,
        batches: Sequence[Sequence[Tensor]],
        settings: BlockwiseOptions,
        *,
        earlier: Sequence[Grams] | None = None,
        rows: Rows | None = None,
        out: Tensor | None = None,
    ) -> None:
        """Start with the mean of all layers, in `out` [P].

        batches: prepared batches per expert, or one list for all. earlier: Gram matrices so far, to which the new
        ones are added before a block is merged. rows: replace the experts' own.
        """
        self.pool, self.batches, self.settings, self.rows = pool, batches, settings, rows or pool.rows
        # Layers that are not solved for stay the mean.
        self.weights = pool.merge([1 / len(pool)] * len(pool), out=out, rows=rows)
        self.merged = Blocks(pool.module_with(self.weights))
        self.experts = [Blocks(pool.expert(k)) for k in range(len(pool))]
        self.grams: list[Grams] = [dict(own) for own in earlier] if earlier else [{} for _ in pool.names]
        if not any(self.grams):
            self.merged.require_chain(batches[0][0][:1])
        self.calls = [[self.merged.call_of(0, batch) for batch in own] for own in batches]

    @torch.no_grad()
    def run(self, on_batch: OnBatch = lambda: None) -> list[Grams]:
        """Merge all blocks and the head, and return every expert's Gram matrices."""
        experts = range(len(self.pool))
        for block in range(len(self.merged)):
            self.settle([self.measure_block(block, k, on_batch) for k in experts])
            if block + 1 < len(self.merged):
                self.advance(block)
        self.settle(self.measure_head())
        images = [sum(map(len, own)) for own in self.batches]
        self.pool.passes["expert"] += sum(images[k % len(images)] for k in experts)
        self.pool.passes["merged"] += sum(images)
        return self.grams

    def measure_block(self, block: int, expert: int, on_batch: OnBatch) -> Grams:
        weights = self.pool.matrices(self.pool.bank[expert], f"{self.merged.names[block]}.")
        with watch_inputs(weights, convolutions=self.settings["convolutions"]) as grams:
            for call in self.calls[expert % len(self.calls)]:
                self.experts[expert].run(block, call)
                on_batch()
        return grams

    def measure_head(self) -> list[Grams]:
        border = self.pool.layout.encoder_size
        head = {entry.name for entry in self.pool.layout.parameters if entry.start >= border}
        weights = {name: view for name, view in self.pool.matrices(self.weights).items() if name in head}
        grams = []
        for calls, batches in zip(self.calls, self.batches, strict=True):
            with watch_inputs(weights, convolutions=self.settings["convolutions"]) as new:
                for call, batch in zip(calls, batches, strict=True):
                    self.merged.finish(call, batch)
            grams.append(new)
        return [grams[k % len(grams)] for k in range(len(self.pool))]

    def settle(self, added: Sequence[Grams]) -> None:
        """Add new Gram matrices and merge the layers they belong to."""
        self.grams = [add_grams(old, new) for old, new in zip(self.grams, added, strict=True)]
        views = self.pool.layout.views(self.weights)
        for entry in self.pool.layout.parameters:
            if entry.name in added[0]:
                weights = [row.view(entry.shape) for row in self.rows.span(entry.start, entry.stop)]
                means = [own[entry.name].mean for own in self.grams]
                merged = merge_layer(means, weights, ratio=self.settings["ratio"], ridge=self.settings["ridge"])
                views[entry.name].copy_(merged)

    def advance(self, block: int) -> None:
        """Run every batch through the block that was just merged."""
        self.calls = [
            [self.merged.next_call(block, call, batch) for call, batch in zip(calls, batches, strict=True)]
            for calls, batches in zip(self.calls, self.batches, strict=True)
        ]


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
    preprocessed: bool = False,
    on_batch: OnBatch = lambda: None,
) -> ExpertPool:
    """Return the pool with statistics of the experts named in `images`, each measured on its own site's images.

    Images are one tensor [N,c,H,W] or an iterable of batches (a DataLoader). A site with only its own expert uses a
    pool of one, and sends the folder after `save`. Kinds: 'gram' (for regmean), 'fisher_exact' and 'fisher_mergelm'
    (for fisher). 'gram_pp' (for regmean_pp) needs one round per block with the images of all sites, and is valid for
    one `ratio`, `ridge` and `convolutions` only.
    """
    chosen = _checked_kinds(kinds)
    whole_number("batch_size", batch_size, low=1)
    settings: BlockwiseOptions = {
        "ratio": number("ratio", ratio, low=0, high=1),
        "ridge": number("ridge", ridge, low=0),
        "convolutions": yes_or_no("convolutions", convolutions),
    }
    if not isinstance(images, Mapping) or not images:
        raise InputError("Give the images of each expert by its name: {'lyon': images, ...}.")
    measured = {name: existing_statistics(pool, pool.index(name)) for name in images}
    all_batches: dict[str, list[Tensor]] = {}
    for name, own in images.items():
        batches: Iterable[Tensor] = _batches(pool, own, batch_size, preprocessed)
        if BLOCKWISE in chosen:
            batches = all_batches[name] = list(_batches(pool, own, batch_size, preprocessed))
        others = [kind for kind in chosen if kind != BLOCKWISE]
        measured[name] = _measure(pool, name, batches, others, measured[name], on_batch) if others else measured[name]
    if BLOCKWISE in chosen:
        measured |= _measure_blocks(pool, all_batches, measured, settings, on_batch)
    return pool.with_statistics(measured)


def _checked_kinds(kinds: Sequence[str]) -> list[str]:
    listed = [kinds] if isinstance(kinds, str) else list(kinds) if isinstance(kinds, Iterable) else []
    if not listed:
        raise InputError(f"Which kinds of statistics? Known: {', '.join(KINDS)}.")
    for kind in listed:
        require_known("kind of statistics", kind, KINDS)
    return listed


def existing_statistics(pool: ExpertPool, expert: int) -> Statistics:
    """The expert's present statistics; unusable ones are dropped."""
    try:
        return pool.statistics_of(expert) or Statistics({}, {})
    except CheckpointError:
        return Statistics({}, {})


def _batches(pool: ExpertPool, images: Images, size: int, preprocessed: bool) -> Iterator[Tensor]:
    """Yield prepared batches."""
    if isinstance(images, Tensor):
        images = images.split(size) if images.ndim else [images]
    if isinstance(images, str | Mapping) or not isinstance(images, Iterable):
        raise InputError(f"Images are a tensor [N,c,H,W] or batches of them; got {type(images).__name__}.")
    empty = True
    for batch in images:
        # A DataLoader over labelled data gives images and labels.
        own = batch[0] if isinstance(batch, list | tuple) and batch else batch
        if isinstance(own, Tensor) and len(own.shape) and not len(own):
            continue
        empty = False
        yield require_finite(pool.prepare(own, preprocessed=preprocessed), "The input")
    if empty:
        raise InputError("Statistics need at least one image; got none.")


def _measure(
    pool: ExpertPool, name: str, batches: Iterable[Tensor], kinds: list[str], existing: Statistics, on_batch: OnBatch
) -> Statistics:
    """Measure one expert's statistics of several kinds in one pass over its images."""
    expert, count, grams = pool.index(name), 0, Grams()
    totals: dict[str, dict[str, Tensor]] = {kind: {} for kind in kinds if kind != "gram"}
    for batch in batches:
        with pool.input_errors(batch):
            if "gram" in kinds:
                grams = add_grams(grams, input_grams(pool, expert, batch))
            for kind, total in totals.items():
                add_up(total, fisher_information(pool, expert, batch, kind.removeprefix("fisher_")))
        count += len(batch)
        on_batch()
    if "gram" in kinds:
        if not grams:
            raise NetworkError(
                f"No linear layer of '{name}' was recognised while it ran, so there is nothing to measure."
            )
        existing = existing.with_kind("gram", {key: gram.mean for key, gram in grams.items()}, count)
    for kind, total in totals.items():
        existing = existing.with_kind(kind, {key: value / count for key, value in total.items()}, count)
    return existing


def _measure_blocks(
    pool: ExpertPool,
    batches: Mapping[str, list[Tensor]],
    existing: Mapping[str, Statistics],
    settings: BlockwiseOptions,
    on_batch: OnBatch,
) -> dict[str, Statistics]:
    missing = [name for name in pool.names if name not in batches]
    if missing:
        raise InputError(f"'{BLOCKWISE}' needs images of every expert's site; those of {missing[0]} are missing.")
    every = [batches[name] for name in pool.names]
    with pool.input_errors(every[0][0]):
        grams = BlockwiseMerge(pool, every, settings).run(on_batch)
    kind, measured = blockwise_kind(pool, settings), {}
    for name, own in zip(pool.names, grams, strict=True):
        tensors = {weight: gram.mean for weight, gram in own.items()}
        measured[name] = existing[name].with_kind(kind, tensors, sum(map(len, batches[name])))
    return measured


def input_grams(pool: ExpertPool, expert: int, batch: Tensor) -> Grams:
    """Gram matrices of the inputs of one expert's layers on a prepared batch, by the name of the weight."""
    with watch_inputs(pool.matrices(pool.bank[expert])) as grams:
        pool.expert_logits(expert, batch, preprocessed=True)
    return grams


def blockwise_kind(pool: ExpertPool, settings: BlockwiseOptions) -> str:
    """The kind of RegMean++ Gram matrices for this pool and these settings."""
    key = hashlib.sha256(f"{pool.fingerprint()} {sorted(settings.items())}".encode())
    return f"{BLOCKWISE}-{key.hexdigest()[:16]}"
