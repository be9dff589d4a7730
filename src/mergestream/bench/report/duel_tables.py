"""Tables of the differences between the reference method and its rivals: primary and secondary endpoints."""

from collections.abc import Sequence

from mergestream.bench.analysis.comparison import Estimate, grouped
from mergestream.bench.analysis.duels import WORST, Duel, Endpoint, describe_levels
from mergestream.bench.report.result_table import ResultTable, grid_table
from mergestream.functional.non_inferiority import LOWER_IS_BETTER, MARGINS

NAMES = {"balanced_accuracy": "balanced accuracy", "auroc": "AUROC", "nll": "NLL", "brier": "Brier"}


def duel_tables(duels: Sequence[Duel]) -> list[ResultTable]:
    """The two primary endpoints, rivals by streams, and the secondary endpoints of every stream."""
    if not duels:
        return []
    return [*_primary_tables(duels), *(_secondary_table(own) for own in grouped(duels, "stream").values())]


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


def _secondary_table(duels: Sequence[Duel]) -> ResultTable:
    entries = {(each.theirs, _heading(endpoint)): endpoint for each in duels for endpoint in each.secondary}
    margins = f"{100 * duels[0].margin:g} points, NLL {MARGINS['nll']:g}, Brier {MARGINS['brier']:g}"
    note = (
        f"Points, or units of NLL and Brier, where lower is better; 95 % intervals of the same bootstrap. Verdicts at "
        f"margins of {margins}, adjusted after Holm over each row. Bold: better."
    )
    title = f"{duels[0].ours} minus others, secondary endpoints, {duels[0].stream}"
    return grid_table(title, "against", entries, _cell, lambda each: each.outcome == "better", note)


def _heading(endpoint: Endpoint) -> str:
    suffix = f", {WORST}" if endpoint.scope == WORST else ""
    return f"{NAMES[endpoint.metric]}{suffix}"


def _cell(endpoint: Endpoint) -> str:
    return f"{format_difference(endpoint.difference, endpoint.metric)} {endpoint.outcome}"


def format_difference(difference: Estimate, metric: str) -> str:
    """In points, or with three digits for a metric that is not a share."""
    if metric not in LOWER_IS_BETTER:
        return difference.points()
    return f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"
