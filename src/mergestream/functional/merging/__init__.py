"""Weight arithmetic on flat vectors: no network, no data, no state."""

from mergestream.functional.merging.regmean import merge_layer, regression_mean
from mergestream.functional.merging.ties import DISJOINT_MERGES, Part, ties
from mergestream.functional.merging.weighted_sums import Rows, fisher_average, merge, merge_integers, weighted_sum

__all__ = [
    "DISJOINT_MERGES",
    "Part",
    "Rows",
    "fisher_average",
    "merge",
    "merge_integers",
    "merge_layer",
    "regression_mean",
    "ties",
    "weighted_sum",
]
