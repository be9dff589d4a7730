"""The benchmark: decode, score the experts, run what is not done, compare, write tables."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mergestream.bench.analysis.collapse import collapses, unspoken_classes
from mergestream.bench.analysis.comparison import Duel, duel, rows_of
from mergestream.bench.analysis.overview import few_batches, line_of, majority_shares
from mergestream.bench.analysis.standings import standings
from mergestream.bench.analysis.subgroups import subgroup_rows
from mergestream.bench.engine.jobs import (
    RUNS,
    answer,
    forget_what_was_opened,
    load_pool,
    method_of,
    preprocessing_of,
    survey,
)
from mergestream.bench.engine.plan import BenchPlan, Target, targets_of
from mergestream.bench.engine.sources import strangers
from mergestream.bench.engine.variants import Variant
from mergestream.bench.records import Run
from mergestream.bench.report.bench_report import BenchFindings, write_findings
from mergestream.data.datasets import Dataset
from mergestream.data.datasets.index import some
from mergestream.data.datasets.opening import open_data
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError, PoolError
from mergestream.runtime.files import make_folder
from mergestream.runtime.parallel import Track, run_jobs
from mergestream.runtime.seeding import cpu_threads

Named = list[tuple[str, str]]  # a method's label and why it was left out


def run_bench(
    plan: BenchPlan, out: Path, track: Track, *, jobs: int = 1, engine: str = "local", command: str = ""
) -> BenchFindings:
    """Do all that is not done yet, then write tables and records under `out`."""
    out = out.resolve()  # workers on other nodes start elsewhere
    _require_apart(plan, out)
    make_folder(out / RUNS)
    forget_what_was_opened()  # in an earlier call: files may have changed since
    with cpu_threads(1):
        dataset, targets, network, warnings = _prepare(plan, out, track)
        folders, left_out, labels = _run(plan, out, targets, track, jobs, engine)
    runs = [Run.load(folder) for folder in folders]
    ours, told = _reference(plan, labels)
    findings = BenchFindings(
        plan=plan.to_json(),
        command=command,
        rows=rows_of(runs),
        duels=_duels(ours, runs),
        standings=standings([run for run in runs if run.arguments["method"] != "single_expert"]),
        majority_shares=majority_shares(runs),
        subgroups=subgroup_rows(run for run in runs if run.arguments["method"] != "single_expert"),
        collapses=collapses(runs),
        left_out=left_out,
        warnings=[*warnings, *told, *_dataset_warnings(dataset), *few_batches(runs), *unspoken_classes(runs)],
        runs=[line_of(run) for run in runs],
        dataset=dataset.name,
        synthetic=dataset.synthetic,
        network=network,
    )
    findings = replace(findings, warnings=[*findings.warnings, *_replaced(out, findings)])
    write_findings(findings, out)
    return findings


class _Ticker:
    """What is called after every image, before it is known who counts them."""

    advance: Callable[[], None] = staticmethod(lambda: None)

    def __call__(self) -> None:
        self.advance()


def _prepare(plan: BenchPlan, out: Path, track: Track) -> tuple[Dataset, tuple[Target, ...], str, list[str]]:
    """Open the data, decode every target's images, and look for what a reader should know."""
    warnings: list[str] = []
    pools = {folder: load_pool(folder, "cpu") for folder in plan.pools}
    targets: tuple[Target, ...] = ()
    for number, preprocessing in enumerate(dict.fromkeys(preprocessing_of(pools[f], f) for f in pools)):
        ticker = _Ticker()
        dataset = open_data(plan.data, preprocessing, out, ticker)
        targets = targets_of(plan, dataset)
        _require_runnable(plan, pools, dataset)
        domains = list(dict.fromkeys(domain for target in targets for domain in target.domains))
        images = sum(dataset.sizes.get(domain, 0) for domain in domains)
        with track("reading images" if number == 0 else "reading images at another size", images) as ticker.advance:
            for domain in domains:
                dataset[domain]
    _require_distinct(pools)
    for folder, pool in pools.items():
        unknown = strangers(pool, dataset.domains) if dataset.domains else []
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


def _run(
    plan: BenchPlan, out: Path, targets: Sequence[Target], track: Track, jobs: int, engine: str
) -> tuple[list[Path], Named, dict[Variant, str]]:
    """All runs' folders in the order of the plan, the methods that were left out, and what tables call the others."""
    places = [(pool, target) for pool in plan.pools for target in targets]
    with track("scoring the experts on every target", len(places)) as advance:
        surveys = run_jobs(
            survey,
            [(plan, out, *place) for place in places],
            workers=jobs,
            on_done=advance,
            engine=engine,
            device=plan.device,
        )
    work: list[tuple[BenchPlan, Path, str, Target, Variant]] = []
    for place, found in zip(places, surveys, strict=True):
        work += [(plan, out, *place, task.variant) for task in found.tasks if task.to_do]
    with track("running the methods", len(work)) as advance:
        run_jobs(answer, work, workers=jobs, on_done=advance, engine=engine, device=plan.device)
    folders = [folder for found in surveys for task in found.tasks for folder in task.folders]
    left_out = dict(each for found in reversed(surveys) for each in found.impossible)
    labels = {task.variant: task.label for found in surveys for task in found.tasks}
    return folders, list(left_out.items()), labels


def _reference(plan: BenchPlan, labels: Mapping[Variant, str]) -> tuple[str, list[str]]:
    """The label of the method that others are compared with, and a sentence if it is not the one asked for."""
    usual = plan.reference or "entropy_adaptive"
    methods = {variant: label for variant, label in labels.items() if variant.method != "single_expert"}
    named = [label for variant, label in methods.items() if usual in (str(variant), label)]
    named += [label for variant, label in methods.items() if variant.method == usual]
    ours = next(iter([*named, *methods.values()]), "")
    told = f"'{plan.reference}' could not be run: the others are compared with {ours}."
    return ours, [] if named or plan.reference is None else [told]


def _duels(ours: str, runs: Sequence[Run]) -> list[Duel]:
    """The reference against every other method, single experts aside."""
    labels = dict.fromkeys(r.arguments["label"] for r in runs if r.arguments["method"] != "single_expert")
    return [found for theirs in labels if theirs != ours for found in duel(runs, ours, theirs)]


def _require_runnable(plan: BenchPlan, pools: Mapping[str, ExpertPool], dataset: Dataset) -> None:
    """What can be known to fail fails now, before hours of reading and scoring."""
    for folder, pool in pools.items():
        if pool.classes != dataset.classes:
            raise InputError(
                f"The classes of '{dataset.name}', {some(dataset.classes)}, are not those of {folder} in their order: "
                f"{some(pool.classes)}. For a table of your own: --data-option 'classes=({', '.join(pool.classes)})'."
            )
        for variant in plan.variants:
            try:
                if variant.method != "single_expert":
                    method_of(variant, pool, dataset)
            except PoolError:
                if not plan.skip_impossible:
                    raise


def _replaced(out: Path, findings: BenchFindings) -> list[str]:
    """Whose tables this benchmark writes over; their runs stay."""
    try:
        before = json.loads((out / "results.json").read_text(encoding="utf-8"))
        other = before["plan"] != json.loads(json.dumps(findings.plan)) and before["command"]
    except (OSError, ValueError, KeyError):
        return []
    return (
        [f"The tables of an earlier benchmark in this folder were replaced (its runs are kept): {other}"]
        if other
        else []
    )


def _require_apart(plan: BenchPlan, out: Path) -> None:
    if plan.data.root is not None and out.is_relative_to(Path(plan.data.root)):
        raise InputError(f"--out {out} lies inside the data's root: its files would be read as data. Choose another.")


def _require_distinct(pools: Mapping[str, ExpertPool]) -> None:
    seen: dict[str, str] = {}
    for folder, pool in pools.items():
        other = seen.setdefault(pool.fingerprint(), folder)
        if other != folder:
            raise PoolError(f"The pools {other} and {folder} hold the same experts, which would count twice.")


def _dataset_warnings(dataset: Dataset) -> list[str]:
    return [f"'{dataset.name}': {dataset.overlap}"] if dataset.overlap else []
