"""The work of a benchmark in independent jobs: find out what is to be done at a target, then run one method there."""

from dataclasses import dataclass
from pathlib import Path

from mergestream.bench.engine.plan import BenchPlan, Target
from mergestream.bench.engine.pool_at_target import open_target
from mergestream.bench.engine.variants import Variant
from mergestream.bench.evaluation import evaluate_streams
from mergestream.bench.records import is_finished, run_hash
from mergestream.methods import ORIGINAL
from mergestream.runtime.errors import InputError, PoolError

RUNS = "runs"
# How to get what a pool may lack for a method.
COMMANDS = {
    **dict.fromkeys(("fisher", "regmean"), "On the command line: mergestream train --statistics 256."),
    "regmean_pp": "On the command line: --methods 'regmean_pp(statistics=target)'.",
    **dict.fromkeys(("task_arithmetic", "ties"), "On the command line: mergestream train keeps the start as base/."),
}
Place = tuple[str, Target, float]  # a pool's folder, a target, a factor of the first expert's head


@dataclass(frozen=True)
class VariantRuns:
    """One variant at one place: its runs' folders, and whether any is still to be done."""

    variant: Variant
    label: str
    folders: tuple[Path, ...]
    to_do: bool


@dataclass(frozen=True)
class Survey:
    """All runs of one place, and which methods cannot run there, with the reason."""

    variants: tuple[VariantRuns, ...]
    impossible: tuple[tuple[str, str], ...]


def with_command(error: PoolError | InputError, variant: Variant) -> PoolError | InputError:
    """The error of a method that the pool lacks something for, with the command that makes it."""
    return type(error)(f"{error} {COMMANDS[variant.method]}") if variant.method in COMMANDS else error


def survey(plan: BenchPlan, out: Path, place: Place) -> Survey:
    """Find out what is to be done at a place; if anything is, compute the experts' logits first."""
    opened = open_target(plan, out, *place)
    planned: list[VariantRuns] = []
    impossible, views = [], {ORIGINAL}
    for variant in opened.variants():
        try:
            method = opened.method(variant)
            runs = opened.runs(method)
        except (PoolError, InputError) as error:
            if not plan.skip_impossible:
                raise with_command(error, variant) from error
            impossible.append((str(variant), str(with_command(error, variant))))
            continue
        folders = tuple(out / RUNS / run_hash(run.arguments) for run in runs)
        if any(other.folders == folders for other in planned):
            continue  # the same method, spelt differently
        planned.append(VariantRuns(variant, method.label(), folders, not all(map(is_finished, folders))))
        views |= set(method.options().get("views", ())) if planned[-1].to_do else set()
    if any(each.to_do for each in planned) and not plan.timed:
        for view in sorted(views):
            opened.logits(view)
    return Survey(tuple(planned), tuple(impossible))


def answer(plan: BenchPlan, out: Path, place: Place, variant: Variant) -> None:
    """Run one variant on every stream of one place that is not done yet."""
    opened = open_target(plan, out, *place)
    method = opened.method(variant)
    evaluate_streams(
        method,
        opened.data,
        opened.runs(method),
        out / RUNS,
        opened.stored_logits,
        batch_size=max(plan.batch_sizes),
    )
