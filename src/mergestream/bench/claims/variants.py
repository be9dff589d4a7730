"""Variants of the method against each other and against the mean, on the same batches."""

from collections.abc import Iterator, Sequence
from typing import Any

from mergestream.bench.analysis.comparison import Duel, Estimate, duel
from mergestream.bench.claims.findings import POINTS, UNKNOWN, Finding, judged, missing
from mergestream.bench.records import Run

OURS = "entropy_adaptive"
Question = tuple[str, str, str, str, str, tuple[str, ...]]
# Name, claim, option, what the paper takes, its rival, and options that only the rival has.
QUESTIONS: tuple[Question, ...] = (
    (
        "entropy_beats_max_softmax",
        "Entropy is a better score to merge by than the maximum softmax.",
        "score",
        "entropy",
        "max_softmax",
        (),
    ),
    (
        "inverse_beats_softmax",
        "Weighting by the inverse of the entropy is better than by a softmax of it.",
        "weighting",
        "inverse",
        "softmax",
        ("encoder_sharpness",),
    ),
)


def check_variants(runs: Sequence[Run]) -> list[Finding]:
    """Every pair of variants that differ in the option in question alone, on every stream that both have."""
    findings: list[Finding] = []
    for name, claim, option, ours, theirs, beside in QUESTIONS:
        pairs = list(pairs_apart(runs, option, ours, theirs, beside))
        duels = [each for pair in pairs for each in duel(runs, *pair)]
        needed = f"runs of {OURS} and of {OURS}({option}={theirs}) on the same streams of the same pool."
        findings += [duel_finding(name, claim, each) for each in duels] or [
            missing(name, claim, "difference in accuracy", POINTS, needed)
        ]
    return findings


def pairs_apart(
    runs: Sequence[Run], option: str, ours: str, theirs: str, beside: Sequence[str] = ()
) -> Iterator[tuple[str, str]]:
    """Labels of variants that agree in all other options, those in `beside` apart."""
    variants = {run.arguments["label"]: run.arguments["options"] for run in runs if run.arguments["method"] == OURS}

    def others(options: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in options.items() if key != option and key not in beside}

    for label, options in variants.items():
        for rival, rivals in variants.items():
            if (options.get(option), rivals.get(option)) == (ours, theirs) and others(options) == others(rivals):
                yield label, rival


def duel_finding(name: str, claim: str, each: Duel) -> Finding:
    """The claim that `ours` is better, in points of accuracy."""
    estimate, measure = in_points(each.difference), f"accuracy of {each.ours} less that of {each.theirs}"
    across = "; so too when targets are resampled" if each.holds_across_targets else "; not settled across targets"
    clear = across if judged(estimate) != UNKNOWN else ""
    sentence = (
        f"On {each.stream}, {each.ours} {each.outcome} {each.theirs}: {each.points()} points "
        f"({each.wins} wins, {each.losses} losses, {each.ties} ties over targets, seeds and pools){clear}."
    )
    return Finding(name, claim, each.stream, measure, POINTS, estimate, judged(estimate), sentence)


def in_points(share: Estimate) -> Estimate:
    return Estimate(100 * share.mean, 100 * share.low, 100 * share.high)
