"""A whole training run: base, candidates (one fit per domain and recipe), choice of the best, statistics.

Finished parts are not trained again.
"""

import re
import unicodedata
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mergestream.data.datasets import Dataset, open_data
from mergestream.networks.architecture import create_network
from mergestream.networks.preprocessing import Preprocessing
from mergestream.pool.expert_card import BASE, CARD, ExpertCard, read_card
from mergestream.pool.pool_folder import candidates_folder
from mergestream.runtime.errors import InputError, MergestreamError, TrainingError, unknown_name
from mergestream.runtime.files import make_folder, sha256_of_json, write_json
from mergestream.runtime.parallel import Track, run_jobs
from mergestream.training import training_progress
from mergestream.training.expert_training import (
    base_recipe,
    copy_expert,
    encoder_weights,
    probe,
    put_probes,
    train_expert,
    write_start,
)
from mergestream.training.pool_statistics import measure_pool
from mergestream.training.recipe import Recipe, TrainPlan

SCHEMA_VERSION = 1
STATISTICS = ("gram", "fisher_exact", "fisher_mergelm")


@dataclass(frozen=True)
class Candidate:
    """Result of one recipe at one domain: the expert's folder and its losses, or why the fit failed."""

    domain: str
    recipe: Recipe
    folder: Path
    progress: training_progress.Progress
    metrics: dict[str, Any] = field(default_factory=dict)  # of the expert's card; empty if the fit failed
    failed: str | None = None

    def to_json(self) -> dict[str, Any]:
        curve = {"seconds": self.progress.get("seconds"), "curve": self.progress.get("curve", [])}
        loss = self.metrics.get("validation", {}).get("nll")
        scores = {"validation_loss": loss, "criterion": self.metrics.get("criterion")}
        fit = {"domain": self.domain, "recipe": asdict(self.recipe), "expert": self.folder.name}
        return {**fit, **scores, "failed": self.failed, "metrics": self.metrics, **curve}


def work_folder(out: Path) -> Path:
    """Folder beside the pool for decoded images and candidates; it can be deleted when training is finished."""
    return out.with_name(f"{out.name}.work")


def candidate_folder(out: Path, domain: str, recipe: Recipe) -> Path:
    return work_folder(out) / "candidates" / f"{expert_name(domain)}-{sha256_of_json(asdict(recipe))[:8]}"


def progress_path(out: Path, domain: str, recipe: Recipe) -> Path:
    return work_folder(out) / "progress" / f"{candidate_folder(out, domain, recipe).name}.json"


def expert_name(domain: str) -> str:
    """Convert a domain's name to a folder name of plain letters: accents are dropped, other scripts get a number."""
    letters = "".join(each for each in unicodedata.normalize("NFKD", domain) if not unicodedata.combining(each))
    name = re.sub(r"[^A-Za-z0-9._-]", "_", letters)
    return name if letters.isascii() else f"{name}-{zlib.crc32(domain.encode()):08x}"


def train_candidate(plan: TrainPlan, out: Path, preprocessing: Preprocessing, domain: str, recipe: Recipe) -> Candidate:
    """Train one recipe at one domain. A failed fit is recorded, and the others continue."""
    data = open_data(plan.data, preprocessing, Path(plan.decoded))[domain]
    folder, path = candidate_folder(out, domain, recipe), progress_path(out, domain, recipe)
    events = work_folder(out) / "tensorboard" / folder.name if plan.tensorboard else None
    file = training_progress.ProgressFile(path, recipe.steps, events)
    try:
        listeners: dict[str, Any] = {"on_step": file.add_step, "on_validation": file.add_validation}
        card = train_expert(folder, out / BASE, data, recipe, **listeners, keep_every=plan.keep_every)
        file.close()
    except (TrainingError, OSError, torch.OutOfMemoryError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Candidate(domain, recipe, folder, file.progress, failed=reason)
    return Candidate(domain, recipe, folder, training_progress.read_progress(path) or {}, card.metrics)


def install_best(out: Path, candidates: Sequence[Candidate]) -> ExpertCard:
    """Copy the candidate with the lowest criterion into the pool as the domain's expert."""
    finished = [candidate for candidate in candidates if not candidate.failed]
    if not finished:
        reasons = "; ".join(dict.fromkeys(str(candidate.failed) for candidate in candidates))
        raise TrainingError(f"No setting could be trained at '{candidates[0].domain}': {reasons}.")
    best = min(finished, key=lambda candidate: (candidate.metrics["criterion"], candidate.folder.name))
    target = out / expert_name(best.domain)
    try:
        installed = read_card(target)
        if installed.weights_sha256 == read_card(best.folder).weights_sha256:
            return installed
    except MergestreamError:
        pass
    return copy_expert(best.folder, target)


def run_training(
    plan: TrainPlan, out: Path, track: Track, *, jobs: int = 1, engine: str = "local"
) -> list[tuple[ExpertCard, list[Candidate]]]:
    """Write the base if it is missing, try every recipe at every domain, and put the best experts into the pool."""
    if plan.tensorboard:
        training_progress.require_tensorboard()
    out = make_folder(out).resolve()
    work = make_folder(work_folder(out))
    plan = replace(plan, decoded=plan.decoded or str(work))
    if plan.domain is not None and (out / BASE / CARD).exists():
        # A single site may lack a class, which only the consortium's base knows of.
        plan = replace(plan, data=plan.data.of_pool(read_card(out / BASE).classes))
    is_new = plan.domain is None and not (out / BASE / CARD).exists()
    # Before any image is read: a hub may be out of reach.
    encoder = encoder_weights(plan.network, dict(plan.arguments), plan.init) if is_new else None
    open_data.cache_clear()  # files may have changed since an earlier call
    preprocessing = create_network(plan.network, num_classes=2, **dict(plan.arguments)).require_preprocessing()
    dataset = open_data(plan.data, preprocessing, Path(plan.decoded))
    domains = dataset.domains if plan.domain is None else (plan.domain,)
    if plan.domain not in (None, *dataset.domains):
        raise unknown_name(f"domain in '{dataset.name}'", str(plan.domain), dataset.domains)
    with track("reading images", len(domains)) as advance:
        for domain in domains:
            dataset[domain]
            advance()
    _write_base(plan, out, preprocessing, dataset, encoder, track, jobs, engine)
    fits = [(plan, out, preprocessing, domain, recipe) for domain in domains for recipe in plan.settings]
    paths = [progress_path(out, domain, recipe) for *_, domain, recipe in fits]
    with training_progress.follow_progress("training the experts", paths, [recipe for *_, recipe in fits], track):
        workers: dict[str, Any] = {"workers": fits_at_once(plan, jobs), "engine": engine, "device": plan.accelerator}
        candidates = run_jobs(train_candidate, fits, on_done=lambda: None, **workers)
    described = {key: getattr(plan, key) for key in ("network", "init", "head_init")}
    listed = {"arguments": dict(plan.arguments), "candidates": [candidate.to_json() for candidate in candidates]}
    write_json(work / "candidates.json", {"schema_version": SCHEMA_VERSION, **described, **listed})
    by_domain = {domain: [each for each in candidates if each.domain == domain] for domain in domains}
    cards = [install_best(out, each) for each in by_domain.values()]
    for candidate in candidates if plan.keep_candidates else ():  # into a pool beside the pool, for DiWA's averages
        target = candidates_folder(out) / candidate.folder.name
        if not candidate.failed and not (target / CARD).exists():
            copy_expert(candidate.folder, target)
    if plan.statistics:
        counts = dict.fromkeys(STATISTICS, plan.statistics)
        names = [card.name for card in cards]
        measure_pool(out, plan.data, Path(plan.decoded), counts, plan.accelerator, experts=names, track=track)
    return list(zip(cards, by_domain.values(), strict=True))


def fits_at_once(plan: TrainPlan, jobs: int) -> int:
    """On GPUs one fit each: processes that share a GPU take turns, so more of them only start up more often."""
    gpus = 0 if plan.accelerator == "cpu" else torch.cuda.device_count()
    return min(jobs, gpus) if gpus else jobs


def _write_base(
    plan: TrainPlan,
    out: Path,
    preprocessing: Preprocessing,
    dataset: Dataset,
    encoder: dict[str, Tensor] | None,
    track: Track,
    jobs: int,
    engine: str,
) -> None:
    """Write the plan's base unless it exists; a single site uses the consortium's base."""
    arguments = dict(plan.arguments)
    recipe = base_recipe(plan.network, arguments, plan.init, dataset.classes, plan.head_init, plan.seed)
    if (out / BASE / CARD).exists():
        _require_same_base(read_card(out / BASE), recipe, single_site=plan.domain is not None)
        return
    if plan.domain is not None:
        raise InputError(f"{out / BASE} is missing: one site trains from the consortium's base. Copy its folder there.")
    scratch = work_folder(out) / BASE
    write_start(scratch, plan.network, arguments, dataset.classes, encoder, plan.head_init, plan.seed, recipe)
    if plan.head_init == "linear_probe":
        fits = [(scratch, plan, preprocessing, domain) for domain in dataset.domains]
        with track("fitting every site's head on the frozen encoder", len(fits)) as advance:
            heads = run_jobs(_probe, fits, workers=jobs, on_done=advance, engine=engine, device=plan.accelerator)
        put_probes(scratch, heads)
    copy_expert(scratch, out / BASE)


def _probe(base: Path, plan: TrainPlan, preprocessing: Preprocessing, domain: str) -> dict[str, Any]:
    return probe(base, open_data(plan.data, preprocessing, Path(plan.decoded))[domain], plan.settings[0])


def _require_same_base(card: ExpertCard, recipe: dict[str, Any], *, single_site: bool) -> None:
    """Refuse a base that this plan would not have written; a single site only needs the same classes."""
    for key in ("classes",) if single_site else recipe:
        if card.recipe.get(key, list(card.classes) if key == "classes" else None) != recipe[key]:
            raise TrainingError(
                f"The existing base has {key} {card.recipe.get(key)!r}, this training needs {recipe[key]!r}. "
                f"Choose another --out, or train with the base's settings."
            )
