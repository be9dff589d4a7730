"""What a pool asks of an expert before it is taken in, and again whenever the pool is verified."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mergestream.pool.bank import require_some
from mergestream.pool.checkpoint import open_weights
from mergestream.pool.exchange.confidence_checks import confidence_warnings
from mergestream.pool.exchange.noise_probe import NoiseProbe, ProbeResult
from mergestream.pool.exchange.pool_folder import PoolFolder
from mergestream.pool.expert_card import ExpertCard
from mergestream.pool.statistics import read_statistics
from mergestream.runtime.errors import CheckpointError, MergestreamError

COMPARED = {"architecture": "network", "head": "head", "classes": "classes", "preprocessing": "preprocessing"}


@dataclass(frozen=True)
class CheckResult:
    problems: tuple[str, ...]
    warnings: tuple[str, ...]


def check_expert(pool: PoolFolder, folder: Path, card: ExpertCard) -> CheckResult:
    """An expert in any folder, held to the pool's other experts and its base; every sentence at once."""
    problems = said(require_some, {card.name: card})
    others = pool.others(card.name)
    reference = others[0] if others else pool.base or card
    differences = differences_between(card, reference)
    problems += [*differences, *base_problems(card, pool.base)]
    if differences:
        return CheckResult((*problems, *said(open_weights, folder, card)), ())
    home = folder if reference is card else pool.folder(reference.name)
    gauge = NoiseProbe(reference, home)
    readings: list[ProbeResult] = []
    problems += said(lambda: readings.append(gauge.read(folder, card)))
    problems += said(require_statistics, folder, card)
    if problems:
        return CheckResult(tuple(problems), ())
    theirs = [gauge.read(pool.folder(other.name), other) for other in others]
    warnings = [*base_warnings(card, others, pool.base), *confidence_warnings(card, readings[0], theirs)]
    return CheckResult((), tuple(warnings))


def said(check: Callable[..., object], *arguments: object) -> list[str]:
    """What a check that raises has to say, as a list of at most one sentence."""
    try:
        check(*arguments)
    except MergestreamError as error:
        return [str(error)]
    return []


def differences_between(card: ExpertCard, reference: ExpertCard) -> list[str]:
    """In what an expert differs from another of its pool that a merge depends on."""
    found = []
    for what, word in COMPARED.items():
        mine, theirs = getattr(card, what), getattr(reference, what)
        if mine == theirs:
            continue
        if what == "classes" and sorted(mine) == sorted(theirs):
            found.append(
                f"'{card.name}' has the classes of '{reference.name}' in another order ({', '.join(mine)}, not "
                f"{', '.join(theirs)}): its labels would silently mean other things. Reorder its head's rows at the "
                f"site, and its card with them."
            )
        else:
            found.append(
                f"'{card.name}' and '{reference.name}' differ in {word}: {_shown(mine)} against {_shown(theirs)}."
            )
    return found


def _shown(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else repr(value)


def base_problems(card: ExpertCard, base: ExpertCard | None) -> list[str]:
    if base is None or card.base_sha256 in (None, base.weights_sha256):
        return []
    return [
        f"'{card.name}' was not trained from this pool's base: its card names {str(card.base_sha256)[:12]}…, the "
        f"base is {base.weights_sha256[:12]}…. "
        f"Train it from the pool's base folder, or allow it with --allow-other-base."
    ]


def base_warnings(card: ExpertCard, others: list[ExpertCard], base: ExpertCard | None) -> list[str]:
    """Starts that cannot be compared, or differ where the pool holds no base to be strict about."""
    if base is not None and card.base_sha256 is None:
        return [
            f"Expert '{card.name}' does not say that it started from this pool's base: task_arithmetic, ties and drift "
            f"measure it from there all the same."
        ]
    starts = {other.base_sha256 for other in others} - {None}
    if base is None and card.base_sha256 and starts and card.base_sha256 not in starts:
        return [f"Expert '{card.name}' started from other weights than the pool's experts; their mean may be poor."]
    return []


def require_statistics(folder: Path, card: ExpertCard) -> None:
    """Statistics, where there are any, must be of these very weights and finite."""
    statistics = read_statistics(folder, card)
    for key in statistics.tensors if statistics else ():
        assert statistics is not None
        if not bool(torch.isfinite(statistics.tensors[key]).all()):
            raise CheckpointError(f"The statistics of '{card.name}' hold NaN or Inf in '{key}'. Measure them again.")
