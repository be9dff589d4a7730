"""Checks the claims that the paper makes without showing, on the runs of a benchmark."""

from collections.abc import Sequence

from mergestream.bench.claims.claim_finding import ClaimFinding
from mergestream.bench.claims.evidence import evidence_of_runs
from mergestream.bench.claims.gain_claims import check_gains
from mergestream.bench.claims.score_claims import check_scores
from mergestream.bench.claims.variant_claims import check_variants
from mergestream.bench.records import Run


def check_claims(runs: Sequence[Run]) -> list[ClaimFinding]:
    """Check every claim on labelled runs; a claim without data gives a finding that says what is missing."""
    labelled = [run for run in runs if len(run.labels) and bool((run.labels >= 0).all())]
    return [*check_scores(evidence_of_runs(labelled)), *check_variants(labelled), *check_gains(labelled)]
