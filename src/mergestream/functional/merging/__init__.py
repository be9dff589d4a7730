"""Weight arithmetic on flat vectors: no network, no data, no state."""

from mergestream.functional.merging.regmean import merge_layer
from mergestream.functional.merging.ties import Part, ties
from mergestream.functional.merging.weighted_sums import Rows, fisher_average, merge, merge_integers, weighted_sum

__all__ = ["Part", "Rows", "fisher_average", "merge", "merge_integers", "merge_layer", "ties", "weighted_sum"]
