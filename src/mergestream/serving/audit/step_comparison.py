"""Compare a logged step with the same step computed again: which fields differ, and by how much."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Fields that say what the model did. One that was logged but not computed again counts as a difference.
COMPARED = (
    "inputs",
    "predictions",
    "probabilities",
    "encoder_coefficients",
    "head_coefficients",
    "lambdas",
    "entropy",
    "scores",
    "consistency",
    "class_shift",
    "head_expert",
    "weights_sha256",
    "logits_sha256",
)
# Another class or another image is never a small difference, even where the field holds numbers.
EXACT = ("inputs", "predictions", "head_expert")
# Hashes of computed numbers: on other hardware they differ with the last bit of any of them.
BITS = ("weights_sha256", "logits_sha256")


@dataclass(frozen=True)
class FieldDifference:
    """One field that differs; `largest` is set if only numbers differ."""

    field: str
    what: str
    largest: float | None = None

    def within(self, tolerance: float) -> bool:
        """Whether the tolerance allows this difference. A tolerance of 0 allows none."""
        return tolerance > 0 and (self.field in BITS or (self.largest is not None and self.largest <= tolerance))

    def __str__(self) -> str:
        return f"{self.field} {self.what}"


def compare(logged: Mapping[str, Any], computed: Mapping[str, Any]) -> tuple[FieldDifference, ...]:
    """Compare every field that was computed again, and those of COMPARED that were logged."""
    fields = [*computed, *(name for name in COMPARED if name in logged and name not in computed)]
    differences = (_difference(name, logged, computed) for name in fields)
    return tuple(difference for difference in differences if difference is not None)


def _difference(name: str, logged: Mapping[str, Any], computed: Mapping[str, Any]) -> FieldDifference | None:
    if name not in computed:
        return FieldDifference(name, "was not computed again")
    if name not in logged:
        return FieldDifference(name, "is not in the log")
    pairs = list(_pairs(logged[name], computed[name]))
    unequal = [(a, b) for a, b in pairs if a != b]
    if not unequal:
        return None
    if name in EXACT or not all(_is_finite(value) for pair in unequal for value in pair):
        return FieldDifference(name, f"differs in {len(unequal)} of {len(pairs)} values")
    largest = max(abs(a - b) for a, b in unequal)
    return FieldDifference(
        name, f"differs by up to {largest:.3g} in {len(unequal)} of {len(pairs)} values", float(largest)
    )


def _pairs(one: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """Values at the same place of two nested values; where the nesting differs, the two parts themselves."""
    if _is_list(one) and _is_list(other) and len(one) == len(other):
        for a, b in zip(one, other, strict=True):
            yield from _pairs(a, b)
    elif isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        for key in one:
            yield from _pairs(one[key], other[key])
    else:
        yield one, other


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
