"""The experts' rows [K,P] as methods merge them: head rows of unseen classes filled in."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mergestream.functional.merging.weighted_sums import Rows, fill_unseen
from mergestream.networks.layers import class_entries
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import NetworkError, PoolError
from mergestream.runtime.option_checks import one_of

HEAD_ROWS = ("all", "seen")


class HeadRows:
    """The pool's rows; with `head_rows` 'seen', head rows of unseen classes are replaced.

    They become the mean of the experts that saw the class, so that every average is one over those alone.
    """

    def __init__(self, pool: ExpertPool, head_rows: str) -> None:
        self._rows = pool.rows
        self._seen: Tensor | None = None
        if one_of("head_rows", head_rows, HEAD_ROWS) == "seen":
            self._seen = _seen(pool)
            self._spans = _class_spans(pool)

    def __call__(self, coefficients: Tensor | None = None) -> Rows:
        """coefficients [K]: how the experts that saw a class are weighed; uniform by default."""
        if self._seen is None:
            return self._rows
        return Rows(self._rows.encoder, fill_unseen(self._rows.head, self._spans, self._seen, coefficients))


def _seen(pool: ExpertPool) -> Tensor:
    """Which expert saw which class in training [K,C], by the class counts in its card."""
    unknown = [card.name for card in pool.cards if not card.class_counts]
    if unknown:
        raise PoolError(
            f"head_rows='seen' needs to know which classes each expert saw, but the card of '{unknown[0]}' has no "
            f"class_counts. Ask its site, then: pool = pool.annotate('{unknown[0]}', class_counts={{...}})."
        )
    counts = [[card.class_counts.get(name, 0) > 0 for name in pool.classes] for card in pool.cards]
    return torch.tensor(counts, device=pool.device)


def _class_spans(pool: ExpertPool) -> Sequence[tuple[slice, int]]:
    """Where in the head segment each class has its own row: the last layer's weight and bias."""
    border, spans = pool.layout.encoder_size, []
    for head in pool.template.head:
        entries = class_entries(pool.layout, head, len(pool.classes))
        layers = [entry.name.removesuffix(".weight") for entry in entries if len(entry.shape) > 1]
        if not layers:
            raise NetworkError(f"head_rows='seen' needs a head whose last layer has a row per class, not '{head}'.")
        last = (f"{layers[-1]}.weight", f"{layers[-1]}.bias")
        for entry in (entry for entry in entries if entry.name in last):
            width = (entry.stop - entry.start) // len(pool.classes)
            for label in range(len(pool.classes)):
                start = entry.start - border + label * width
                spans.append((slice(start, start + width), label))
    return spans
