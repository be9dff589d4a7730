"""Streams: orders in which samples arrive, pure functions of labels and seed.

Every sample comes at most once, but in long streams. docs/streams.md has a table of all streams.
"""

from mergestream.data.streams.class_orders import dirichlet, iid, lone, note, sorted_by_label
from mergestream.data.streams.column_orders import mixture, recurrence, slides, temporal
from mergestream.data.streams.stream import Stream, in_order
from mergestream.data.streams.stream_spec import STREAMS, create_stream, parse_stream, repeated
from mergestream.data.streams.subsets import missing, prevalence

__all__ = [
    "STREAMS",
    "Stream",
    "create_stream",
    "dirichlet",
    "iid",
    "in_order",
    "lone",
    "missing",
    "mixture",
    "note",
    "parse_stream",
    "prevalence",
    "recurrence",
    "repeated",
    "slides",
    "sorted_by_label",
    "temporal",
]
