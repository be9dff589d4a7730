"""TIES (Yadav et al. 2023): trimmed task vectors, an elected sign for every number, the mean of those that agree."""

from typing import ClassVar

from torch import Tensor

from mergestream.functional.merging import DISJOINT_MERGES, Part, ties
from mergestream.methods.merged_model import MergedModel, base_of
from mergestream.methods.state import State
from mergestream.methods.task_arithmetic import resolve_lambda
from mergestream.networks.flat_layout import Layout
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.option_checks import number, one_of

SCOPES = ("global", "encoder_head_separately", "tensor")


class Ties(MergedModel[State]):
    """keep          the share of every task vector that survives trimming, by magnitude
    trim_scope    trimmed over all numbers at once ('global', the paper's), 'encoder_head_separately', or per 'tensor'
    merge         of the entries that agree with the elected sign: 'mean' (the paper's), 'sum' or 'max'
    lambda        multiplier of the merged task vector: a number, or '1/K'
    base_head     'saved', or 'zero' for experts whose heads did not start together
    """

    name: ClassVar[str] = "ties"
    needs = ("base",)

    def __init__(
        self,
        pool: ExpertPool,
        *,
        keep: float = 0.2,
        trim_scope: str = "global",
        merge: str = "mean",
        lambda_: float | str = 0.3,
        base_head: str = "saved",
        head_rows: str = "all",
        recalibrate_bn: bool = False,
    ) -> None:
        self._base = base_of(pool, self.name, base_head)
        self.keep = number("keep", keep, above=0, high=1)
        self.trim_scope = one_of("trim_scope", trim_scope, SCOPES)
        self.merge = one_of("merge", merge, DISJOINT_MERGES)
        self.lambda_, self.base_head = lambda_, base_head
        self._scale = resolve_lambda(lambda_, len(pool), single=True)[0]
        super().__init__(pool, head_rows=head_rows, recalibrate_bn=recalibrate_bn)

    def merge_parameters(self, state: State, out: Tensor) -> None:
        parts = parts_of(self.pool.layout, self.trim_scope)
        ties(self._base, self._rows, parts, keep=self.keep, merge=self.merge, scale=self._scale, out=out)


def parts_of(layout: Layout, scope: str) -> list[Part]:
    """The spans that are trimmed together; buffers belong to none."""
    if scope == "tensor":
        # With the padding behind it, which stays 0.
        return [Part(((entry.start, entry.end),), entry.stop - entry.start) for entry in layout.parameters]
    encoder = (0, layout.buffers.start), [e for e in layout.parameters if e.start < layout.encoder_size]
    head = (layout.encoder_size, layout.size), [e for e in layout.parameters if e.start >= layout.encoder_size]
    counts = [sum(entry.stop - entry.start for entry in entries) for _, entries in (encoder, head)]
    if scope == "global":
        return [Part((encoder[0], head[0]), sum(counts))]
    return [Part((span,), count) for (span, _), count in zip((encoder, head), counts, strict=True)]
