"""Claims about variants of the method and their gain over the mean; and the check of all claims."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mergestream.bench.analysis.comparison import Estimate, by_pairing, duel, grouped
from mergestream.bench.claims.claim_finding import (
    POINTS,
    RESAMPLES,
    SHARE,
    UNKNOWN,
    ClaimFinding,
    estimate_over_targets,
    missing,
    verdict_of,
)
from mergestream.bench.claims.score_claims import check_scores, evidence_of_runs
from mergestream.bench.records import Run
from mergestream.functional.intervals import FEW_BATCHES, resampled
from mergestream.functional.metrics import score_of

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


ENTROPY_IS_BETTER = "Entropy is a better score to merge by than the maximum softmax."
INVERSE_IS_BETTER = "Weighting by the inverse of the entropy is better than by a softmax of it."
OPTION_CLAIMS = (
    OptionClaim(ENTROPY_IS_BETTER, "score", "entropy", "max_softmax"),
    OptionClaim(INVERSE_IS_BETTER, "weighting", "inverse", "softmax", ("encoder_sharpness",)),
    OptionClaim("Decoupled coefficients are better than shared ones.", "head", "entropy_gap", "shared"),
)


def check_claims(runs: Sequence[Run]) -> list[ClaimFinding]:
    """Check every claim on labelled runs; a claim without data gives a finding that says what is missing.

    Layer-wise coefficients are those of adamerging(granularity=layer): one per expert and tensor, learnt by gradients
    on the batch's entropy. They are what this code has, not the best that labels could give.
    """
    labelled = [run for run in runs if len(run.labels) and bool((run.labels >= 0).all())]
    layer_wise = list(dict.fromkeys(run.label for run in labelled if _is_layer_wise(run)))
    findings = check_scores(evidence_of_runs(labelled))
    for claim in OPTION_CLAIMS:
        findings += _duels(labelled, claim.claim, list(_variant_pairs(labelled, claim)), _rival(claim), DECOUPLED)
    gains = {"Shared": [SHARED], "Decoupled": [DECOUPLED], "Layer-wise": layer_wise}
    for kind, labels in gains.items():
        pairs = [(label, MEAN) for label in labels]
        needed = labels[0] if labels else "adamerging(granularity=layer)"
        findings += _duels(labelled, f"{kind} coefficients gain over the mean.", pairs, needed, MEAN)
    return [*findings, *_shares(labelled, layer_wise)]


def _is_layer_wise(run: Run) -> bool:
    return bool(run.arguments.get("options", {}).get("granularity") == "layer")


def _rival(claim: OptionClaim) -> str:
    return f"{DECOUPLED}({claim.option}={claim.rival})"


def _variant_pairs(runs: Sequence[Run], claim: OptionClaim) -> Iterator[tuple[str, str]]:
    """Labels of variants with the paper's value and with the rival's that agree in all other options."""
    every = [run.arguments for run in runs if run.arguments["method"] == DECOUPLED]
    variants = {arguments["label"]: arguments["options"] for arguments in every}

    def others(options: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in options.items() if key != claim.option and key not in claim.own_options}

    for label, options in variants.items():
        for rival, rivals in variants.items():
            values = options.get(claim.option), rivals.get(claim.option)
            if values == (claim.value, claim.rival) and others(options) == others(rivals):
                yield label, rival


def _duels(
    runs: Sequence[Run], claim: str, pairs: Sequence[tuple[str, str]], needed: str, also_needed: str
) -> list[ClaimFinding]:
    """The claim that the first of each pair is better, on every stream; without runs, a finding that names them."""
    findings = []
    for each in (each for pair in pairs for each in duel(runs, *pair)):
        estimate, measure = each.difference.times(100), f"accuracy of {each.ours} less that of {each.theirs}"
        findings.append(ClaimFinding(claim, each.stream, measure, POINTS, estimate, verdict_of(estimate)))
    sentence = f"runs of {needed} and of {also_needed} on the same streams of the same pool."
    return findings or [missing(claim, sentence)]


def _shares(runs: Sequence[Run], layer_wise: Sequence[str]) -> list[ClaimFinding]:
    findings = [
        finding
        for stream, here in grouped(runs, "stream").items()
        for whole in layer_wise
        for part in (DECOUPLED, SHARED)
        for finding in _share(here, stream, part, whole)
    ]
    needed = "runs of adamerging(granularity=layer), entropy_adaptive and mean on the same streams; it needs a base."
    return findings or [missing(SHARE_CLAIM, needed)]


def _share(runs: Sequence[Run], stream: str, part: str, whole: str) -> Iterator[ClaimFinding]:
    """The gain of one method over the mean as a share of another's, where all three have runs."""
    every = [by_pairing(runs, label, stream) for label in (part, whole, MEAN)]
    pairs = [pair for pair in every[0] if all(pair in own for own in every)]
    if not pairs:
        return
    targets = [target for target, *_ in pairs]
    claim = SHARE_CLAIM if part == DECOUPLED else SHARE_CLAIM.replace("Decoupling gives", "Shared coefficients give")
    matrices = [[own[pair].confusions() for pair in pairs] for own in every]
    points = [np.array([score_of(each.sum(axis=0), "accuracy") for each in own]) for own in matrices]
    draws = [resampled(own, "accuracy", RESAMPLES) for own in matrices]
    of_part, of_whole = ((points[i] - points[2], draws[i] - draws[2]) for i in (0, 1))
    total = estimate_over_targets(*of_whole, targets)
    if total.low <= 0:
        reason = f"On {stream}, {whole} has no clear gain over the mean ({total.points()} points)."
        yield ClaimFinding(claim, stream, reason=reason)
        return
    measure = f"gain of {part} over the mean as a share of that of {whole}"
    share = share_of(of_part, of_whole, targets)
    few = min(map(len, matrices[0])) < FEW_BATCHES
    yield ClaimFinding(claim, stream, measure, SHARE, share, UNKNOWN if few else verdict_of(share, LEAST_SHARE))


def share_of(part: Gains, whole: Gains, targets: Sequence[str]) -> Estimate:
    """part / whole with Fieller's interval: the shares s for which part - s * whole may be 0. `whole` is above 0."""

    def contrast(share: float) -> Estimate:
        return estimate_over_targets(part[0] - share * whole[0], part[1] - share * whole[1], targets)

    share = contrast(0).mean / estimate_over_targets(*whole, targets).mean
    return Estimate(share, _falls_to_zero(lambda s: contrast(s).low), _falls_to_zero(lambda s: contrast(s).high))


def _falls_to_zero(function: Callable[[float], float], low: float = -100.0, high: float = 100.0) -> float:
    """Where a falling function crosses 0, by bisection."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return (low + high) / 2
