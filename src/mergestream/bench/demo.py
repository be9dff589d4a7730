"""The whole journey on the phantom hospitals: train experts, benchmark every method, write the report."""

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mergestream.bench.analysis.bench_findings import RESULTS_VERSION
from mergestream.bench.analysis.collection import collect
from mergestream.bench.drift.pool_drift import analyse_drift
from mergestream.bench.engine.benchmark import run_plan
from mergestream.bench.engine.plan import TABLES, BenchPlan
from mergestream.bench.landscape.landscape_run import LandscapeRequest, run_landscape
from mergestream.bench.report.demo_story import with_story
from mergestream.bench.report.report_findings import ReportFindings, analyse_runs
from mergestream.bench.report.report_page import write_report
from mergestream.data.datasets import DataRequest, Dataset, load_dataset, phantom
from mergestream.methods.spelling import Variant, parse_variants
from mergestream.pool.expert_card import BASE, ExpertCard, library_versions
from mergestream.runtime.files import make_folder, write_json
from mergestream.runtime.parallel import Track, run_jobs
from mergestream.runtime.seeding import cpu_threads
from mergestream.training import Recipe, train_base, train_expert
from mergestream.training.expert_training import copy_expert
from mergestream.training.pool_statistics import measure_pool

REPORT, DRIFT, LANDSCAPE = "report.html", "drift.json", "landscape.json"
OURS = "entropy_adaptive"
NETWORK = "vit_tiny_patch16_224"
# PyTorch's own initial weights ("reset") are larger than timm's.
MICRO = dict[str, Any](patch_size=8, embed_dim=64, depth=3, num_heads=2, img_size=phantom.PIXELS, weight_init="reset")


@dataclass(frozen=True)
class DemoSize:
    """How much of everything."""

    images: int
    archive_images: int
    head_init: str
    base: Recipe
    expert: Recipe
    seeds: tuple[int, ...]
    streams: tuple[str, ...]
    variants: tuple[Variant, ...]
    statistics_images: int
    landscape: int  # networks along each side of the plane; 0: none

    def to_json(self) -> dict[str, Any]:
        """Everything that a number in the results depends on."""
        described = {key: value for key, value in asdict(self).items() if key != "landscape"}
        return {**described, "variants": [{"method": v.method, "options": dict(v.options)} for v in self.variants]}


def _size(table: dict[str, Any]) -> DemoSize:
    recipe = TABLES["demo"]["recipe"]
    more: dict[str, Any] = {name: tuple(table[name]) for name in ("seeds", "streams")}
    for name in ("base", "expert"):
        more[name] = Recipe(**{**recipe, "views": tuple(recipe["views"]), **table[name]})
    return DemoSize(**{**table, **more, "variants": parse_variants(table["variants"])})


FULL, QUICK = (_size(TABLES["demo"][name]) for name in ("full", "quick"))


def run_demo(out: Path, size: DemoSize, track: Track, command: str) -> ReportFindings:
    """Do all that is not done yet, then write `results.json`, `report.html` and their records under `out`."""
    make_folder(out)
    # Starting processes takes longer than a quick demo's work.
    workers = 1 if len(size.seeds) == 1 else os.cpu_count() or 1
    dataset = load_dataset("phantom", images=size.images)
    pools = [out / ("pool" if seed == 0 else f"pool-seed{seed}") for seed in size.seeds]
    plan = BenchPlan(
        data=DataRequest("phantom", None, (("images", size.images),)),
        pools=tuple(str(pool.resolve()) for pool in pools),
        variants=size.variants,
        streams=size.streams,
        seeds=size.seeds,
        paired_seeds=True,
        device="cpu",
    )
    with cpu_threads(1):
        cards = _train(pools, size, dataset, track, workers)
        counts = dict.fromkeys(("gram", "fisher_exact", "gram_pp"), size.statistics_images)
        with track("measuring every expert at its own hospital", len(pools)) as advance:
            jobs = [(pool, plan.data, out, counts, "cpu") for pool in pools]
            run_jobs(measure_pool, jobs, workers=workers, on_done=advance)
        done = run_plan(plan, out, track, jobs=workers)
    collection = collect(out, names=[folder.name for folder in done.folders])
    results: dict[str, Any] = {
        "schema_version": RESULTS_VERSION,
        "data": "phantom hospitals: synthetic images, no patients",
        "command": command,
        "plan": size.to_json(),
        "experts": [
            {"name": card.name, "seed": card.recipe["seed"], "temperature": card.temperature, **card.metrics}
            for card in cards
        ],
        "runs": [run.hash for run in collection.runs],
        "environment": library_versions(),
    }
    more = f" --landscape {out / LANDSCAPE}" if size.landscape else ""
    own_command = f"mergestream report {out} --out {out / REPORT} --drift {out / DRIFT}{more}"
    report = analyse_runs(replace(collection, results=results), track, command=own_command)
    results["duels"] = [asdict(duel) for duel in report.bench.duels]
    results["results"] = [asdict(row) for row in report.bench.rows]
    write_json(out / "results.json", results)
    drift = analyse_drift(out / "pool")
    drift.save(out / DRIFT)
    surface = None
    if size.landscape:
        surface = run_landscape(_landscape_request(plan, size.landscape), out, track, command=command)
    report = with_story(replace(report, drift=drift, landscape=surface), dataset)
    write_report(report, out / REPORT)
    return report


def _landscape_request(plan: BenchPlan, resolution: int) -> LandscapeRequest:
    """The plane through the other hospitals' experts, on images of the first one."""
    return LandscapeRequest(
        plan.pools[0],
        replace(plan.data, images=200),
        next(iter(phantom.HOSPITALS)),
        resolution=resolution,
        path=f"{OURS}/sorted",
        device="cpu",
    )


def _train(pools: list[Path], size: DemoSize, dataset: Dataset, track: Track, workers: int) -> list[ExpertCard]:
    """One pool per seed; all start from one encoder, pretrained on the public archive."""
    archive = phantom.archive(size.archive_images, seed=0)
    with track("pretraining the shared encoder", size.base.steps) as advance:
        classes, head_init = dataset.classes, size.head_init
        train_base(pools[0] / BASE, NETWORK, MICRO, archive, classes, size.base, advance, head_init=head_init)
    for pool in pools[1:]:
        copy_expert(pools[0] / BASE, pool / BASE)
    jobs = [
        (pool / domain, pool / BASE, dataset[domain], replace(size.expert, seed=seed))
        for pool, seed in zip(pools, size.seeds, strict=True)
        for domain in dataset.domains
    ]
    with track("training the hospitals' experts", len(jobs)) as advance:
        return run_jobs(train_expert, jobs, workers=workers, on_done=advance)
