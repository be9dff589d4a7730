"""The benchmark: decode images, score the experts, run what is not done, compare, write tables."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergestream.bench.analysis.bench_findings import BenchFindings
from mergestream.bench.analysis.comparison import grouped_rows
from mergestream.bench.engine.missing_statistics import require_methods, with_command
from mergestream.bench.engine.plan import BenchPlan, Target, targets_of
from mergestream.bench.engine.pool_at_target import (
    TargetMethods,
    close_all,
    experts_of_other_domains,
    load_pool,
    open_target,
    target_methods,
    variants_at,
)
from mergestream.bench.evaluation import arrivals, evaluate, require_same_classes
from mergestream.bench.records import Run, is_finished, run_hash
from mergestream.bench.report.bench_tables import write_findings
from mergestream.data.datasets import Dataset, open_data
from mergestream.data.streams import in_order
from mergestream.methods import ORIGINAL
from mergestream.methods.spelling import Variant
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError, PoolError
from mergestream.runtime.files import json_round_trip, make_folder
from mergestream.runtime.parallel import Advance, Track, run_jobs
from mergestream.runtime.seeding import cpu_threads
from mergestream.runtime.state_file import SavedState

RUNS = "runs"
Place = tuple[str, Target, float]  # a pool's folder, a target, a factor of the first expert's head
Planned = dict[Variant, tuple[str, tuple[Path, ...]]]  # the label and the folders of the runs at one place


def plan_runs(plan: BenchPlan, out: Path, place: Place) -> tuple[Planned, dict[str, str]]:
    """All runs of a place, and which methods cannot run there, with the reason.

    If anything is to be done there, the experts' logits are computed first.
    """
    opened = open_target(plan, out, *place)
    planned: Planned = {}
    impossible, views = {}, set[str]()
    for variant in opened.variants:
        try:
            method = opened.methods.method(variant, opened.dataset)
            runs = opened.runs(method)
        except (PoolError, InputError) as error:
            message = with_command(error, variant, plan, place[0], place[1])
            if not plan.skip_impossible:
                raise (PoolError if isinstance(error, PoolError) else InputError)(message) from error
            impossible[str(variant)] = message
            continue
        folders = tuple(out / RUNS / run_hash(arguments) for _, arguments in runs)
        if all(other != folders for _, other in planned.values()):  # else the same method, spelt differently
            planned[variant] = method.label(), folders
            views |= {ORIGINAL, *method.asked_views()} if not all(map(is_finished, folders)) else set()
    for view in () if plan.timed else sorted(views):
        opened.logits(view)
    return planned, impossible


def run_variant(plan: BenchPlan, out: Path, place: Place, variant: Variant) -> None:
    """Run one variant on every stream of one place that is not done yet.

    A static method answers once, in batches of one size in the order of the data, so that its answers do not depend on
    which streams there are; a stream only reorders them.
    """
    opened = open_target(plan, out, *place)
    method, data, logits = opened.methods.take(variant, opened.dataset), opened.data, opened.stored_logits
    answered: Run | None = None
    for stream, arguments in opened.runs(method):
        folder = out / RUNS / run_hash(arguments)
        if is_finished(folder):
            continue
        if method.static:
            batches = in_order(len(data), max(plan.batch_sizes))
            answered = answered or evaluate(method, data, batches, expert_logits=logits)
            answered.reordered(arguments, stream.batches, **arrivals(data, stream, logits)).save(folder)
        else:
            partial = SavedState(folder.with_name(f".{folder.name}.partial"), seconds=20, share=0.1)
            evaluate(method, data, stream, expert_logits=logits, arguments=arguments, partial=partial).save(folder)
            partial.remove()


def unfinished(planned: Planned) -> list[Variant]:
    return [variant for variant, (_, folders) in planned.items() if not all(map(is_finished, folders))]


def _plan_and_run(plan: BenchPlan, out: Path, place: Place, advance: Advance) -> tuple[Planned, dict[str, str]]:
    """Everything at one place in this process: the methods that are planned are those that run."""
    advance(0, f"at {place[1].name}")
    planned, impossible = plan_runs(plan, out, place)
    work = unfinished(planned)
    advance(len(open_target(plan, out, *place).variants) - len(work))
    for variant in work:
        run_variant(plan, out, place, variant)
        advance()
    return planned, impossible


@dataclass(frozen=True)
class FinishedPlan:
    """A plan whose runs are all on disk, in the order of the plan."""

    plan: BenchPlan
    dataset: Dataset
    network: str
    by_pool: dict[str, list[Path]]  # the runs' folders
    labels: dict[Variant, str]  # what tables call the methods that ran
    left_out: list[tuple[str, str]]  # methods that could not run, and why
    warnings: list[str]

    @property
    def folders(self) -> list[Path]:
        return [folder for folders in self.by_pool.values() for folder in folders]


def run_bench(
    plan: BenchPlan, out: Path, track: Track, *, jobs: int = 1, engine: str = "local", command: str = ""
) -> BenchFindings:
    """Do all that is not done yet, then write tables and records under `out`."""
    done = run_plan(plan, out, track, jobs=jobs, engine=engine)
    runs = [Run.load(folder) for folder in done.folders]
    ours, warnings = _reference(done)
    # Draws of whole groups count every image of a target once.
    drawn = [run for run in runs if not run.is_single and not run.arguments["stream"].get("repeats")]
    findings = BenchFindings.of(
        runs,
        ours,
        dataset=done.dataset.name,
        overlap=done.dataset.overlap,
        warnings=[*done.warnings, *warnings, *_replaced(out, plan)],
        plan=plan.to_json(),
        command=command,
        left_out=done.left_out,
        synthetic=done.dataset.synthetic,
        network=done.network,
        grouped=grouped_rows(drawn),
    )
    write_findings(findings, out)
    return findings


def run_plan(plan: BenchPlan, out: Path, track: Track, *, jobs: int = 1, engine: str = "local") -> FinishedPlan:
    """Run what is not done yet of a plan; every run is one folder under `out`/runs."""
    out = out.resolve()  # workers on other nodes start elsewhere
    if plan.data.root is not None and out.is_relative_to(Path(plan.data.root)):
        raise InputError(f"--out {out} lies inside the data's root: its files would be read as data. Choose another.")
    make_folder(out / RUNS)
    close_all()
    where: dict[str, Any] = {"workers": jobs, "engine": engine, "device": plan.device}
    with cpu_threads(1):
        in_turn = engine == "local" and jobs == 1
        alone = in_turn and len(plan.pools) == 1  # then the pool and the methods that are checked are used
        device, dtype = (plan.device, plan.dtype) if alone else ("cpu", "float32")
        pools = {folder: load_pool(folder, device, dtype) for folder in plan.pools}
        dataset, targets, network, warnings = _prepare(plan, out, pools, track, alone)
        places = [(pool, target, head) for pool in plan.pools for target in targets for head in plan.loud_heads]
        steps = sum(len(variants_at(plan, pools[pool], target)) for pool, target, _ in places)
        del pools  # not kept while others are read
        if in_turn:
            with track("running the methods", steps) as advance:
                planned_runs = [_plan_and_run(plan, out, place, advance) for place in places]
        else:
            with track("scoring the experts on every target", len(places)) as advance:
                planned_runs = run_jobs(plan_runs, [(plan, out, place) for place in places], on_done=advance, **where)
            work = [
                (plan, out, place, variant)
                for place, (planned, _) in zip(places, planned_runs, strict=True)
                for variant in unfinished(planned)
            ]
            with track("running the methods", len(work)) as advance:
                run_jobs(run_variant, work, on_done=advance, **where)
    by_pool: dict[str, list[Path]] = {pool: [] for pool in plan.pools}
    labels, left_out = dict[Variant, str](), dict[str, str]()
    for (pool, _, _), (planned, impossible) in zip(places, planned_runs, strict=True):
        by_pool[pool] += [folder for _, folders in planned.values() for folder in folders]
        labels |= {variant: label for variant, (label, _) in planned.items()}
        left_out = impossible | left_out
    return FinishedPlan(plan, dataset, network, by_pool, labels, list(left_out.items()), warnings)


def _prepare(
    plan: BenchPlan, out: Path, pools: Mapping[str, ExpertPool], track: Track, alone: bool
) -> tuple[Dataset, tuple[Target, ...], str, list[str]]:
    """Open the data, decode every target's images, and collect warnings."""
    warnings: list[str] = []
    targets: tuple[Target, ...] = ()
    kinds = dict.fromkeys(pool.template.require_preprocessing() for pool in pools.values())
    for number, preprocessing in enumerate(kinds):
        counters: list[Callable[[], None]] = [lambda: None]  # the progress bar opens when the number is known
        dataset = open_data(plan.data, preprocessing, out, lambda counters=counters: counters[-1]())
        targets = targets_of(plan, dataset)
        _require_runnable(plan, pools, dataset, targets, alone)
        domains = list(dict.fromkeys(domain for target in targets for domain in target.domains))
        images = sum(dataset.sizes.get(domain, 0) for domain in domains)
        with track("reading images" if number == 0 else "reading images at another size", images) as advance:
            counters.append(advance)
            for domain in domains:
                dataset[domain]
    folder_of: dict[str, str] = {}
    for folder, pool in pools.items():
        other = folder_of.setdefault(pool.fingerprint(), folder)
        if other != folder:
            raise PoolError(f"The pools {other} and {folder} hold the same experts, which would count twice.")
        unknown = experts_of_other_domains(pool, dataset.domains) if dataset.domains else []
        if unknown:
            warnings.append(
                f"The domain of {', '.join(unknown)} in {folder} is none of '{dataset.name}': it was never left out. "
                f"Make sure that none of them was trained on a target."
            )
    if plan.allow_seen:
        warnings.append(
            "Experts trained on the target stay in the pool (--allow-seen): these are not results at an unseen site."
        )
    network = ", ".join(dict.fromkeys(str(pool.template.architecture) for pool in pools.values()))
    return dataset, targets, network, warnings


def _reference(done: FinishedPlan) -> tuple[str, list[str]]:
    """The label of the method that others are compared with, and a sentence if it is not the one asked for."""
    named = done.plan.reference
    usual = named or "entropy_adaptive"
    methods = {variant: label for variant, label in done.labels.items() if variant.method != "single_expert"}
    matches = [label for variant, label in methods.items() if usual in (str(variant), label)]
    matches += [label for variant, label in methods.items() if variant.method == usual]
    ours = next(iter([*matches, *methods.values()]), "")
    missing = f"'{named}' could not be run: the others are compared with {ours}."
    return ours, [] if matches or named is None else [missing]


def _require_runnable(
    plan: BenchPlan, pools: Mapping[str, ExpertPool], dataset: Dataset, targets: Sequence[Target], alone: bool
) -> None:
    """Refuse early what cannot run."""
    for folder, pool in pools.items():
        hint = f"For a table of your own: --data-option 'classes=({', '.join(pool.classes)})'."
        require_same_classes(dataset.classes, pool, folder, hint)
        if plan.skip_impossible:
            continue
        place = targets[0], plan.loud_heads[0]
        first = target_methods(plan, folder, *place) if alone else TargetMethods(plan, pool, *place)
        require_methods(plan, folder, pool, dataset, targets, first)


def _replaced(out: Path, plan: BenchPlan) -> list[str]:
    """A sentence if the tables of another benchmark are overwritten; its runs stay."""
    try:
        before = json.loads((out / "results.json").read_text(encoding="utf-8"))
        other = before["plan"] != json_round_trip(plan.to_json()) and before["command"]
    except (OSError, ValueError, KeyError):
        return []
    sentence = f"The tables of an earlier benchmark in this folder were replaced (its runs are kept): {other}"
    return [sentence] if other else []
