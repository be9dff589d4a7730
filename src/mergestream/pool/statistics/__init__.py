"""Statistics of an expert on its site's images: Gram matrices of inputs and Fisher information."""

from mergestream.pool.statistics.fisher_information import FISHERS, information
from mergestream.pool.statistics.grams import Gram, Grams, add_grams, watch_inputs
from mergestream.pool.statistics.statistics_file import Statistics, read_statistics, write_statistics

__all__ = [
    "FISHERS",
    "Gram",
    "Grams",
    "Statistics",
    "add_grams",
    "information",
    "read_statistics",
    "watch_inputs",
    "write_statistics",
]
