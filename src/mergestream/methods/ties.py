"""TIES (Yadav et al. 2023): trimmed task vectors, an elected sign for every number, the mean of those that agree."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mergestream.functional.merging import Part, ties
from mergestream.functional.merging.ties import DISJOINT_MERGES
from mergestream.methods.base import option
from mergestream.methods.merged_model import MergedState, TaskVectorModel
from mergestream.methods.task_arithmetic import resolve_lambda
from mergestream.networks.flat_layout import Layout
from mergestream.runtime.option_checks import number, one_of

SCOPES = ("global", "encoder_head_separately", "tensor")


@dataclass(kw_only=True, eq=False, repr=False)
class Ties(TaskVectorModel[MergedState]):
    """The options are the paper's by default."""

    name: ClassVar[str] = "ties"
    keep: float = option(0.2, number, above=0, high=1)  # share of every task vector that survives, by magnitude
    trim_scope: str = option("global", one_of, SCOPES)  # what is trimmed together: all numbers, or parts of them
    merge: str = option("mean", one_of, DISJOINT_MERGES)  # of the entries that agree with the elected sign
    lambda_: float | str = 0.3  # multiplier of the merged task vector: a number, or '1/K'

    def __post_init__(self) -> None:
        super().__post_init__()
        self._scale = resolve_lambda(self.lambda_, len(self.pool), single=True)[0]

    def merge_parameters(self, state: MergedState, out: Tensor) -> None:
        parts = parts_of(self.pool.layout, self.trim_scope)
        ties(self._base, self._rows, parts, keep=self.keep, merge=self.merge, scale=self._scale, out=out)


def parts_of(layout: Layout, scope: str) -> list[Part]:
    """The spans that are trimmed together; buffers belong to none."""
    if scope == "tensor":
        # With the padding behind it, which stays 0.
        return [Part(((entry.start, entry.end),), entry.stop - entry.start) for entry in layout.parameters]
    spans = (0, layout.buffers.start), (layout.encoder_size, layout.size)
    parts = []
    for start, stop in spans:
        sizes = [entry.stop - entry.start for entry in layout.parameters if start <= entry.start < stop]
        parts.append(Part(((start, stop),), sum(sizes)))
    return [Part(spans, sum(part.numbers for part in parts))] if scope == "global" else parts
