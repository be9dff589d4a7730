"""A study from start to record: train the pools that are missing, run every stage through the engine, write tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergestream.bench.choice.choice_run import recommend_once
from mergestream.bench.choice.pseudo_targets import ChoiceRequest
from mergestream.bench.engine.benchmark import run_plan
from mergestream.bench.engine.plan import BenchPlan
from mergestream.bench.records import Run
from mergestream.bench.study.results_plan import LOSS, OURS, RESULTS, STUDIES, PoolRecipe, Stage, Study
from mergestream.bench.study.study_pages import all_blocks
from mergestream.bench.study.study_record import Group, group_of, read_records, write_record
from mergestream.data.datasets import DataRequest
from mergestream.pool.expert_card import library_versions
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.devices import resolve_device
from mergestream.runtime.errors import InputError, unknown_name
from mergestream.runtime.files import make_folder, write_text
from mergestream.runtime.parallel import Track, quiet, run_jobs
from mergestream.training.pool_statistics import measure_pool
from mergestream.training.recipe import Recipe, plan_from
from mergestream.training.training_run import run_training

RECORD = "record.json"


@dataclass(frozen=True)
class StudyRequest:
    """Where everything is, and which part of the study to run."""

    plan: str
    out: Path
    roots: Mapping[str, Path]
    init: str = "pretrained"
    stages: tuple[str, ...] = ()  # by whole names or beginnings: 'main' is main-pacs-shared and more; none: all
    device: str = "auto"
    jobs: int = 1
    later: bool = False  # mark the record: these methods have met these data before

    @property
    def study(self) -> Study:
        return STUDIES[self.plan]

    @property
    def on_gpu(self) -> bool:
        return resolve_device(self.device) == "cuda"

    def pool_folder(self, pool: PoolRecipe) -> Path:
        return self.out / "pools" / pool.name


def study_request(plan: str, out: Path, roots: Sequence[str], *, stages: str | None, **more: Any) -> StudyRequest:
    """A request from the words of a command line; roots as 'pacs=FOLDER_OR_ZIP'."""
    pairs = [text.partition("=") for text in roots]
    for name, _, folder in pairs:
        if name not in LOSS or not folder:
            raise InputError(
                f"Roots of the plan '{plan}' are written --root NAME=FOLDER_OR_ZIP, for {', '.join(LOSS)}."
            )
    names = tuple(name.strip() for name in (stages or "").split(",") if name.strip())
    return StudyRequest(plan, out, {name: Path(folder) for name, _, folder in pairs}, stages=names, **more)


def run_study(request: StudyRequest, track: Track, command: str = "") -> Path:
    """Do all that is not done yet, write the record and every table, and return the record's path."""
    stages = chosen_stages(request.study.stages(half=request.on_gpu), request.stages)
    pools = list(dict.fromkeys(pool for stage in stages for pool in stage.pools))
    missing = [pool.dataset for pool in pools if pool.dataset not in request.roots]
    if missing:
        raise InputError(f"The plan '{request.plan}' needs {missing[0]}: --root {missing[0]}=FOLDER_OR_ZIP.")
    make_folder(request.out)
    with track("training the pools", len(pools)) as advance:
        jobs = [(request, pool) for pool in pools]
        run_jobs(train_pool, jobs, workers=request.jobs, on_done=advance, device=request.device)
    fingerprints = {pool: ExpertPool.load(request.pool_folder(pool)).fingerprint() for pool in pools}
    groups: list[Group] = []
    for stage in stages:
        groups += _run_stage(request, stage, fingerprints, track)
    head = {
        "asked": {"profile": request.plan, "ours": OURS},
        "is_try": request.study is not RESULTS,
        "later": request.later,
        "about": {"command": command, **library_versions()},
    }
    write_record(request.out / RECORD, groups, head)
    blocks = all_blocks(read_records([request.out / RECORD], allow_tries=True))
    write_text(request.out / "results.md", "\n".join(f"## {name}\n\n{text}" for name, text in blocks.items()))
    return request.out / RECORD


def chosen_stages(stages: list[Stage], names: Sequence[str]) -> list[Stage]:
    """The stages named, by whole names or by how they begin."""
    for name in names:
        if not any(f"{stage.name}-".startswith(f"{name}-") for stage in stages):
            raise unknown_name("stage", name, [stage.name for stage in stages])
    return [stage for stage in stages if not names or any(f"{stage.name}-".startswith(f"{n}-") for n in names)]


def train_pool(request: StudyRequest, pool: PoolRecipe) -> None:
    """Train what is missing of a pool, measure its experts' statistics, and choose its method for 'auto'."""
    study, folder = request.study, request.pool_folder(pool)
    device = "cuda" if request.on_gpu else "cpu"
    recipe = Recipe(
        loss=pool.loss,
        seed=pool.seed,
        accelerator=device,
        precision="bf16-mixed" if request.on_gpu else "32-true",
        **study.fits[pool.dataset],
    )
    plan = plan_from(
        data=DataRequest.parse(pool.dataset, request.roots[pool.dataset]),
        network=study.network,
        arguments=study.arguments[pool.dataset],
        init=request.init,
        start=recipe,
        head_init=pool.head_init,
        keep_every=30.0,
        decoded=str(request.out.resolve()),
    )
    run_training(plan, folder, quiet)
    measure_pool(folder, plan.data, request.out, study.statistics, device)
    if study.choose:
        recommend_once(ChoiceRequest(str(folder.resolve()), plan.data, request.out.resolve(), device=device))


def _run_stage(
    request: StudyRequest, stage: Stage, fingerprints: Mapping[PoolRecipe, str], track: Track
) -> list[Group]:
    """Run a stage's plans over all its pools together; one group per pool."""
    runs: dict[str, list[Run]] = {str(request.pool_folder(pool).resolve()): [] for pool in stage.pools}
    left_out: dict[str, str] = {}
    dataset, own_seeds = stage.pools[0].dataset, tuple(pool.seed for pool in stage.pools)
    shared: dict[str, Any] = {"device": request.device, "preset": request.plan}
    for stage_plan in stage.plans:
        options = dict(stage_plan)
        data = DataRequest(dataset, str(request.roots[dataset].resolve()), images=options.pop("images", None))
        # Without stream seeds of its own, a stage streams each pool once, by the seed of its training.
        seeds = tuple(options.pop("seeds", ()))
        plan = BenchPlan(data, tuple(runs), seeds=seeds or own_seeds, paired_seeds=not seeds, **shared, **options)
        done = run_plan(plan, request.out, track, jobs=request.jobs)
        left_out |= dict(done.left_out)
        for pool, folders in done.by_pool.items():
            runs[pool] += [Run.load(folder) for folder in folders]
    resamples = request.study.resamples
    return [
        group_of(stage, pool, fingerprints[pool], own, left_out=left_out, resamples=resamples)
        for pool, own in zip(stage.pools, runs.values(), strict=True)
    ]
