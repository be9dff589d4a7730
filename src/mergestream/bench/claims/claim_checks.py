"""Checks the claims that the paper makes without showing, on the runs and pools that are given."""

from collections.abc import Sequence

from mergestream.bench.claims.checkpoint_claims import Answers, answers_of_runs, check_checkpoints
from mergestream.bench.claims.claim_finding import ClaimFinding
from mergestream.bench.claims.evidence import Evidence, evidence_of_runs
from mergestream.bench.claims.gain_claims import check_gains
from mergestream.bench.claims.score_claims import check_scores
from mergestream.bench.claims.start_claims import check_starts
from mergestream.bench.claims.variant_claims import check_variants
from mergestream.bench.drift.pool_drift import Drift
from mergestream.bench.records import Run


def check_claims(
    runs: Sequence[Run],
    *,
    evidence: Sequence[Evidence] = (),
    among_runs: Answers | None = None,
    among_epochs: Answers | None = None,
    shared_start: Drift | None = None,
    random_start: Drift | None = None,
) -> list[ClaimFinding]:
    """Check every claim; a claim without data gives a finding that says what is missing.

    runs                        of a benchmark or a demo: variants, the mean, every expert alone
    evidence                    experts' scores and errors from logits, if no run of a single expert has them
    among_runs, among_epochs    checkpoints' answers (answers_of_pools); runs of several pools give the first too
    shared_start, random_start  drift (analyse_drift) of pools of one recipe, from one start and from unrelated starts
    """
    labelled = [run for run in runs if len(run.labels) and bool((run.labels >= 0).all())]
    return [
        *check_scores([*evidence_of_runs(labelled), *evidence]),
        *check_variants(labelled),
        *check_gains(labelled),
        *check_checkpoints(answers_of_runs(runs) if among_runs is None else among_runs, among_epochs or {}),
        *check_starts(shared_start, random_start),
    ]
