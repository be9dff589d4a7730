"""RegMean block by block: every expert's block gets its inputs from the blocks merged before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
from torch import Tensor

from mergestream.functional.merging import Rows, merge_layer
from mergestream.networks.blocks import Blocks
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.statistics import Grams, add_grams, watch_inputs

OnBatch = Callable[[], None]


class BlockwiseOptions(TypedDict):
    """Options of RegMean++: the merged blocks, and so the Gram matrices of later blocks, depend on them."""

    ratio: float
    ridge: float
    convolutions: bool


@torch.no_grad()
def merge_block_by_block(
    pool: ExpertPool,
    batches: Sequence[Sequence[Tensor]],
    settings: BlockwiseOptions,
    *,
    earlier: Sequence[Grams] | None = None,
    rows: Rows | None = None,
    out: Tensor | None = None,
    on_batch: OnBatch = lambda: None,
) -> list[Grams]:
    """Merge into `out` [P] and return every expert's Gram matrices.

    batches: prepared batches per expert, or one list for all. earlier: Gram matrices so far, to which the new
    ones are added before a block is merged. rows: replace the experts' own.
    """
    walk = _Walk(pool, batches, settings, earlier or [{} for _ in pool.names], rows or pool.rows, out)
    for block in range(len(walk.merged)):
        walk.settle([walk.measure_block(block, k, on_batch) for k in range(len(pool))])
        if block + 1 < len(walk.merged):
            walk.advance(block)
    walk.settle(walk.measure_head())
    return walk.grams


class _Walk:
    """The merged network so far, and the inputs of its next block for every batch of every expert."""

    def __init__(
        self,
        pool: ExpertPool,
        batches: Sequence[Sequence[Tensor]],
        settings: BlockwiseOptions,
        earlier: Sequence[Grams],
        rows: Rows,
        out: Tensor | None,
    ) -> None:
        self.pool, self.batches, self.settings, self.rows = pool, batches, settings, rows
        # Layers that are not solved for are the mean.
        self.weights = pool.merge([1 / len(pool)] * len(pool), out=out, rows=rows)
        self.merged = Blocks(pool.module_with(self.weights))
        self.experts = [Blocks(pool.expert(k)) for k in range(len(pool))]
        self.grams = [dict(own) for own in earlier]
        if not any(earlier):
            self.merged.require_chain(batches[0][0][:1])
        self.calls = [[self.merged.first_call(batch) for batch in own] for own in batches]

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
