"""Tables of the differences between the reference method and its rivals: primary and secondary endpoints."""

from collections.abc import Sequence
from dataclasses import astuple

from mergestream.bench.analysis.comparison import grouped
from mergestream.bench.analysis.duels import WORST, Duel, Endpoint, describe_levels
from mergestream.bench.report.result_table import ResultTable, grid_table
from mergestream.functional.non_inferiority import LOWER_IS_BETTER, MARGINS

NAMES = {"balanced_accuracy": "balanced accuracy", "auroc": "AUROC", "nll": "NLL", "brier": "Brier"}


def duel_tables(duels: Sequence[Duel]) -> list[ResultTable]:
    """The two primary endpoints, rivals by streams, and the secondary endpoints of every stream."""
    if not duels:
        return []
    streams = grouped(duels, "stream").values()
    return [*_primary_tables(duels), *(table for own in streams for table in _secondary_tables(own))]


def _primary_tables(duels: Sequence[Duel]) -> list[ResultTable]:
    entries = {(each.theirs, each.stream): each for each in duels}
    title, margin = f"{duels[0].ours} minus others, accuracy", 100 * duels[0].margin
    verdicts = (
        f"Better: the interval is above 0; not inferior: its lower end is above -{margin:g}; inferior: it is below 0 "
        f"and not above -{margin:g}; else undecided. Bold: better. Not corrected for the number of rivals and streams."
    )
    mean_note = (
        f"First primary endpoint. Percentage points on the same batches, with the 95 % interval of a hierarchical "
        f"bootstrap. {describe_levels(duels)} {verdicts}"
    )
    worst_note = (
        "Second primary endpoint: the target with the lowest difference, in every draw anew, targets not resampled; "
        "then wins–losses–ties over targets, pools and stream seeds. Verdicts as for the mean."
    )
    return [
        grid_table(
            f"{title}, mean over targets",
            "against",
            entries,
            lambda d: f"{d.difference.points()} {d.outcome}",
            lambda d: d.outcome == "better",
            mean_note,
        ),
        grid_table(
            f"{title}, worst target",
            "against",
            entries,
            lambda d: (
                f"{d.worst.difference.points()} {d.worst.outcome} ({d.worst.target}), {d.wins}–{d.losses}–{d.ties}"
            ),
            lambda d: d.worst.outcome == "better",
            worst_note,
        ),
    ]


def _secondary_tables(duels: Sequence[Duel]) -> list[ResultTable]:
    """Shares, and probabilities: together they would be too wide."""
    scopes = {WORST: f", {WORST}"}
    every = {(d.theirs, f"{NAMES[e.metric]}{scopes.get(e.scope, '')}"): e for d in duels for e in d.secondary}
    holm = "adjusted after Holm over all secondary endpoints of a rival on this stream. Bold: better."
    of_probabilities = f"margins of {MARGINS['nll']:g} (NLL) and {MARGINS['brier']:g} (Brier)"
    tables = []
    for kind, note in (
        ("secondary endpoints", f"Percentage points. Verdicts at a margin of {100 * duels[0].margin:g}, {holm}"),
        ("secondary endpoints in probabilities", f"Lower is better. Verdicts at {of_probabilities}, {holm}"),
    ):
        lower = "probabilities" in kind
        entries = {place: each for place, each in every.items() if (each.metric in LOWER_IS_BETTER) == lower}
        title = f"{duels[0].ours} minus others, {kind}, {duels[0].stream}"
        tables.append(grid_table(title, "against", entries, _cell, lambda each: each.outcome == "better", note))
    return tables


def _cell(endpoint: Endpoint) -> str:
    """In points, or with three digits for a metric that is not a share."""
    if endpoint.metric not in LOWER_IS_BETTER:
        return f"{endpoint.difference.points()} {endpoint.outcome}"
    mean, low, high = (f"{each:+.3f}" for each in astuple(endpoint.difference))
    return f"{mean} [{low}, {high}] {endpoint.outcome}"
