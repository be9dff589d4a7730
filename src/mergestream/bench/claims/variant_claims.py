"""Variants of the method against each other and against the mean, on the same batches."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mergestream.bench.analysis.comparison import Duel, duel
from mergestream.bench.claims.claim_finding import POINTS, UNKNOWN, ClaimFinding, missing, verdict_of
from mergestream.bench.records import Run

OURS = "entropy_adaptive"


class OptionClaim(NamedTuple):
    """The paper's value of an option is better than its rival; `own_options` exist only for the rival."""

    name: str
    claim: str
    option: str
    value: str
    rival: str
    own_options: tuple[str, ...] = ()


OPTION_CLAIMS = (
    OptionClaim(
        "entropy_beats_max_softmax",
        "Entropy is a better score to merge by than the maximum softmax.",
        "score",
        "entropy",
        "max_softmax",
    ),
    OptionClaim(
        "inverse_beats_softmax",
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
        duels = [found for pair in _pairs(runs, each) for found in duel(runs, *pair)]
        needed = f"runs of {OURS} and of {OURS}({each.option}={each.rival}) on the same streams of the same pool."
        findings += duel_findings(each.name, each.claim, duels, needed)
    return findings


def _pairs(runs: Sequence[Run], claim: OptionClaim) -> Iterator[tuple[str, str]]:
    """Labels of variants with the paper's value and with the rival's that agree in all other options."""
    variants = {run.arguments["label"]: run.arguments["options"] for run in runs if run.arguments["method"] == OURS}

    def others(options: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in options.items() if key != claim.option and key not in claim.own_options}

    for label, options in variants.items():
        for rival, rivals in variants.items():
            values = options.get(claim.option), rivals.get(claim.option)
            if values == (claim.value, claim.rival) and others(options) == others(rivals):
                yield label, rival


def duel_findings(name: str, claim: str, duels: Sequence[Duel], needed: str) -> list[ClaimFinding]:
    """The claim that `ours` is better in each duel; without a duel, a finding that says what is needed."""
    if not duels:
        return [missing(name, claim, "difference in accuracy", POINTS, needed)]
    return [_duel_finding(name, claim, each) for each in duels]


def _duel_finding(name: str, claim: str, each: Duel) -> ClaimFinding:
    estimate, measure = each.difference.times(100), f"accuracy of {each.ours} less that of {each.theirs}"
    across = "; the same if targets are resampled" if each.holds_across_targets else "; not settled across targets"
    clear = across if verdict_of(estimate) != UNKNOWN else ""
    sentence = (
        f"On {each.stream}, {each.ours} {each.outcome} {each.theirs}: {each.difference.points()} points "
        f"({each.wins} wins, {each.losses} losses, {each.ties} ties over targets, seeds and pools){clear}."
    )
    return ClaimFinding(name, claim, each.stream, measure, POINTS, estimate, verdict_of(estimate), sentence)
