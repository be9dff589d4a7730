"""Checks of one expert: before it enters a pool, and whenever the pool is verified."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mergestream.pool.card_comparison import base_problems, base_warnings, differences
from mergestream.pool.checkpoint import open_weights
from mergestream.pool.exchange.confidence_checks import confidence_warnings
from mergestream.pool.exchange.noise_probe import NoiseProbe, ProbeResult
from mergestream.pool.exchange.pool_folder import PoolFolder
from mergestream.pool.expert_card import ExpertCard
from mergestream.pool.parts import require_some
from mergestream.pool.statistics import read_statistics
from mergestream.runtime.errors import CheckpointError, MergestreamError


@dataclass(frozen=True)
class CheckResult:
    """Problems refuse an expert; warnings do not."""

    problems: tuple[str, ...]
    warnings: tuple[str, ...]


def check_expert(pool: PoolFolder, folder: Path, card: ExpertCard) -> CheckResult:
    """Compare an expert in any folder with the pool's other experts and its base; report all problems at once."""
    others = pool.others(card.name)
    reference = others[0] if others else pool.base or card
    home = folder if reference is card else pool.folder(reference.name)
    probe = None if differences(card, reference) else NoiseProbe(reference, home)
    problems, result = inspect_expert(folder, card, reference, pool.base, probe)
    problems = [*error_messages(require_some, {card.name: card}), *problems]
    if problems or probe is None or result is None:
        return CheckResult(tuple(problems), ())
    other_results = [probe.read(pool.folder(other.name), other) for other in others]
    warnings = [*base_warnings(card, others, pool.base), *confidence_warnings(card, result, other_results)]
    return CheckResult((), tuple(warnings))


def inspect_expert(
    folder: Path, card: ExpertCard, reference: ExpertCard, base: ExpertCard | None, probe: NoiseProbe | None
) -> tuple[list[str], ProbeResult | None]:
    """Problems of one expert's card, weights and statistics, and its answers to noise where they could be had."""
    problems, results = differences(card, reference), list[ProbeResult]()
    if problems or probe is None:
        problems += [*base_problems(card, base), *error_messages(open_weights, folder, card)]
    else:
        problems += base_problems(card, base)
        problems += error_messages(lambda: results.append(probe.read(folder, card)))
    problems += error_messages(require_statistics, folder, card)
    return problems, results[0] if results else None


def error_messages(check: Callable[..., object], *arguments: object) -> list[str]:
    """The message of a check that raises, as a list of at most one sentence."""
    try:
        check(*arguments)
    except MergestreamError as error:
        return [str(error)]
    return []


def require_statistics(folder: Path, card: ExpertCard) -> None:
    """Refuse statistics of other weights, or with NaN or Inf in them."""
    statistics = read_statistics(folder, card)
    tensors = statistics.tensors if statistics else {}
    for key in tensors:
        if not bool(torch.isfinite(tensors[key]).all()):
            raise CheckpointError(f"The statistics of '{card.name}' hold NaN or Inf in '{key}'. Measure them again.")
