"""Training a consortium's experts, or one site's: base, candidates, choice. What is done is not done again."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mergestream.data.datasets import Dataset
from mergestream.data.datasets.opening import open_data
from mergestream.networks.architecture import create_network
from mergestream.networks.preprocessing import Preprocessing
from mergestream.pool.checkpoint import (
    BASE,
    CARD,
    ExpertCard,
    holds_only_an_expert,
    open_weights,
    read_card,
    write_expert,
)
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.pool_files import candidates_folder
from mergestream.pool.statistics import write_statistics
from mergestream.pool.statistics.measurement import measure_statistics
from mergestream.runtime.errors import InputError, MergestreamError, NetworkError, TrainingError, unknown_name
from mergestream.runtime.files import folder_written_whole, make_folder, sha256_of_json, write_json
from mergestream.runtime.parallel import Track, run_jobs
from mergestream.training import Recipe, probe, put_probes, split, train_expert, write_start
from mergestream.training.diary import Diary, Entry, followed, read_diary, require_tensorboard
from mergestream.training.plan import TrainPlan
from mergestream.training.weights import encoder_weights

SCHEMA_VERSION = 1
STATISTICS = ("gram", "fisher_exact")


@dataclass(frozen=True)
class Candidate:
    """One setting at one domain: where its expert lies and how it did, or why there is none."""

    domain: str
    recipe: Recipe
    folder: Path
    loss: float | None  # plain cross-entropy on the validation split
    criterion: float | None = None  # what the settings are compared by; the same, unless the recipe says otherwise
    failed: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    diary: Entry = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "domain": self.domain,
            "recipe": asdict(self.recipe),
            "expert": self.folder.name,
            "validation_loss": self.loss,
            "criterion": self.criterion,
            "failed": self.failed,
            "metrics": self.metrics,
            "seconds": self.diary.get("seconds"),
            "curve": self.diary.get("curve", []),
        }


def run_training(
    plan: TrainPlan, out: Path, track: Track, *, jobs: int = 1, engine: str = "local"
) -> list[tuple[ExpertCard, list[Candidate]]]:
    """Write the base where there is none, try every setting at every domain, and put the best ones into the pool."""
    if plan.devices > 1 and engine != "local":
        raise InputError("Several devices for one fit are for the local engine; a cluster spreads whole fits.")
    if plan.tensorboard:
        require_tensorboard()
    jobs = 1 if plan.devices > 1 else jobs
    out = make_folder(out).resolve()
    work = make_folder(work_folder(out))
    open_data.cache_clear()  # files may have changed since an earlier call
    preprocessing = _preprocessing(plan)
    dataset = open_data(plan.data, preprocessing, work)
    domains = _domains(plan, dataset)
    with track("reading images", len(domains)) as advance:
        for domain in domains:
            dataset[domain]
            advance()
    _write_base(plan, out, work, preprocessing, dataset, track, jobs, engine)
    wanted = [(plan, out, preprocessing, domain, recipe) for domain in domains for recipe in plan.settings]
    diaries = [diary_of(out, domain, recipe) for _, _, _, domain, recipe in wanted]
    with followed("training the experts", diaries, [recipe.steps for *_, recipe in wanted], track):
        found = run_jobs(
            train_candidate, wanted, workers=jobs, on_done=lambda: None, engine=engine, device=plan.accelerator
        )
    by_domain = {domain: [each for each in found if each.domain == domain] for domain in domains}
    write_json(work / "candidates.json", _records(plan, found))
    cards = [_install(out, candidates) for candidates in by_domain.values()]
    if plan.keep_candidates:
        _keep(found, candidates_folder(out))
    if plan.statistics:
        _measure(plan, out, dataset, cards)
    return [(card, by_domain[domain]) for card, domain in zip(cards, domains, strict=True)]


def train_candidate(plan: TrainPlan, out: Path, preprocessing: Preprocessing, domain: str, recipe: Recipe) -> Candidate:
    """One setting at one domain. A fit that fails is told, and the others go on."""
    data = open_data(plan.data, preprocessing, work_folder(out))[domain]
    folder = candidate_folder(out, domain, recipe)
    events = work_folder(out) / "tensorboard" / folder.name if plan.tensorboard else None
    diary = Diary(diary_of(out, domain, recipe), recipe.steps, events)
    try:
        card = train_expert(
            folder, out / BASE, data, recipe, diary.stepped, on_look=diary.looked, keep_every=plan.keep_every
        )
        diary.close()
    except (TrainingError, OSError, torch.OutOfMemoryError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Candidate(domain, recipe, folder, None, failed=reason, diary=diary.entry)
    return Candidate(
        domain,
        recipe,
        folder,
        float(card.metrics["validation"]["nll"]),
        float(card.metrics["criterion"]),
        metrics=card.metrics,
        diary=read_diary(diary_of(out, domain, recipe)) or {},
    )


def candidate_folder(out: Path, domain: str, recipe: Recipe) -> Path:
    return work_folder(out) / "candidates" / f"{expert_name(domain)}-{sha256_of_json(asdict(recipe))[:8]}"


def diary_of(out: Path, domain: str, recipe: Recipe) -> Path:
    return work_folder(out) / "progress" / f"{candidate_folder(out, domain, recipe).name}.json"


def work_folder(out: Path) -> Path:
    """Decoded images and all candidates, beside the pool; may be deleted when nothing is to be trained again."""
    return out.with_name(f"{out.name}.work")


def expert_name(domain: str) -> str:
    """A domain's name as a folder's."""
    return "".join(character if character.isalnum() or character in "-_." else "_" for character in domain)


def _preprocessing(plan: TrainPlan) -> Preprocessing:
    found = create_network(plan.network, num_classes=2, **dict(plan.arguments)).preprocessing
    if found is None:
        raise NetworkError(f"How '{plan.network}' takes images is not known, so it cannot be trained from files.")
    return found


def _domains(plan: TrainPlan, dataset: Dataset) -> tuple[str, ...]:
    if plan.domain is None:
        return dataset.domains
    if plan.domain not in dataset.domains:
        raise unknown_name(f"domain in '{dataset.name}'", plan.domain, dataset.domains)
    return (plan.domain,)


def _write_base(
    plan: TrainPlan,
    out: Path,
    work: Path,
    preprocessing: Preprocessing,
    dataset: Dataset,
    track: Track,
    jobs: int,
    engine: str,
) -> None:
    """The base of this plan, unless it is there; one site alone takes the consortium's as it is."""
    told: dict[str, Any] = {"network": plan.network, "arguments": dict(plan.arguments), "init": plan.init}
    told |= {"classes": list(dataset.classes), "head_init": plan.head_init, "seed": plan.seed}
    if (out / BASE / CARD).exists():
        _require_same_base(read_card(out / BASE), told, alone=plan.domain is not None)
        return
    if plan.domain is not None:
        raise InputError(f"{out / BASE} is missing: one site trains from the consortium's base. Copy its folder there.")
    encoder = encoder_weights(plan.network, dict(plan.arguments), plan.init)
    scratch = work / BASE
    write_start(
        scratch, plan.network, dict(plan.arguments), dataset.classes, encoder, plan.head_init, plan.seed, described=told
    )
    if plan.head_init == "linear_probe":
        every = [(scratch, plan, preprocessing, work, domain) for domain in dataset.domains]
        device = plan.accelerator
        with track("fitting every site's head on the frozen encoder", len(every)) as advance:
            put_probes(scratch, run_jobs(_probe, every, workers=jobs, on_done=advance, engine=engine, device=device))
    write_expert(out / BASE, dict(open_weights(scratch, read_card(scratch))), read_card(scratch))


def _probe(base: Path, plan: TrainPlan, preprocessing: Preprocessing, work: Path, domain: str) -> dict[str, Any]:
    return probe(base, open_data(plan.data, preprocessing, work)[domain], plan.settings[0])


def _require_same_base(card: ExpertCard, told: dict[str, Any], *, alone: bool) -> None:
    """The base that lies there must be what this plan would have written; alone, only the classes must fit."""
    known = json.loads(json.dumps(told))
    for key in ("classes",) if alone else known:
        if card.recipe.get(key, list(card.classes) if key == "classes" else None) != known[key]:
            raise TrainingError(
                f"The base that lies there has {key} {card.recipe.get(key)!r}, this training asks for {known[key]!r}. "
                f"Choose another --out, or train as the base was made."
            )


def _install(out: Path, candidates: Sequence[Candidate]) -> ExpertCard:
    """The candidate with the lowest validation loss becomes the domain's expert."""
    done = [candidate for candidate in candidates if candidate.criterion is not None]
    if not done:
        reasons = "; ".join(dict.fromkeys(str(candidate.failed) for candidate in candidates))
        raise TrainingError(f"No setting could be trained at '{candidates[0].domain}': {reasons}.")
    best = min(done, key=lambda candidate: (candidate.criterion, candidate.folder.name))
    card = read_card(best.folder)
    named = replace(card, name=expert_name(best.domain))
    try:
        if read_card(out / named.name).weights_sha256 == card.weights_sha256:
            return read_card(out / named.name)
    except MergestreamError:
        pass
    return write_expert(out / named.name, dict(open_weights(best.folder, card)), named)


def _keep(candidates: Sequence[Candidate], folder: Path) -> None:
    """All candidates as a pool beside the pool: what DiWA averages."""
    for candidate in candidates:
        if candidate.loss is not None and not (folder / candidate.folder.name / CARD).exists():
            with folder_written_whole(folder / candidate.folder.name, holds_only_an_expert) as scratch:
                shutil.copytree(candidate.folder, scratch, dirs_exist_ok=True)


def _measure(plan: TrainPlan, out: Path, dataset: Dataset, cards: Sequence[ExpertCard]) -> None:
    """Statistics of every trained expert on its own training images."""
    pool = ExpertPool.load(out)
    mine = {card.name: card for card in cards}
    images = {}
    for card in pool.cards:
        if card.name in mine and card.domain in dataset.domains:
            data = dataset[card.domain]
            training, _ = split(len(data), card.recipe["validation_share"], _split_seed(card), data.groups)
            images[card.name] = data.batch(training[: plan.statistics])
    strangers = [name for name in pool.names if name not in images]
    measured = measure_statistics(pool.without(*strangers) if strangers else pool, images, STATISTICS)
    for name, statistics in zip(measured.names, measured.statistics, strict=True):
        assert statistics is not None
        write_statistics(out / name, statistics, mine[name])


def _split_seed(card: ExpertCard) -> int:
    own = card.recipe.get("split_seed")
    return int(card.recipe["seed"] if own is None else own)


def _records(plan: TrainPlan, candidates: Sequence[Candidate]) -> dict[str, Any]:
    return {
        "schema_version": SCHEMA_VERSION,
        "network": plan.network,
        "arguments": dict(plan.arguments),
        "init": plan.init,
        "head_init": plan.head_init,
        "candidates": [candidate.to_json() for candidate in candidates],
    }
