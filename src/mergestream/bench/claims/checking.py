"""What the paper claims without showing, checked on whatever runs and pools there are: win, lose or not to be told."""

from collections.abc import Sequence

from mergestream.bench.claims.checkpoints import Answers, answers_of_runs, check_checkpoints
from mergestream.bench.claims.evidence import Evidence, evidence_of_runs
from mergestream.bench.claims.findings import Finding
from mergestream.bench.claims.gains import check_gains
from mergestream.bench.claims.scores import check_scores
from mergestream.bench.claims.starts import check_starts
from mergestream.bench.claims.variants import check_variants
from mergestream.bench.drift.weights import Drift
from mergestream.bench.records import Run

__all__ = ["Finding", "check_claims"]


def check_claims(
    runs: Sequence[Run],
    *,
    evidence: Sequence[Evidence] = (),
    among_runs: Answers | None = None,
    among_epochs: Answers | None = None,
    shared_start: Drift | None = None,
    random_start: Drift | None = None,
) -> list[Finding]:
    """Every claim with what speaks to it; for the rest a finding that says what is missing.

    runs                        of a benchmark or a demo: variants, the mean, every expert alone
    evidence                    experts' scores and errors from logits, where no run of a single expert has them
    among_runs, among_epochs    checkpoints' answers (answers_of_pools); runs of several pools give the first, too
    shared_start, random_start  drift (analyse_drift) of pools of one recipe, from one start and from unrelated ones
    """
    labelled = [run for run in runs if len(run.labels) and bool((run.labels >= 0).all())]
    return [
        *check_scores([*evidence_of_runs(labelled), *evidence]),
        *check_variants(labelled),
        *check_gains(labelled),
        *check_checkpoints(answers_of_runs(runs) if among_runs is None else among_runs, among_epochs or {}),
        *check_starts(shared_start, random_start),
    ]
