"""A whole training run: base, candidates, choice, statistics. Finished parts are not trained again."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mergestream.data.datasets import Dataset
from mergestream.data.datasets.data_request import open_data
from mergestream.networks.architecture import create_network
from mergestream.networks.preprocessing import Preprocessing
from mergestream.pool.checkpoint import open_weights, write_expert, write_statistics
from mergestream.pool.expert_card import BASE, CARD, ExpertCard, read_card
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.pool_folder import candidates_folder
from mergestream.pool.statistics.measurement import measure_statistics
from mergestream.runtime.errors import InputError, NetworkError, TrainingError, unknown_name
from mergestream.runtime.files import make_folder, write_json
from mergestream.runtime.parallel import Track, run_jobs
from mergestream.training.expert_training import encoder_weights, probe, put_probes, write_start
from mergestream.training.recipe import TrainPlan
from mergestream.training.training_candidates import (
    Candidate,
    copy_candidates,
    follow_progress,
    install_best,
    progress_path,
    require_tensorboard,
    train_candidate,
    work_folder,
)
from mergestream.training.training_loop import split_of

SCHEMA_VERSION = 1
STATISTICS = ("gram", "fisher_exact")


def run_training(
    plan: TrainPlan, out: Path, track: Track, *, jobs: int = 1, engine: str = "local"
) -> list[tuple[ExpertCard, list[Candidate]]]:
    """Write the base if it is missing, try every recipe at every domain, and put the best experts into the pool."""
    if plan.tensorboard:
        require_tensorboard()
    out = make_folder(out).resolve()
    work = make_folder(work_folder(out))
    open_data.cache_clear()  # files may have changed since an earlier call
    preprocessing = create_network(plan.network, num_classes=2, **dict(plan.arguments)).preprocessing
    if preprocessing is None:
        raise NetworkError(f"The preprocessing of '{plan.network}' is unknown, so it cannot be trained from files.")
    dataset = open_data(plan.data, preprocessing, work)
    domains = dataset.domains if plan.domain is None else (plan.domain,)
    if plan.domain not in (None, *dataset.domains):
        raise unknown_name(f"domain in '{dataset.name}'", str(plan.domain), dataset.domains)
    with track("reading images", len(domains)) as advance:
        for domain in domains:
            dataset[domain]
            advance()
    _write_base(plan, out, preprocessing, dataset, track, jobs, engine)
    fits = [(plan, out, preprocessing, domain, recipe) for domain in domains for recipe in plan.settings]
    paths = [progress_path(out, domain, recipe) for *_, domain, recipe in fits]
    with follow_progress("training the experts", paths, [recipe.steps for *_, recipe in fits], track):
        workers: dict[str, Any] = {"workers": jobs, "engine": engine, "device": plan.accelerator}
        candidates = run_jobs(train_candidate, fits, on_done=lambda: None, **workers)
    described = {key: getattr(plan, key) for key in ("network", "init", "head_init")}
    listed = {"arguments": dict(plan.arguments), "candidates": [candidate.to_json() for candidate in candidates]}
    write_json(work / "candidates.json", {"schema_version": SCHEMA_VERSION, **described, **listed})
    by_domain = {domain: [each for each in candidates if each.domain == domain] for domain in domains}
    cards = [install_best(out, each) for each in by_domain.values()]
    if plan.keep_candidates:
        copy_candidates(candidates, candidates_folder(out))
    if plan.statistics:
        _measure_statistics(plan, out, dataset, cards)
    return list(zip(cards, by_domain.values(), strict=True))


def _write_base(
    plan: TrainPlan, out: Path, preprocessing: Preprocessing, dataset: Dataset, track: Track, jobs: int, engine: str
) -> None:
    """Write the plan's base unless it exists; a single site uses the consortium's base."""
    recipe: dict[str, Any] = {"network": plan.network, "arguments": dict(plan.arguments), "init": plan.init}
    recipe |= {"classes": list(dataset.classes), "head_init": plan.head_init, "seed": plan.seed}
    if (out / BASE / CARD).exists():
        _require_same_base(read_card(out / BASE), recipe, single_site=plan.domain is not None)
        return
    if plan.domain is not None:
        raise InputError(f"{out / BASE} is missing: one site trains from the consortium's base. Copy its folder there.")
    network, work = (plan.network, dict(plan.arguments)), work_folder(out)
    scratch = work / BASE
    write_start(
        scratch, *network, dataset.classes, encoder_weights(*network, plan.init), plan.head_init, plan.seed, recipe
    )
    if plan.head_init == "linear_probe":
        fits = [(scratch, plan, preprocessing, work, domain) for domain in dataset.domains]
        with track("fitting every site's head on the frozen encoder", len(fits)) as advance:
            heads = run_jobs(_probe, fits, workers=jobs, on_done=advance, engine=engine, device=plan.accelerator)
        put_probes(scratch, heads)
    write_expert(out / BASE, dict(open_weights(scratch, read_card(scratch))), read_card(scratch))


def _probe(base: Path, plan: TrainPlan, preprocessing: Preprocessing, work: Path, domain: str) -> dict[str, Any]:
    return probe(base, open_data(plan.data, preprocessing, work)[domain], plan.settings[0])


def _require_same_base(card: ExpertCard, recipe: dict[str, Any], *, single_site: bool) -> None:
    """Refuse a base that this plan would not have written; a single site only needs the same classes."""
    required = json.loads(json.dumps(recipe))
    for key in ("classes",) if single_site else required:
        if card.recipe.get(key, list(card.classes) if key == "classes" else None) != required[key]:
            raise TrainingError(
                f"The existing base has {key} {card.recipe.get(key)!r}, this training needs {required[key]!r}. "
                f"Choose another --out, or train with the base's settings."
            )


def _measure_statistics(plan: TrainPlan, out: Path, dataset: Dataset, cards: Sequence[ExpertCard]) -> None:
    """Measure every trained expert's statistics on its own training images."""
    pool = ExpertPool.load(out)
    trained = {card.name: card for card in cards}
    images = {}
    for card in pool.cards:
        if card.name in trained and card.domain in dataset.domains:
            data = dataset[card.domain]
            images[card.name] = data.batch(split_of(data, card.recipe)[0][: plan.statistics])
    others = [name for name in pool.names if name not in images]
    measured = measure_statistics(pool.without(*others) if others else pool, images, STATISTICS)
    for name, statistics in zip(measured.names, measured.statistics, strict=True):
        assert statistics is not None
        write_statistics(out / name, statistics, trained[name])
