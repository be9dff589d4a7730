"""Measures one data set of the paper: trains the pools, measures statistics, runs the benchmarks, checks the theory."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from statistics import mean

from mergestream.bench.analysis.comparison import compare, grouped
from mergestream.bench.analysis.cost import forwards_of
from mergestream.bench.claims.claim_checks import QUESTION, check_claims
from mergestream.bench.claims.theory_checks import DriftPoint, answers_of, check_theory, error_parts
from mergestream.bench.drift.pool_drift import Drift, analyse_drift
from mergestream.bench.engine.benchmark import run_plan
from mergestream.bench.records import Run
from mergestream.bench.reproduction.dataset_search import DatasetPlace
from mergestream.bench.reproduction.paper_values import DATASETS, short_title
from mergestream.bench.reproduction.reproduction_plan import PRESETS, RECIPE, ReproductionRequest, rows_of_preset
from mergestream.bench.reproduction.reproduction_record import MeasuredRow, TheoryCheck, TrainedExpert
from mergestream.pool.pool_folder import read_pool
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


def check_pools(
    request: ReproductionRequest, place: DatasetPlace, backbone: str, runs: Mapping[int, Sequence[Run]]
) -> TheoryCheck:
    """Decomposition, claims and drift, from the main comparison's runs by training seed and the experts' weights."""
    every = [run for own in runs.values() for run in own]
    answers = answers_of(every)
    cards = read_pool(request.pool_folder(place.name, backbone)).cards
    counts = {name: [card.class_counts.get(each, 0) for each in card.classes] for name, card in cards.items()}
    where = f"{DATASETS[place.name]} {short_title(backbone)}"
    points = [point for seed, own in runs.items() for point in _drift_points(request, place, backbone, seed, own)]
    # Whether low entropy goes with low error, and what the paper's rule gains over the mean.
    claims = [each for each in check_claims(every) if each.estimate and not each.claim.startswith(QUESTION)]
    findings = check_theory(answers, counts, where)
    findings += [replace(each, stream=where) for each in claims if not each.measure.startswith("Kendall")]
    return TheoryCheck(place.name, backbone, error_parts(answers), findings, points)


def _drift_points(
    request: ReproductionRequest, place: DatasetPlace, backbone: str, seed: int, runs: Sequence[Run]
) -> list[DriftPoint]:
    """One point per target with two experts or more."""
    folder = request.pool_folder(place.name, backbone, seed)
    drift, domains = analyse_drift(folder), {name: card.domain for name, card in read_pool(folder).cards.items()}
    points = []
    for target, own in grouped((run for run in runs if run.stream == "iid"), "target").items():
        experts = [name for name in drift.experts if domains[name] != target]
        angle = _angle(drift, experts)
        singles = [run.accuracy for run in own if run.is_single]
        merged = [run.accuracy for run in own if run.label == "mean"]
        if angle is not None and singles and merged:
            points.append(DriftPoint(place.name, backbone, target, seed, angle, mean(singles) - mean(merged)))
    return points


def _angle(drift: Drift, experts: Sequence[str]) -> float | None:
    """Mean angle over encoder blocks and pairs of these experts, in degrees."""
    pair_positions = [place for place, pair in enumerate(drift.pairs) if set(pair) <= set(experts)]
    angles = [layer.whole.angles[place] for layer in drift.of_kind("block") for place in pair_positions]
    defined = [angle for angle in angles if angle is not None]
    return mean(defined) if defined else None
