"""Measures one data set of the paper: trains the pools, measures statistics, runs the benchmarks."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from mergestream.bench.analysis.comparison import compare, grouped
from mergestream.bench.analysis.cost import forwards_of
from mergestream.bench.engine.benchmark import run_plan
from mergestream.bench.records import Run
from mergestream.bench.reproduction.dataset_search import DatasetPlace
from mergestream.bench.reproduction.reproduction_plan import PRESETS, RECIPE, ReproductionRequest, rows_of_preset
from mergestream.bench.reproduction.reproduction_record import MeasuredRow, TheoryCheck, TrainedExpert
from mergestream.bench.reproduction.theory_measurement import check_pools
from mergestream.runtime.parallel import Advance, Track, quiet
from mergestream.training.pool_statistics import measure_pool
from mergestream.training.recipe import TrainPlan, plan_from, start_from
from mergestream.training.training_run import run_training


@dataclass(frozen=True)
class MeasuredDataset:
    experts: list[TrainedExpert]
    rows: list[MeasuredRow]
    theory: list[TheoryCheck]


def measure_dataset(
    request: ReproductionRequest, place: DatasetPlace, track: Track = quiet, jobs: int = 1
) -> MeasuredDataset:
    """Do all that is not done yet on one data set, with every backbone that a part needs."""
    experts, rows, theory = list[TrainedExpert](), list[MeasuredRow](), list[TheoryCheck]()
    for backbone in request.backbones:
        parts = request.parts_of(place.name, backbone)
        if parts:
            own = _titled(track, f"{place.title}, {backbone}")
            for seed in request.training_seeds:
                experts += train_pool(request, place, backbone, seed, own, jobs)
            for part in (part for part in parts if part in PRESETS):
                runs, measured = _bench(request, part, place, backbone, own, jobs)
                rows += measured
                theory += [check_pools(request, place, backbone, runs)] if part == "table1" else []
    return MeasuredDataset(experts, rows, theory)


def training_plan(request: ReproductionRequest, place: DatasetPlace, backbone: str, seed: int) -> TrainPlan:
    """The paper's recipe: heads from scratch at every site, a sweep, the lowest validation loss."""
    start, settings, head_init = start_from(RECIPE, request.recipe(seed))
    return plan_from(
        data=request.data(place),
        network=backbone,
        arguments=request.network_arguments(backbone),
        init=request.init_of(backbone),
        start=start,
        settings=settings,
        head_init=head_init,
        keep_every=30.0,
        decoded=str(request.out),
    )


def train_pool(
    request: ReproductionRequest, place: DatasetPlace, backbone: str, seed: int, track: Track, jobs: int
) -> list[TrainedExpert]:
    """Train what is missing of a pool, and measure what RegMean++ and Fisher merging need."""
    plan, folder = training_plan(request, place, backbone, seed), request.pool_folder(place.name, backbone, seed)
    trained = run_training(plan, folder, track, jobs=jobs, engine=request.engine)
    measure_pool(folder, plan.data, request.out, request.statistics(), request.device, track=track)
    experts = []
    for card, candidates in trained:
        own, step = card.metrics["validation"], card.metrics["best_step"]
        result = own["accuracy"], own["nll"], step, len(candidates)
        experts.append(TrainedExpert(place.name, backbone, card.domain or card.name, seed, *result))
    return experts


def _bench(
    request: ReproductionRequest, part: str, place: DatasetPlace, backbone: str, track: Track, jobs: int
) -> tuple[dict[int, list[Run]], list[MeasuredRow]]:
    """All runs by the training seed of their pool, and the rows of the table."""
    plan = request.bench_plan(part, place, backbone)
    # Steps that are timed do not share the machine.
    done = run_plan(plan, request.out, track, jobs=1 if plan.timed else jobs, engine=request.engine)
    names = {done.labels[variant]: row for variant, row in rows_of_preset(PRESETS[part]).items()}
    loaded = [[Run.load(folder) for folder in folders] for folders in done.by_pool.values()]
    by_seed = dict(zip(request.seeds_of(part), loaded, strict=True))
    runs = [run for each in loaded for run in each if run.label in names]
    rows = []
    for each, own in zip(compare(runs), grouped(runs, "label", "stream").values(), strict=True):
        where = part, place.name, backbone, names[each.label], each.label, each.stream
        majority = sum(run.majority_share for run in own) / len(own)
        cost = forwards_of(own[0]), _seconds(own) if plan.timed else None
        rows.append(
            MeasuredRow(*where, each.accuracy, each.per_target, majority, *cost, runs=[run.hash for run in own])
        )
    return by_seed, rows


def _seconds(runs: Iterable[Run]) -> float | None:
    """Of all steps: the median step times their number."""
    each = [None if run.seconds_per_step is None else run.seconds_per_step * len(run.batches) for run in runs]
    return None if None in each else float(sum(filter(None, each)))


def _titled(track: Track, title: str) -> Track:
    """Name the data set and the backbone in every stage's title."""

    def titled(stage: str, total: int) -> AbstractContextManager[Advance]:
        return track(f"{title}: {stage}", total)

    return titled
