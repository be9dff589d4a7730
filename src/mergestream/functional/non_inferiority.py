"""Verdicts on a difference between two methods: better, not inferior by a margin, inferior or undecided."""

from collections.abc import Sequence

import numpy as np

OUTCOMES = ("better", "not inferior", "inferior", "undecided")  # in the order in which sentences name them
# How much worse a method may be and still count as not inferior; 0.005 of a share is half a point.
MARGINS = {"accuracy": 0.005, "balanced_accuracy": 0.005, "auroc": 0.005, "nll": 0.01, "brier": 0.005}
LOWER_IS_BETTER = ("nll", "brier")
LEVEL = 0.025  # one-sided, which is a 95 % interval's on either side


def outcome_of(low: float, high: float, margin: float) -> str:
    """Verdict from the 95 % interval of a gain; `low` is the one-sided 97.5 % lower limit as well.

    Better: above 0. Not inferior: above -margin. Inferior: below 0 and not above -margin. Else undecided.
    """
    if low > 0:
        return "better"
    if low > -margin:
        return "not inferior"
    return "inferior" if high < 0 else "undecided"


def gain_p_values(draws: np.ndarray, margin: float) -> tuple[float, float, float]:
    """One-sided p-values of 'better', 'not inferior' and 'inferior' from bootstrap draws of a gain [R]."""
    total = len(draws) + 1
    against = (draws <= 0, draws <= -margin, draws >= 0)
    better, not_inferior, inferior = ((1 + int(each.sum())) / total for each in against)
    return better, not_inferior, inferior


def holm(p_values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Adjusted p-values [M] in the given order, after Holm: the family errs at most at the level of one test."""
    values = np.asarray(p_values, dtype=float)
    order = np.argsort(values, kind="stable")
    factors = np.arange(len(values), 0, -1)
    adjusted = np.empty_like(values)
    adjusted[order] = np.minimum(np.maximum.accumulate(factors * values[order]), 1.0)
    return adjusted


def adjusted_outcomes(p_values: Sequence[tuple[float, float, float]]) -> list[str]:
    """Verdicts of a family of endpoints from their `gain_p_values`, each of the three tests adjusted by Holm."""
    if not p_values:
        return []
    adjusted = np.stack([holm(column) for column in zip(*p_values, strict=True)], axis=1)  # [M,3]
    named = ("better", "not inferior", "inferior")
    return [next((name for name, p in zip(named, row, strict=True) if p < LEVEL), "undecided") for row in adjusted]
