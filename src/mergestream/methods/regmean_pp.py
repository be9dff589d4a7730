"""RegMean++ (2025): RegMean block by block, each expert's block fed by the merged blocks before it."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mergestream.methods.base import option
from mergestream.methods.regmean import RegMean, RegMeanState
from mergestream.networks.blocks import find_blocks
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.statistics.grams import Grams
from mergestream.pool.statistics.measurement import REGMEAN_PP, BlockwiseMerge, BlockwiseOptions, blockwise_kind
from mergestream.runtime.option_checks import number


@dataclass(kw_only=True, eq=False, repr=False)
class RegMeanPlusPlus(RegMean):
    """Options as in `regmean`, with the paper's defaults. What lies before the first block is the mean, as published;
    the final norm is the mean and the head is merged by RegMean on the merged features.

    statistics='source' takes a round for every block, in which merged blocks travel out and Gram matrices back, so they
    are of one pool and one choice of ratio, ridge and convolutions. With 'target' each batch passes the blocks as they
    are merged when it arrives.
    """

    name: ClassVar[str] = "regmean_pp"
    ratio: float = option(1.0, number, low=0, high=1)
    ridge: float = option(0.01, number, low=0)

    def __post_init__(self) -> None:
        find_blocks(self.pool.template.module)
        super().__post_init__()

    @property
    def _settings(self) -> BlockwiseOptions:
        return {"ratio": self.ratio, "ridge": self.ridge, "convolutions": self.convolutions}

    def _kind_for(self, pool: ExpertPool) -> str:  # holds a hash of the pool; needed for shipped statistics only
        return blockwise_kind(pool, self._settings)

    @property
    def _is_usual(self) -> bool:
        return self._settings == REGMEAN_PP

    def _how_to_measure(self) -> str:
        settings = ", ".join(f"{name}={value}" for name, value in self._settings.items())
        return f"measure_statistics(pool, images_of_every_expert, ['gram_pp'], {settings})"

    def learn(self, images: Tensor, state: RegMeanState) -> RegMeanState:
        learnt = super().learn(images, state)
        if learnt is not state:  # merging was part of measuring
            self._average_buffers(self._buffer)
            self.held_from = self.merged_from(learnt)
        return learnt

    def _measured(self, images: Tensor, state: RegMeanState) -> list[Grams]:
        self.held_from = None
        merge = BlockwiseMerge(
            self.pool, [[images]], self._settings, earlier=state.grams, rows=self._rows, out=self._buffer
        )
        return merge.run()
