"""Two methods on the same streams: two primary endpoints with a margin, and secondary ones adjusted by Holm."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mergestream.bench.analysis.comparison import Estimate, by_pairing, grouped
from mergestream.bench.records import Run
from mergestream.functional.intervals import percentiles, target_mean
from mergestream.functional.nested_bootstrap import NestedRun, PairedDifference, hierarchical_difference
from mergestream.functional.non_inferiority import (
    LOWER_IS_BETTER,
    MARGINS,
    OUTCOMES,
    adjusted_outcomes,
    gain_p_values,
    outcome_of,
)

PRIMARY = "accuracy"
MEAN, WORST = "mean over targets", "worst target"
# In the order of the tables. Everything but the primary metric's two endpoints is secondary.
ENDPOINTS = (
    (PRIMARY, MEAN),
    (PRIMARY, WORST),
    ("balanced_accuracy", MEAN),
    ("balanced_accuracy", WORST),
    ("auroc", MEAN),
    ("auroc", WORST),
    ("nll", MEAN),
    ("brier", MEAN),
)
PHRASES = dict(zip(OUTCOMES, ("better than", "not inferior to", "inferior to", "undecided against"), strict=True))
# Levels above groups and batches, and what to say of one that has a single element.
LEVELS = {"targets": "one", "training seeds": "one per target", "stream seeds": "one per pool"}


@dataclass(frozen=True)
class Endpoint:
    """Ours less theirs in one metric, with its 95 % interval and the verdict at a margin.

    The lower end of the interval is the one-sided 97.5 % lower limit, too. `p_value` is the one-sided one of 'not
    inferior', not adjusted. `target` is the worst one's name.
    """

    metric: str
    scope: str
    difference: Estimate
    p_value: float
    margin: float
    outcome: str
    target: str | None = None


@dataclass(frozen=True)
class Duel:
    """One method against another on the same batches.

    `difference` is the primary endpoint: accuracy, mean over targets, with targets resampled too. `these_targets`
    keeps the targets: what other images, trainings and orders might have shown there. `worst` is the other primary
    endpoint. `wins` and `losses` count (target, pool, stream seed).
    """

    stream: str
    ours: str
    theirs: str
    our_mean: float
    their_mean: float
    difference: Estimate
    these_targets: Estimate
    outcome: str
    margin: float
    worst: Endpoint
    secondary: tuple[Endpoint, ...]
    levels: tuple[str, ...]  # what was resampled, from the top
    wins: int
    losses: int
    ties: int


def duel(runs: Sequence[Run], ours: str, theirs: str, margin: float = MARGINS[PRIMARY]) -> list[Duel]:
    """One duel per stream, over the (target, pool, stream seed) that both methods have."""
    duels = []
    for stream, here in grouped(runs, "stream").items():
        mine, other = (by_pairing(here, label, stream) for label in (ours, theirs))
        pairs = [pair for pair in mine if pair in other]
        if pairs:
            duels.append(_duel(stream, [mine[pair] for pair in pairs], [other[pair] for pair in pairs], margin))
    return duels


def _duel(stream: str, mine: Sequence[Run], other: Sequence[Run], margin: float) -> Duel:
    nested = [run.nested for run in mine], [run.nested for run in other]
    results = _results(*nested)
    primary = results[PRIMARY]
    (mean, _), (worst, _), *others = (
        endpoint_of(metric, scope, results[metric], margin if metric not in LOWER_IS_BETTER else MARGINS[metric])
        for metric, scope in ENDPOINTS
        if metric in results
    )
    outcomes = adjusted_outcomes([p_values for _, p_values in others])
    gaps = [a.accuracy - b.accuracy for a, b in zip(mine, other, strict=True)]
    wins, losses = sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps)
    return Duel(
        stream,
        mine[0].label,
        other[0].label,
        _mean_accuracy(mine),
        _mean_accuracy(other),
        difference=mean.difference,
        these_targets=Estimate(primary.mean, *percentiles(primary.fixed_draws)),
        outcome=mean.outcome,
        margin=margin,
        worst=worst,
        secondary=tuple(replace(each, outcome=own) for (each, _), own in zip(others, outcomes, strict=True)),
        levels=primary.levels,
        wins=wins,
        losses=losses,
        ties=len(gaps) - wins - losses,
    )


def _mean_accuracy(runs: Sequence[Run]) -> float:
    return target_mean([run.accuracy for run in runs], [run.target for run in runs])


def _results(mine: Sequence[NestedRun], other: Sequence[NestedRun]) -> dict[str, PairedDifference]:
    """Of every metric that all runs define: AUROC needs two classes."""
    metrics = dict.fromkeys(metric for metric, _ in ENDPOINTS)
    every = {m: hierarchical_difference(mine, other, m, lower_is_better=m in LOWER_IS_BETTER) for m in metrics}
    return {metric: result for metric, result in every.items() if result is not None}


def endpoint_of(
    metric: str, scope: str, result: PairedDifference, margin: float
) -> tuple[Endpoint, tuple[float, float, float]]:
    """The endpoint with its verdict from the interval alone, and the p-values of its three verdicts."""
    sign = -1 if metric in LOWER_IS_BETTER else 1
    draws = result.mean_draws if scope == MEAN else result.worst_draws
    worst = min(result.by_target, key=lambda name: sign * result.by_target[name])
    estimate = Estimate(result.mean if scope == MEAN else result.by_target[worst], *percentiles(draws))
    gain, p_values = estimate.times(sign), gain_p_values(sign * draws, margin)
    outcome = outcome_of(gain.low, gain.high, margin)
    target = None if scope == MEAN else worst
    return Endpoint(metric, scope, estimate, p_values[1], margin, outcome, target), p_values


def describe_duels(duels: Sequence[Duel]) -> list[str]:
    """Two sentences per stream: the verdicts on the mean over targets, and those at the worst target."""
    sentences = []
    for stream, here in grouped(duels, "stream").items():
        means = [(each.outcome, f"{each.theirs} ({_points(each.difference)})") for each in here]
        worst = [(d.worst.outcome, f"{d.theirs} ({_points(d.worst.difference)} at {d.worst.target})") for d in here]
        margin = f"margin {100 * here[0].margin:g} points"
        sentences += [
            f"On {stream}, {here[0].ours} ({100 * here[0].our_mean:.1f} %; {margin}) is {_clauses(means)}.",
            f"At the worst target on {stream}, {here[0].ours} is {_clauses(worst)}.",
        ]
    return sentences


def _points(difference: Estimate) -> str:
    return f"{100 * difference.mean:+.1f}"


def _clauses(rivals: Sequence[tuple[str, str]]) -> str:
    """Rivals with their numbers by outcome, the outcomes in their usual order."""
    names = {outcome: [text for own, text in rivals if own == outcome] for outcome in OUTCOMES}
    return "; ".join(f"{PHRASES[outcome]} {', '.join(own)}" for outcome, own in names.items() if own)


def describe_levels(duels: Sequence[Duel]) -> str:
    """Which levels of the hierarchy the intervals resample, and which have one element."""
    resampled = list(dict.fromkeys(level for each in duels for level in each.levels))
    ordered = [level for level in LEVELS if level in resampled] + [level for level in resampled if level not in LEVELS]
    alone = [f"{level} ({count})" for level, count in LEVELS.items() if level not in resampled]
    rest = f" Not resampled: {', '.join(alone)}." if alone else ""
    return f"Resampled: {', '.join(ordered)}.{rest}"
