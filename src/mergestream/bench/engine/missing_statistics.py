"""What a plan's methods need and its pools lack, with the commands that make it."""

import shlex
from collections.abc import Collection, Sequence

from mergestream.bench.engine.plan import BenchPlan, Target
from mergestream.bench.engine.pool_at_target import TargetMethods
from mergestream.data.datasets import Dataset
from mergestream.methods import Method
from mergestream.methods.spelling import Variant
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.statistics.measurement import BLOCKWISE
from mergestream.runtime.errors import InputError, MissingStatisticsError, PoolError
from mergestream.training.pool_statistics import EACH, NOBODY, PAPER_IMAGES

OPTIONS = {"gram": "--gram", "fisher_mergelm": "--fisher", "fisher_exact": "--fisher-exact", BLOCKWISE: "--gram-pp"}
IMAGES = {**PAPER_IMAGES, "fisher_exact": PAPER_IMAGES["fisher_mergelm"]}
BASE_COMMAND = "On the command line: mergestream train keeps the start as base/."


def with_command(error: PoolError | InputError, variant: Variant, plan: BenchPlan, pool: str, target: Target) -> str:
    """The message of a method that the pool lacks something for, with the command that makes it."""
    if isinstance(error, MissingStatisticsError):
        return f"{error} {statistics_command(plan, pool, [error.kind], [target])}"
    return f"{error} {BASE_COMMAND}" if variant.innermost in ("task_arithmetic", "ties") else str(error)


def require_methods(
    plan: BenchPlan, folder: str, pool: ExpertPool, dataset: Dataset, targets: Sequence[Target], first: TargetMethods
) -> None:
    """Refuse methods that the pool lacks something for: all are constructed at the first target, and the others are
    searched for the statistics that they need. Everything to measure is named in one command.
    """
    variants, methods = [each for each in plan.variants if each.method != "single_expert"], dict[Variant, Method]()
    lacking: dict[str, MissingStatisticsError] = {}
    at_targets = dict[Target, None]()
    for target in targets:
        if not variants:
            break
        own = first if target is targets[0] else TargetMethods(plan, pool, target, 1)
        for variant in variants:
            try:
                if variant in methods:
                    methods[variant].require_statistics(own.pool)
                else:
                    methods[variant] = own.method(variant, dataset)
            except MissingStatisticsError as error:
                lacking.setdefault(error.kind, error)
                at_targets[target] = None
            except PoolError as error:
                raise PoolError(with_command(error, variant, plan, folder, target)) from error
        variants = [each for each in variants if each not in methods or "statistics" in methods[each].needs]
    if lacking:
        command = statistics_command(plan, folder, lacking, list(at_targets))
        raise PoolError(f"{' '.join(map(str, lacking.values()))} {command}")


def statistics_command(plan: BenchPlan, pool: str, kinds: Collection[str], targets: Sequence[Target]) -> str:
    """The command that measures these kinds for these targets."""
    words = ["mergestream", "pool", "statistics", pool, "--dataset", plan.data.name]
    words += ["--root", plan.data.root] if plan.data.root else []
    for option, value in plan.data.options:
        words += ["--data-option", f"{option}={value}"]
    words += ["--skip-bad", str(plan.data.skip_bad)] if plan.data.skip_bad else []
    words += ["--allow-missing-classes"] if plan.data.allow_missing_classes else []
    for kind in kinds:
        words += [OPTIONS[kind], str(IMAGES[kind])]
    if BLOCKWISE in kinds:
        for text in dict.fromkeys(_left_out(plan, target) for target in targets):
            words += ["--leave-out", text]
    return f"Measure them: {shlex.join(words)}"


def _left_out(plan: BenchPlan, target: Target) -> str:
    everybody = plan.protocol == "ood" or plan.allow_seen
    return NOBODY if everybody else EACH if len(target.domains) == 1 else target.name
