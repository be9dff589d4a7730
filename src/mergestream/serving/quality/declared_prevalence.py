"""The shares of the classes that a site declares, from the command line or a YAML file."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mergestream.runtime.errors import InputError, require_known
from mergestream.runtime.option_checks import parse_options
from mergestream.runtime.yaml_file import read_yaml

LARGEST_FILE = 2**16
ROUNDING = 0.005  # that shares may miss 1 by


def parse_prevalence(text: str | None) -> dict[str, float] | None:
    """Parse 'class=0.02,other=0.98', or the YAML file of that name, which maps classes to shares."""
    if text is None:
        return None
    is_file = text.endswith((".yaml", ".yml"))
    values = _read(Path(text)) if is_file else dict(parse_options(text.split(",")))
    for name, share in values.items():
        if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= 1:
            raise InputError(f"The declared prevalence of '{name}' must be a share between 0 and 1, got {share!r}.")
    return {str(name): float(share) for name, share in values.items()}


def _read(file: Path) -> Mapping[Any, Any]:
    values = read_yaml(file, "The declared prevalence", LARGEST_FILE)
    if not isinstance(values, Mapping) or not values:
        raise InputError(f"The declared prevalence {file} must map classes to shares, one per line: 'class: 0.02'.")
    return values


def shares_of(declared: Mapping[str, float], classes: Sequence[str]) -> tuple[float, ...]:
    """One share per class, in order, with a sum of 1. One class may be left out: it has the rest."""
    for name in declared:
        require_known("class in the declared prevalence", name, classes)
    missing, total = [name for name in classes if name not in declared], sum(declared.values())
    if len(missing) > 1:
        raise InputError(f"The declared prevalence leaves out {', '.join(missing)}: leave out one class at most.")
    if total > 1 + ROUNDING or (not missing and total < 1 - ROUNDING):
        raise InputError(f"The shares of the declared prevalence must add up to 1; they add up to {total:.4g}.")
    rest = max(0.0, 1 - total)
    shares = [declared.get(name, rest) for name in classes]
    return tuple(share / sum(shares) for share in shares)
