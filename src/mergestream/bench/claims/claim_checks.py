"""The paper's claims and questions of ours, checked on labelled runs: scores and errors, gains of options."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from mergestream.bench.analysis.comparison import Estimate, by_pairing, grouped, pairing_of
from mergestream.bench.analysis.duels import duel
from mergestream.bench.claims.claim_finding import (
    CORRELATION,
    POINTS,
    RESAMPLES,
    SHARE,
    UNKNOWN,
    ClaimFinding,
    estimate_over_targets,
    finding_over_targets,
    missing,
    verdict_of,
)
from mergestream.bench.records import Run
from mergestream.functional import scores as scoring
from mergestream.functional.intervals import FEW_BATCHES, resampled
from mergestream.functional.metrics import score_of
from mergestream.functional.rank_correlation import kendall, spearman

Coefficient = Callable[..., np.ndarray]
Drawn = tuple[float, np.ndarray]  # a statistic, and its resamples [R]
TRACKS = "Low entropy goes with low error."
QUESTION = "Our question: "
RANKS_BETTER = f"{QUESTION}entropy tells the better expert more reliably than the maximum softmax does."
NEEDED = "the experts' own answers with labels: runs of single_expert for every expert (each benchmark makes them)."
MEAN, SHARED, DECOUPLED = "mean", "entropy_adaptive(head=shared)", "entropy_adaptive"
LEAST_SHARE = 0.85  # the paper: decoupling gives 85 to 90 % of what layer-wise coefficients would
GAINS = "Decoupled coefficients gain over the mean."
SHARE_CLAIM = "Decoupling gives 85 % or more of what layer-wise coefficients gain over the mean."
Gains = tuple[np.ndarray, np.ndarray]  # points [cells] and resamples [cells,RESAMPLES]


class OptionClaim(NamedTuple):
    """The paper's value of an option is better than its rival; `own_options` exist only for the rival."""

    claim: str
    option: str
    value: str
    rival: str
    own_options: tuple[str, ...] = ()


ENTROPY_IS_BETTER = f"{QUESTION}entropy is a better score to merge by than the maximum softmax."
INVERSE_IS_BETTER = f"{QUESTION}weighting by the inverse of the entropy is better than by a softmax of it."
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
    layer_wise = [run for run in labelled if run.arguments.get("options", {}).get("granularity") == "layer"]
    findings = check_scores(evidence_of_runs(labelled))
    for claim in OPTION_CLAIMS:
        needed = f"{DECOUPLED}({claim.option}={claim.rival})"
        findings += _duels(labelled, claim.claim, list(_variant_pairs(labelled, claim)), needed, DECOUPLED)
    layered = list(dict.fromkeys(run.label for run in layer_wise))
    gains = {"Shared": [SHARED], "Decoupled": [DECOUPLED], "Layer-wise": layered}
    for kind, labels in gains.items():
        pairs = [(label, MEAN) for label in labels]
        needed = labels[0] if labels else "adamerging(granularity=layer)"
        findings += _duels(labelled, f"{kind} coefficients gain over the mean.", pairs, needed, MEAN)
    return [*findings, *_shares(labelled, layered)]


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
        estimate, measure = each.these_targets.times(100), f"accuracy of {each.ours} less that of {each.theirs}"
        findings.append(ClaimFinding(claim, each.stream, measure, POINTS, estimate, verdict_of(estimate)))
    sentence = f"runs of {needed} and of {also_needed} on the same streams of the same pool."
    return findings or [missing(claim, sentence)]


def _shares(runs: Sequence[Run], layer_wise: Sequence[str]) -> list[ClaimFinding]:
    places = product(grouped(runs, "stream").items(), layer_wise, (DECOUPLED, SHARED))
    findings = [finding for (stream, here), whole, part in places for finding in _share(here, stream, part, whole)]
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


def _falls_to_zero(function: Callable[[float], float]) -> float:
    """Where a falling function crosses 0, by bisection."""
    low, high = -100.0, 100.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Evidence:
    """Scores and errors of K experts on T batches of one stream [T,K]; a lower score means more confident."""

    target: str
    stream: str
    experts: tuple[str, ...]
    entropy: np.ndarray  # nats
    max_softmax: np.ndarray  # 1 minus the mean of the maximum softmax
    error: np.ndarray  # 0 to 1


def evidence_of_runs(runs: Sequence[Run]) -> list[Evidence]:
    """Evidence from the labelled runs of every expert alone: one per target, seed, pool and stream."""
    groups: dict[tuple[Any, ...], dict[str, Run]] = defaultdict(dict)
    for run in runs:
        if run.is_single:
            key = *pairing_of(run), run.stream, run.arguments["stream"]["hash"]
            groups[key][run.arguments["options"]["expert"]] = run
    return [_of_group(group) for group in groups.values() if len(group) > 1]


def _of_group(group: dict[str, Run]) -> Evidence:
    first = next(iter(group.values()))
    experts = tuple(name for name in first.arguments["pool"]["experts"] if name in group)
    # Softmax undoes the logarithm; a probability that fp16 rounded to 0 stays 0.
    logits = torch.stack([group[name].probabilities.log() for name in experts])  # [K,N,C]
    wrong = (logits.argmax(dim=-1) != first.labels).float()
    sizes = [len(batch) for batch in first.batches]
    scores = [[score(part) for part in logits.split(sizes, dim=1)] for score in (scoring.entropy, scoring.max_softmax)]
    errors = [part.mean(dim=1) for part in wrong.split(sizes, dim=1)]
    columns = [torch.stack(parts).numpy().astype(float) for parts in (*scores, errors)]
    return Evidence(first.target, first.stream, experts, *columns)


def _mean(values: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """Mean over the first axis of the defined values [N,...], each counted [N,...] times; NaN if there is none."""
    return np.ma.filled(np.ma.average(np.ma.masked_invalid(values), axis=0, weights=counts), np.nan)


def _over_resamples(values: np.ndarray, counts: np.ndarray) -> Drawn:
    """The mean of values [T] over the batches where they are defined, and under resamples with counts [R,T]."""
    return float(_mean(values)), _mean(np.broadcast_to(values[:, None], counts.T.shape), counts.T)


def _among_experts(coefficient: Coefficient, each: Evidence, counts: np.ndarray) -> Drawn:
    return _over_resamples(coefficient(each.entropy, each.error), counts)


def _over_batches(coefficient: Coefficient, each: Evidence, counts: np.ndarray) -> Drawn:
    columns = list(zip(each.entropy.T, each.error.T, strict=True))
    point = _mean(np.array([coefficient(x, y) for x, y in columns]))
    return float(point), _mean(np.stack([coefficient(x, y, counts) for x, y in columns]))


def _entropy_less_max_softmax(each: Evidence, counts: np.ndarray) -> Drawn:
    return _over_resamples(spearman(each.entropy, each.error) - spearman(each.max_softmax, each.error), counts)


AMONG = "correlation of entropy and error among the experts, mean over batches"
OVER = "correlation of entropy and error over batches, mean over experts"
LESS = "Spearman correlation with the error among the experts: entropy's less the maximum softmax's"
# A claim, what is measured for it, and the function that measures it on one stream of one target.
STATISTICS: tuple[tuple[str, str, Callable[[Evidence, np.ndarray], Drawn]], ...] = (
    (TRACKS, f"Spearman {AMONG}", partial(_among_experts, spearman)),
    (TRACKS, f"Spearman {OVER}", partial(_over_batches, spearman)),
    (TRACKS, f"Kendall {AMONG}", partial(_among_experts, kendall)),
    (TRACKS, f"Kendall {OVER}", partial(_over_batches, kendall)),
    (RANKS_BETTER, LESS, _entropy_less_max_softmax),
)


def check_scores(evidence: Sequence[Evidence]) -> list[ClaimFinding]:
    """Per stream: entropy against error among experts and over batches, and against the maximum softmax."""
    if not evidence:
        return [missing(TRACKS, NEEDED), missing(RANKS_BETTER, NEEDED)]
    return [_finding(here, *statistic) for here in grouped(evidence, "stream").values() for statistic in STATISTICS]


def _finding(
    here: Sequence[Evidence], claim: str, measure: str, statistic: Callable[[Evidence, np.ndarray], Drawn]
) -> ClaimFinding:
    """Average over targets; streams on which the statistic is undefined (all experts equal) are left out."""
    stream, random = here[0].stream, np.random.RandomState(0)
    results = []
    for each in here:
        batches = len(each.error)
        counts = random.multinomial(batches, np.full(batches, 1 / batches), size=RESAMPLES)
        results.append((each.target, *statistic(each, counts)))
    fewest = min(len(each.error) for each in here)
    undefined = f"On {stream} no batch decides: all experts have the same error, or the same score."
    return finding_over_targets(
        claim, stream, measure, CORRELATION, results, fewest_batches=fewest, undefined=undefined
    )
