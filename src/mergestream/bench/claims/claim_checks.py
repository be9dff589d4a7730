"""Claims about variants of the method and their gain over the mean; and the check of all claims."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from mergestream.bench.analysis.comparison import Duel, Estimate, Pairing, duel, pairing_of, streams_of
from mergestream.bench.analysis.resampling import batch_counts, estimate_over_targets
from mergestream.bench.claims.claim_finding import POINTS, SHARE, UNKNOWN, ClaimFinding, missing, verdict_of
from mergestream.bench.claims.score_claims import check_scores, evidence_of_runs
from mergestream.bench.records import Run
from mergestream.functional.intervals import FEW_BATCHES

OURS = "entropy_adaptive"
MEAN, SHARED, DECOUPLED = "mean", "entropy_adaptive(head=shared)", "entropy_adaptive"
LEAST_SHARE = 0.85  # the paper: decoupling gives 85 to 90 % of what layer-wise coefficients would
SHARE_CLAIM = "Decoupling gives 85 % or more of what layer-wise coefficients gain over the mean."
Gains = tuple[np.ndarray, np.ndarray]  # points [cells] and resamples [cells,RESAMPLES]


class OptionClaim(NamedTuple):
    """The paper's value of an option is better than its rival; `own_options` exist only for the rival."""

    claim: str
    option: str
    value: str
    rival: str
    own_options: tuple[str, ...] = ()


OPTION_CLAIMS = (
    OptionClaim(
        "Entropy is a better score to merge by than the maximum softmax.",
        "score",
        "entropy",
        "max_softmax",
    ),
    OptionClaim(
        "Weighting by the inverse of the entropy is better than by a softmax of it.",
        "weighting",
        "inverse",
        "softmax",
        ("encoder_sharpness",),
    ),
)


def check_variants(runs: Sequence[Run]) -> list[ClaimFinding]:
    """Compare every pair of variants that differ in one option alone, on every stream that both have."""
    findings: list[ClaimFinding] = []
    for each in OPTION_CLAIMS:
        duels = [one for pair in _variant_pairs(runs, each) for one in duel(runs, *pair)]
        needed = f"runs of {OURS} and of {OURS}({each.option}={each.rival}) on the same streams of the same pool."
        findings += duel_findings(each.claim, duels, needed)
    return findings


def _variant_pairs(runs: Sequence[Run], claim: OptionClaim) -> Iterator[tuple[str, str]]:
    """Labels of variants with the paper's value and with the rival's that agree in all other options."""
    variants = {run.arguments["label"]: run.arguments["options"] for run in runs if run.arguments["method"] == OURS}

    def others(options: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in options.items() if key != claim.option and key not in claim.own_options}

    for label, options in variants.items():
        for rival, rivals in variants.items():
            values = options.get(claim.option), rivals.get(claim.option)
            if values == (claim.value, claim.rival) and others(options) == others(rivals):
                yield label, rival


def duel_findings(claim: str, duels: Sequence[Duel], needed: str) -> list[ClaimFinding]:
    """The claim that `ours` is better in each duel; without a duel, a finding that says what is needed."""
    if not duels:
        return [missing(claim, needed)]
    findings = []
    for each in duels:
        estimate, measure = each.difference.times(100), f"accuracy of {each.ours} less that of {each.theirs}"
        findings.append(ClaimFinding(claim, each.stream, measure, POINTS, estimate, verdict_of(estimate)))
    return findings


def check_gains(runs: Sequence[Run]) -> list[ClaimFinding]:
    """Gains over the mean, decoupled against shared, and both as shares of the layer-wise gain.

    Layer-wise coefficients are those of adamerging(granularity=layer): one per expert and tensor, learnt by gradients
    on the batch's entropy. They are what this code has, not the best that labels could give.
    """
    labels = [r.arguments["label"] for r in runs if r.arguments.get("options", {}).get("granularity") == "layer"]
    layer_wise = list(dict.fromkeys(labels))
    needed = f"runs of {DECOUPLED} and of {SHARED} on the same streams."
    claim = "Decoupled coefficients are better than shared ones."
    decoupled = duel_findings(claim, duel(runs, DECOUPLED, SHARED), needed)
    return [*_gains(runs, layer_wise), *decoupled, *_shares(runs, layer_wise)]


def _gains(runs: Sequence[Run], layer_wise: Sequence[str]) -> list[ClaimFinding]:
    findings = []
    for kind, labels in (("Shared", (SHARED,)), ("Decoupled", (DECOUPLED,)), ("Layer-wise", tuple(layer_wise))):
        claim = f"{kind} coefficients gain over the mean."
        duels = [each for label in labels for each in duel(runs, label, MEAN)]
        needed = f"runs of {labels[0] if labels else 'adamerging(granularity=layer)'} and of mean on the same streams."
        findings += duel_findings(claim, duels, needed)
    return findings


def _shares(runs: Sequence[Run], layer_wise: Sequence[str]) -> list[ClaimFinding]:
    findings = []
    for stream in streams_of(runs):
        here = [run for run in runs if run.arguments["stream"]["name"] == stream]
        for whole in layer_wise:
            for part in (DECOUPLED, SHARED):
                cells = _cells(here, (part, whole, MEAN))
                findings += [_share(stream, part, whole, cells)] if cells else []
    needed = "runs of adamerging(granularity=layer), entropy_adaptive and mean on the same streams; it needs a base."
    return findings or [missing(SHARE_CLAIM, needed)]


def _share(stream: str, part: str, whole: str, cells: Sequence["_Cell"]) -> ClaimFinding:
    claim = SHARE_CLAIM if part == DECOUPLED else SHARE_CLAIM.replace("Decoupling gives", "Shared coefficients give")
    measure = f"gain of {part} over the mean as a share of that of {whole}"
    targets = [cell.target for cell in cells]
    of_part, of_whole = _draws(cells)
    total = estimate_over_targets(of_whole[0].tolist(), of_whole[1], targets)
    if total.low <= 0:
        reason = f"On {stream}, {whole} has no clear gain over the mean ({total.points()} points)."
        return ClaimFinding(claim, stream, reason=reason)
    share = share_of(of_part, of_whole, targets)
    few = min(len(cell.images) for cell in cells) < FEW_BATCHES
    return ClaimFinding(claim, stream, measure, SHARE, share, UNKNOWN if few else verdict_of(share, LEAST_SHARE))


@dataclass(frozen=True)
class _Cell:
    """One target, seed and pool: right answers of three methods per batch [3,T], and images per batch [T]."""

    target: str
    right: np.ndarray
    images: np.ndarray


def _cells(here: Sequence[Run], labels: Sequence[str]) -> list[_Cell]:
    groups: dict[Pairing, dict[str, Run]] = {}
    for run in here:
        groups.setdefault(pairing_of(run), {})[run.arguments["label"]] = run
    cells = []
    for (target, *_), group in groups.items():
        if all(label in group for label in labels):
            matrices = [group[label].confusions() for label in labels]
            right = np.stack([np.trace(each, axis1=1, axis2=2) for each in matrices])
            cells.append(_Cell(target, right, matrices[0].sum(axis=(1, 2))))
    return cells


def _draws(cells: Sequence[_Cell]) -> tuple[Gains, Gains]:
    """Gains of the first and of the second method over the last, with the same batches drawn for all three."""
    random, points, draws = np.random.RandomState(0), [], []
    for cell in cells:
        counts = batch_counts(random, len(cell.images))
        points.append(cell.right.sum(axis=1) / cell.images.sum())
        draws.append((counts @ cell.right.T).T / (counts @ cell.images))
    point, drawn = np.stack(points, axis=1), np.stack(draws, axis=1)  # [3,cells], [3,cells,RESAMPLES]
    return (point[0] - point[2], drawn[0] - drawn[2]), (point[1] - point[2], drawn[1] - drawn[2])


def share_of(part: Gains, whole: Gains, targets: Sequence[str]) -> Estimate:
    """part / whole with Fieller's interval: the shares s for which part - s * whole may be 0. `whole` is above 0."""

    def contrast(share: float) -> Estimate:
        return estimate_over_targets((part[0] - share * whole[0]).tolist(), part[1] - share * whole[1], targets)

    zero, total = contrast(0).mean, estimate_over_targets(whole[0].tolist(), whole[1], targets).mean
    return Estimate(zero / total, _falls_to_zero(lambda s: contrast(s).low), _falls_to_zero(lambda s: contrast(s).high))


def _falls_to_zero(function: Callable[[float], float], low: float = -100.0, high: float = 100.0) -> float:
    """Where a falling function crosses 0, by bisection."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return (low + high) / 2


def check_claims(runs: Sequence[Run]) -> list[ClaimFinding]:
    """Check every claim on labelled runs; a claim without data gives a finding that says what is missing."""
    labelled = [run for run in runs if len(run.labels) and bool((run.labels >= 0).all())]
    return [*check_scores(evidence_of_runs(labelled)), *check_variants(labelled), *check_gains(labelled)]
