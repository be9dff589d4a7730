"""Head rows of classes that an expert never saw: noise from its start, which an average need not take in."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mergestream.functional.merging.rows import Rows, fill_unseen
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import NetworkError, PoolError
from mergestream.runtime.option_checks import one_of

HEAD_ROWS = ("all", "seen")


class HeadRows:
    """The pool's rows, with the head rows of unseen classes filled in if `head_rows` is 'seen'.

    Filled with the mean of the experts that saw the class, so that every average becomes one over those alone.
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
    owners = {f"{layer}.{part}" for layer in _last_layers(pool) for part in ("weight", "bias")}
    for entry in pool.layout.entries:
        if entry.name in owners:
            width = (entry.stop - entry.start) // len(pool.classes)
            for label in range(len(pool.classes)):
                start = entry.start - border + label * width
                spans.append((slice(start, start + width), label))
    return spans


def _last_layers(pool: ExpertPool) -> list[str]:
    found = []
    for head in pool.template.head:
        layers = [
            f"{head}.{name}" if name else head
            for name, layer in pool.template.module.get_submodule(head).named_modules()
            if isinstance(layer, nn.Linear | nn.Conv2d | nn.Conv3d) and len(layer.weight) == len(pool.classes)
        ]
        held = {entry.name for entry in pool.layout.entries}
        if not layers or f"{layers[-1]}.weight" not in held:
            raise NetworkError(
                f"head_rows='seen' needs a head whose last layer has a row per class; '{head}' has none."
            )
        found.append(layers[-1])
    return found
