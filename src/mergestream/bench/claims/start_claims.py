"""Whether experts from random starts are further apart than experts from a shared start."""

import numpy as np

from mergestream.bench.analysis.comparison import Estimate
from mergestream.bench.claims.claim_finding import DEGREES, UNKNOWN, ClaimFinding, missing, verdict_of
from mergestream.bench.drift.layers import HEAD
from mergestream.bench.drift.pool_drift import Drift

NAME, CLAIM = "random_start_drifts_more", "Experts from a random start are further apart than those from a shared one."
MEASURE = "mean pairwise angle, random start less shared start"


def check_starts(shared: Drift | None, random: Drift | None) -> list[ClaimFinding]:
    """One finding for the encoder and one for the head. The interval is the range over pairs, which are few."""
    if shared is None or random is None:
        which = [name for name, drift in (("shared_start", shared), ("random_start", random)) if drift is None]
        needed = f"{' and '.join(which)}: analyse_drift of a pool of that start, trained with the same recipe."
        return [missing(NAME, CLAIM, MEASURE, DEGREES, needed)]
    return [_finding(part, pair_angles(shared, part), pair_angles(random, part)) for part in ("encoder", "head")]


def pair_angles(drift: Drift, part: str) -> np.ndarray:
    """Every pair's angle in degrees, mean over those layers of the encoder or the head where it is defined."""
    layers = [layer for layer in drift.layers if (layer.kind == HEAD) == (part == "head")]
    angles = [np.array(layer.whole.angles, dtype=float) for layer in layers]
    defined = [each for each in angles if len(each) and np.isfinite(each).all()]
    return np.mean(defined, axis=0) if defined else np.zeros(0)


def _finding(part: str, near: np.ndarray, far: np.ndarray) -> ClaimFinding:
    measure = f"{part}: {MEASURE}"
    if not len(near) or not len(far):
        sentence = f"One of the two pools has no pair of experts whose {part}s have an angle."
        return ClaimFinding(NAME, CLAIM, None, measure, DEGREES, None, UNKNOWN, sentence)
    estimate = Estimate(float(far.mean() - near.mean()), float(far.min() - near.max()), float(far.max() - near.min()))
    sentence = (
        f"{part.capitalize()}s from a random start are {far.mean():.1f}° apart ({far.min():.1f} to {far.max():.1f}), "
        f"from a shared start {near.mean():.1f}° ({near.min():.1f} to {near.max():.1f}); ranges are over pairs."
    )
    return ClaimFinding(NAME, CLAIM, None, measure, DEGREES, estimate, verdict_of(estimate), sentence)
