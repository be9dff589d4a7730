"""Counts that may leave a site: rounded down to multiples of five, and nothing below five can be recomputed.

A published count is None (0 to 4), a multiple of five (that or up to four more), or 0 for a class that is absent.
Each count is rounded on its own, so a reader who knows the rule knows an interval per cell and that rows of one class
have one sum. `masked_rows` computes what follows from that, and hides rows that would tell more.
"""

from collections.abc import Sequence

import numpy as np

LEAST = 5
LARGEST_HIDDEN = LEAST - 1
KEPT_VALUES = 3  # so many values stay possible for a count below five
Masked = int | None
MaskedRow = tuple[Masked, ...]
Span = tuple[int, int]  # the smallest and the largest possible value


def masked(count: int) -> Masked:
    """A count rounded down to a multiple of five; None below five."""
    return count - count % LEAST if count >= LEAST else None


def bounds(value: Masked) -> Span:
    """The smallest and the largest count that are published as this."""
    return (0, LARGEST_HIDDEN) if value is None else (value, value + LARGEST_HIDDEN) if value else (0, 0)


def masked_class_counts(counts: Sequence[int]) -> MaskedRow:
    """Images per class; a class without any is 0: a site may say that it lacks a class."""
    return tuple(masked(count) if count else 0 for count in counts)


def total_bounds(value: Masked) -> Span:
    """Bounds of a class count: 0 is exact, None is 1 to 4."""
    return (1, LARGEST_HIDDEN) if value is None else bounds(value)


def masked_rows(rows: Sequence[Sequence[int]], total: Span) -> list[MaskedRow | None]:
    """Mask rows of counts [C] that all have one sum, known to be within `total`; None for a row that is hidden whole.

    What can be computed of a row is exact: an interval per cell and one sum. A row in which a count below five would
    have fewer than three possible values is hidden; that widens what is known of the sum, so it is repeated.
    """
    if total == (0, 0):
        return [(0,) * len(row) for row in rows]
    shown: list[MaskedRow | None] = [tuple(map(masked, row)) for row in rows]
    while True:
        span = sum_bounds(shown, total)
        telling = [place for place, row in enumerate(shown) if not is_safe(row, span)]
        if not telling:
            return shown
        for place in telling:
            shown[place] = None


def sum_bounds(rows: Sequence[MaskedRow | None], total: Span) -> Span:
    """What all rows together tell about their sum."""
    spans = [np.array([bounds(value) for value in row]).sum(axis=0) for row in rows if row is not None]
    return max([total[0], *(int(low) for low, _ in spans)]), min([total[1], *(int(high) for _, high in spans)])


def is_safe(row: MaskedRow | None, span: Span, cell: int = 0, cell_span: Span | None = None) -> bool:
    """Whether counts below five stay open, given bounds of the row's sum, and perhaps of one cell."""
    if row is None:
        return True
    ranges = [bounds(value) for value in row]
    if cell_span is not None:
        ranges[cell] = cell_span
    narrowed = zip(row, narrowed_parts(ranges, span), strict=True)
    return all(high - low + 1 >= KEPT_VALUES for value, (low, high) in narrowed if value is None)


def narrowed_parts(parts: Sequence[Span], total: Span) -> list[Span]:
    """Bounds of every part of a sum that follow from those of the other parts and of the sum."""
    lows, highs = sum(low for low, _ in parts), sum(high for _, high in parts)
    return [(max(low, total[0] - (highs - high)), min(high, total[1] - (lows - low))) for low, high in parts]


def estimated_total(value: Masked) -> float:
    return sum(total_bounds(value)) / 2


def estimated_row(row: MaskedRow | None, total: Masked) -> np.ndarray:
    """Expected counts [C] of a masked row: what the cells leave open is shared equally, up to the class's total."""
    if row is None:
        return np.full(1, np.nan)
    lows = np.array([0 if value is None else value for value in row], dtype=float)
    open_share = (estimated_total(total) - lows.sum()) / (LARGEST_HIDDEN * len(row))
    return lows + LARGEST_HIDDEN * min(max(open_share, 0.0), 1.0) if total != 0 else lows


def estimated_recalls(rows: Sequence[MaskedRow | None], totals: Sequence[Masked]) -> np.ndarray:
    """Recall of every class [C]; NaN for an absent class, a half where nothing may be said."""
    recalls = np.full(len(totals), np.nan)
    for place, (row, total) in enumerate(zip(rows, totals, strict=True)):
        if total == 0:
            continue
        counts = estimated_row(row, total)
        recalls[place] = 0.5 if row is None or not counts.sum() else counts[place] / counts.sum()
    return recalls


def estimated_scores(rows: Sequence[MaskedRow | None], totals: Sequence[Masked]) -> dict[str, float]:
    """Accuracy and balanced accuracy, from masked counts alone."""
    recalls, sizes = estimated_recalls(rows, totals), np.array([estimated_total(total) for total in totals])
    present = np.isfinite(recalls)
    accuracy = float(np.average(recalls[present], weights=sizes[present]))
    return {"accuracy": accuracy, "balanced_accuracy": float(recalls[present].mean())}


def recall_bounds(rows: Sequence[MaskedRow | None], totals: Sequence[Masked]) -> list[tuple[float, float] | None]:
    """Between which values the recall of every class is; None for an absent class."""
    intervals: list[tuple[float, float] | None] = []
    for place, (row, total) in enumerate(zip(rows, totals, strict=True)):
        low, high = total_bounds(total)
        if high == 0:
            intervals.append(None)
        elif row is None:
            intervals.append((0.0, 1.0))
        else:
            first, last = bounds(row[place])
            others = sum(bounds(value)[0] for other, value in enumerate(row) if other != place)
            intervals.append((first / max(high, first), min(1.0, last / max(low, last + others))))
    return intervals
