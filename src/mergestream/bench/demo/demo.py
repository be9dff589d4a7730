"""The whole story on the phantom hospitals: train experts, leave each hospital out, stream it through every method."""

import json
import os
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from mergestream.bench.analysis.comparison import duel, rows_of
from mergestream.bench.demo.demo_page import write_demo_page
from mergestream.bench.demo.demo_tables import DemoFindings
from mergestream.bench.evaluation import describe_run, evaluate_streams, leave_one_domain_out, precompute
from mergestream.bench.records import Run, is_finished, run_hash
from mergestream.data.datasets import Dataset, load_dataset, phantom
from mergestream.data.datasets.base import DomainData
from mergestream.data.streams import create_stream
from mergestream.methods import create_method
from mergestream.pool.blockwise import Settings
from mergestream.pool.checkpoint import BASE, ExpertCard, holds_only_an_expert, library_versions
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.statistics import Statistics, write_statistics
from mergestream.pool.statistics.measurement import BLOCKWISE, blockwise_kind, measure_statistics
from mergestream.runtime.errors import MergestreamError
from mergestream.runtime.files import folder_written_whole, make_folder, read_json, write_json
from mergestream.runtime.parallel import Track, run_jobs
from mergestream.runtime.seeding import cpu_threads
from mergestream.training import Recipe, split, train_base, train_expert

SCHEMA_VERSION = 1
NETWORK = "vit_tiny_patch16_224"
MICRO = {"img_size": phantom.PIXELS, "patch_size": 8, "embed_dim": 64, "depth": 3, "num_heads": 2}
VIEWS = ("hflip",)
# On the CPU everywhere: a micro ViT is no faster on a GPU, and the experts do not depend on which one is there.
MICRO_RECIPE = Recipe(
    batch_size=32,
    learning_rate=1e-3,
    weight_decay=0.01,
    optimiser="adamw",
    schedule="one_cycle",
    augmentation=0,
    views=("hflip", "vflip"),
    validate_every=20,
    accelerator="cpu",
)

# What the paper's method is not compared with: itself, and single experts, which have rows of their own.
OURS = ("entropy_adaptive", "single_expert")
# Of a plan: what no number in the results depends on.
ASIDE = ("workers", "landscape")
REGMEAN_PP: Settings = {"ratio": 1.0, "ridge": 0.01, "convolutions": True}

Variant = tuple[str, dict[str, Any]]

# In the order of the table: a method, then its variants.
VARIANTS: tuple[Variant, ...] = (
    ("entropy_adaptive", {}),
    ("entropy_adaptive", {"head": "shared"}),
    ("entropy_adaptive", {"encoder": "uniform"}),
    ("entropy_adaptive", {"head": "select"}),
    ("entropy_adaptive", {"momentum": 0.9}),
    ("entropy_adaptive", {"views": ()}),
    ("entropy_adaptive", {"temperature": "card"}),
    ("entropy_adaptive", {"score": "max_softmax"}),
    ("entropy_adaptive", {"weighting": "softmax"}),
    ("prior_adaptive", {}),
    ("mean", {}),
    ("ensemble", {}),
    ("ensemble", {"average": "probabilities"}),
    ("task_arithmetic", {}),
    ("ties", {}),
    ("adamerging", {}),
    ("fisher", {}),
    ("fisher", {"fisher": "mergelm", "statistics": "target"}),
    ("regmean", {}),
    ("regmean_pp", {}),
    ("regmean_pp", {"statistics": "target"}),
    ("select_expert", {}),
)
# Every method once, and the parts of the paper's.
QUICK_VARIANTS = tuple(
    (name, options)
    for name, options in VARIANTS
    if not options or ((name == "entropy_adaptive" and options.keys() & {"encoder"}) or options == {"head": "shared"})
)


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    images: int
    archive_images: int
    base: Recipe
    expert: Recipe
    seeds: tuple[int, ...]
    streams: tuple[str, ...]
    variants: tuple[Variant, ...]
    statistics_images: int
    workers: int
    landscape: int  # networks along each side of the plane; 0: none

    @classmethod
    def full(cls) -> "Plan":
        return cls(
            images=1000,
            archive_images=4000,
            base=replace(MICRO_RECIPE, steps=1500, validate_every=100),
            expert=replace(MICRO_RECIPE, steps=600),
            seeds=(0, 1, 2),
            streams=("iid", "dirichlet:0.05", "note:0.1", "sorted", "temporal"),
            variants=VARIANTS,
            statistics_images=500,
            workers=os.cpu_count() or 1,
            landscape=15,
        )

    @classmethod
    def quick(cls) -> "Plan":
        return cls(
            images=400,
            archive_images=2000,
            base=replace(MICRO_RECIPE, steps=700, validate_every=100),
            expert=replace(MICRO_RECIPE, steps=250),
            seeds=(0,),
            streams=("iid", "dirichlet:0.05"),
            variants=QUICK_VARIANTS,
            statistics_images=64,
            workers=1,  # starting more would take longer than the work
            landscape=0,
        )


def run_demo(out: Path, plan: Plan, track: Track, command: str) -> DemoFindings:
    """Do all that is not done yet, then write `results.json`, `report.html` and their records under `out`."""
    make_folder(out)
    if _was_done(out, plan):
        plan = replace(plan, workers=1)  # there is only reading to do
    dataset = load_dataset("phantom", images=plan.images)
    with cpu_threads(1):
        cards = _train(out, plan, dataset, track)
        _measure(out, plan, dataset, track)
        runs = _stream(out, plan, dataset, track)
    rivals = dict.fromkeys(run.arguments["label"] for run in runs if run.arguments["method"] not in OURS)
    duels = [d for rival in rivals for d in duel(runs, "entropy_adaptive", rival)]
    findings = DemoFindings(plan_of(plan), command, rows_of(runs), duels, cards, runs)
    results = _results(findings)
    write_json(out / "results.json", results)
    write_demo_page(findings, results, dataset, out, track, plan.landscape)
    return findings


def _was_done(out: Path, plan: Plan) -> bool:
    try:
        return read_json(out / "results.json", SCHEMA_VERSION).get("plan") == json.loads(json.dumps(plan_of(plan)))
    except MergestreamError:
        return False


def pool_folder(out: Path, seed: int) -> Path:
    return out / ("pool" if seed == 0 else f"pool-seed{seed}")


def plan_of(plan: Plan) -> dict[str, Any]:
    described = {key: value for key, value in asdict(plan).items() if key not in ASIDE}
    return {**described, "variants": [{"method": name, "options": options} for name, options in plan.variants]}


def _train(out: Path, plan: Plan, dataset: Dataset, track: Track) -> list[ExpertCard]:
    archive = phantom.archive(plan.archive_images, seed=0)
    start = pool_folder(out, 0) / BASE
    with track("pretraining the shared encoder", plan.base.steps) as advance:
        train_base(start, NETWORK, MICRO, archive, dataset.classes, plan.base, advance)
    jobs = []
    for seed in plan.seeds:
        base = _same_start(start, pool_folder(out, seed) / BASE)
        for domain in dataset.domains:
            recipe = replace(plan.expert, seed=seed)
            jobs.append((pool_folder(out, seed) / domain, base, dataset[domain], recipe))
    with track("training the hospitals' experts", len(jobs)) as advance:
        return run_jobs(train_expert, jobs, workers=plan.workers, on_done=advance)


def _same_start(source: Path, target: Path) -> Path:
    if source != target:
        with folder_written_whole(target, holds_only_an_expert) as scratch:
            shutil.copytree(source, scratch, dirs_exist_ok=True)
    return target


def _measure(out: Path, plan: Plan, dataset: Dataset, track: Track) -> None:
    jobs = [(pool_folder(out, seed), _own_images(dataset, plan, seed)) for seed in plan.seeds]
    with track("measuring every expert at its own hospital", len(jobs)) as advance:
        run_jobs(measure_pool, jobs, workers=plan.workers, on_done=advance)


def _own_images(dataset: Dataset, plan: Plan, seed: int) -> dict[str, Tensor]:
    """Of every hospital, images its expert was trained on."""
    found = {}
    for name in dataset.domains:
        training, _ = split(len(dataset[name]), plan.expert.validation_share, seed)
        found[name] = dataset[name].batch(training[: plan.statistics_images])
    return found


def measure_pool(folder: Path, images: dict[str, Tensor]) -> None:
    """Write each expert's statistics into its folder, from its own hospital's images; what is there is left alone.

    Those of RegMean++ belong to a pool, so there is one set for every hospital that may be left out.
    """
    pool = ExpertPool.load(folder)
    pools = [pool.without(fold.target) for fold in leave_one_domain_out(pool.names)]
    kinds = {blockwise_kind(each, REGMEAN_PP): each for each in pools}
    there = _by_name(pool)
    wanted = {
        name: ["gram", "fisher_exact", *(k for k, each in kinds.items() if name in each.names)] for name in images
    }
    if all(_has(there.get(name), wanted[name], len(own)) for name, own in images.items()):
        return
    found = _by_name(measure_statistics(pool, images, ("gram", "fisher_exact")))
    for kind, each in kinds.items():
        others = {name: images[name] for name in each.names}
        for name, own in _by_name(measure_statistics(each, others, (BLOCKWISE,), **REGMEAN_PP)).items():
            found[name] = found[name].with_kind(kind, dict(own.of(kind)), own.images[kind])
    for card in pool.cards:
        write_statistics(folder / card.name, found[card.name], card)


def _by_name(pool: ExpertPool) -> dict[str, Statistics]:
    return {name: own for name, own in zip(pool.names, pool.statistics, strict=True) if own is not None}


def _has(own: Statistics | None, kinds: list[str], images: int) -> bool:
    return own is not None and all(own.images.get(kind) == images for kind in kinds)


def _stream(out: Path, plan: Plan, dataset: Dataset, track: Track) -> list[Run]:
    targets = [fold.target for fold in leave_one_domain_out(dataset.domains)]
    jobs = [(out, plan, dataset[target], seed) for seed in plan.seeds for target in targets]
    with track("streaming every hospital through every method", len(jobs)) as advance:
        folders = run_jobs(stream_target, jobs, workers=plan.workers, on_done=advance)
    return [Run.load(folder) for target in folders for folder in target]


def stream_target(out: Path, plan: Plan, data: DomainData, seed: int) -> list[Path]:
    """Every method on every stream of one target; expert logits are computed once, finished runs are left alone."""
    pool = ExpertPool.load(pool_folder(out, seed)).without(data.name)
    singles: list[Variant] = [("single_expert", {"expert": name}) for name in pool.names]
    streams = [create_stream(spec, data.labels, seed=seed, acquired=data.acquired) for spec in plan.streams]
    methods = [create_method(name, pool, **options) for name, options in [*plan.variants, *singles]]
    wanted = [[(stream, {**describe_run(m, data, stream), "seed": seed}) for stream in streams] for m in methods]
    runs, folders = out / "runs", []
    there = all(is_finished(runs / run_hash(arguments)) for each in wanted for _, arguments in each)
    logits = {} if there else precompute(pool, data, VIEWS)
    for method, each in zip(methods, wanted, strict=True):
        folders += evaluate_streams(method, data, each, runs, logits, batch_size=32)
    return folders


def _results(findings: DemoFindings) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "data": "phantom hospitals: synthetic images, no patients",
        "command": findings.command,
        "plan": findings.plan,
        "duels": [asdict(duel) for duel in findings.duels],
        "results": [row.to_json() for row in findings.rows],
        "experts": [
            {"name": card.name, "seed": card.recipe["seed"], "temperature": card.temperature, **card.metrics}
            for card in findings.cards
        ],
        "runs": [run.hash for run in findings.runs],
        "environment": library_versions(),
    }
