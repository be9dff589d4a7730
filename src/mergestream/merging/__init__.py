"""Pure weight arithmetic on flat weights: no network, no data, no state."""

from mergestream.merging.fisher import fisher_average
from mergestream.merging.regmean import merge_layer, regression_mean
from mergestream.merging.rows import Rows
from mergestream.merging.ties import DISJOINT_MERGES, Part, ties
from mergestream.merging.weighted import merge, merge_integers, weighted_sum

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
