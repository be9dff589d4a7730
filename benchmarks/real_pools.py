"""Train pools on real images and store what their streams need; `real_streams.py` runs the streams from that.

    python3 benchmarks/real_pools.py --dataset pacs --root pacs.zip --init vit.safetensors --work W --out OUT \
        --network vit_small_patch14_dinov2 --arg img_size=126 --heads shared independent --seeds 0 1 2

Every domain is the target once, the other domains' experts answer. Most methods read nothing but the experts' logits
and the mean encoder's features, so these are stored once. Methods that merge encoders in another way answer here.
"""

import argparse
import copy
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import provenance
from torch import Tensor

import mergestream as ms
from mergestream.bench.choice.candidates import OWN, RARE
from mergestream.bench.choice.candidates import STREAMS as PSEUDO_STREAMS
from mergestream.bench.choice.pseudo_targets import with_rare_class
from mergestream.bench.drift.pool_drift import analyse_drift
from mergestream.data.datasets.domain_data import DomainData
from mergestream.data.streams import Stream, create_stream
from mergestream.methods import Method
from mergestream.methods.spelling import parse_variant
from mergestream.pool.execution import patches_as_products
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.runner import Batch

USUAL = 32  # images per batch
VIEWS = ("original", "hflip")
PARTS = ("encoder", "head")  # of the paper's state
STREAMS = {
    "pacs": (
        "iid", "dirichlet:0.05", "note:0.1", "sorted", "missing:1", "missing:3", "prevalence:0.02:0",
        "prevalence:0.05:0", "prevalence:0.1:0", "prevalence:0.2:0", "prevalence:0.5:0", "recurrence",
    ),
    "midog": (
        "iid", "dirichlet:0.05", "slides", "prevalence:0.02", "prevalence:0.05", "prevalence:0.1", "prevalence:0.2",
        "prevalence:0.5", "lone", "recurrence",
    ),
}  # fmt: skip
MAIN_STREAMS = ("iid", "dirichlet:0.05")  # with two stream seeds, and batches of four
SIZES = (1, 4, 32, 128)
PAPER = "entropy_adaptive"
# Forms of the paper's rule, on the main streams only.
PAPER_FORMS = ("entropy_adaptive(momentum=0.9)", "entropy_adaptive(score_images=8)")
# Methods that need whole networks, run as they are on the main streams of some pools.
WHOLE = (
    "task_arithmetic", "ties", "adamerging", "tent", "sar", "dawin", "dawin(transductive=True)", "t3_js",
)  # fmt: skip
WITH_BATCHNORM = ("mean(recalibrate_bn=true)", "mean(recalibrate_bn=window)", "entropy_adaptive(recalibrate_bn=window)")
MODELS_AT_ONCE = 1_200_000_000  # bytes of merged models in one grouped forward: fifteen pools share a GPU
LEAST_AGREEMENT = 0.97  # of grouped models with the product's steps


@dataclass(frozen=True)
class Setting:
    """One stream in batches of one size; as a text the key of the answers stored for it."""

    stream: str
    size: int = USUAL
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.stream}|{self.size}|{self.seed}"


def settings_of(dataset: str, *, every_size: bool) -> list[Setting]:
    """All settings of a data set: batches of all sizes on every stream, or of four images on the main streams only."""
    settings = [Setting(stream) for stream in STREAMS[dataset]]
    settings += [Setting(stream, seed=1) for stream in MAIN_STREAMS]
    for stream in STREAMS[dataset] if every_size else MAIN_STREAMS:
        settings += [Setting(stream, size) for size in (SIZES if every_size else (4,)) if size != USUAL]
    return settings


def stream_of(setting: Setting, labels: Tensor, classes: Sequence[str], **columns: Any) -> Stream:
    return create_stream(
        setting.stream, labels, batch_size=setting.size, seed=setting.seed, classes=tuple(classes), **columns
    )


def next_domain(names: Sequence[str], target: str) -> str:
    """The other domain of a target's recurrence."""
    return names[(list(names).index(target) + 1) % len(names)]


def streamed_images(data: DomainData, count: int) -> DomainData:
    """At most so many images in random order, or whole slides in the data's order where the data name them."""
    random = np.random.RandomState(0)
    if data.groups is None or len(set(data.groups)) == len(data):
        return data.subset(torch.from_numpy(random.permutation(len(data))[:count]))
    groups = np.asarray(data.groups)
    order = random.permutation(np.unique(groups))
    chosen = np.concatenate([np.flatnonzero(groups == group) for group in order])[:count]
    return data.subset(torch.from_numpy(np.sort(chosen)))


@torch.no_grad()
def single_models(
    pool: ExpertPool,
    encoder: Tensor,
    head: Tensor,
    batches: Sequence[np.ndarray],
    images: Callable[[Tensor], Tensor],
) -> Tensor:
    """As `GroupedModels.answers`, one merged model after the other: on a CPU grouping saves nothing."""
    weights, results = pool.new_weights(), []
    for own_encoder, own_head, indices in zip(encoder, head, batches, strict=True):
        pool.merge(own_encoder, own_head, out=weights)
        results.append(pool.forward(weights, pool.prepare(images(torch.as_tensor(indices)))))
    return torch.cat(results)


class GroupedModels:
    """Answers of many merged models at once: one forward of stacked weights, which a GPU does in the time of a few."""

    def __init__(self, pool: ExpertPool) -> None:
        self._pool = pool
        self._module = copy.deepcopy(pool.module_with(pool.merge(torch.full((len(pool),), 1 / len(pool)))))
        for module in self._module.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = False  # fused attention has no form for stacked weights
        self._border = pool.layout.encoder_size
        self._at_once = max(1, MODELS_AT_ONCE // (pool.layout.size * pool.bank.element_size()))

    @torch.no_grad()
    def answers(
        self, encoder: Tensor, head: Tensor, batches: Sequence[np.ndarray], images: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Logits [N,C] in the order of the stream; `encoder` and `head` [T,K] merge the model of every batch."""
        results: list[Tensor] = []
        start = 0
        while start < len(batches):
            stop = start + 1
            while stop < min(len(batches), start + self._at_once) and len(batches[stop]) == len(batches[start]):
                stop += 1
            results.append(self._group(encoder[start:stop], head[start:stop], batches[start:stop], images))
            start = stop
        return torch.cat(results)

    def _group(
        self, encoder: Tensor, head: Tensor, batches: Sequence[np.ndarray], images: Callable[[Tensor], Tensor]
    ) -> Tensor:
        bank, pool = self._pool.bank, self._pool
        weights = torch.empty(len(batches), pool.layout.size, dtype=bank.dtype, device=bank.device)
        weights[:, : self._border] = encoder.to(bank.device) @ bank[:, : self._border].float()
        weights[:, self._border :] = head.to(bank.device) @ bank[:, self._border :].float()
        stacked = {
            entry.name: weights[:, entry.start : entry.stop].reshape(-1, *entry.shape) for entry in pool.layout.entries
        }
        size = len(batches[0])
        shown = pool.prepare(images(torch.as_tensor(np.concatenate(batches))))
        shown = shown.reshape(len(batches), size, *shown.shape[1:])
        with patches_as_products([self._module]):
            logits = torch.vmap(lambda one, batch: pool.layout.call(self._module, one, batch))(stacked, shown)
        return logits.float().flatten(0, 1).cpu()


@dataclass(frozen=True)
class Target:
    """Images of one or two domains, and the experts that may answer them."""

    pool: ExpertPool
    data: Sequence[DomainData]
    logits: Mapping[str, Tensor]  # of the experts by view [K,N,C]

    @property
    def labels(self) -> Tensor:
        return torch.cat([part.labels for part in self.data])

    def columns(self) -> dict[str, Any]:
        groups = [f"{part.name}/{group}" for part in self.data for group in part.groups or range(len(part))]
        return {"groups": groups, "domains": [part.name for part in self.data for _ in range(len(part))]}

    def images(self, indices: Tensor) -> Tensor:
        if len(self.data) == 1:
            return self.data[0].batch(indices)
        first = len(self.data[0])
        rows = [self.data[int(i >= first)].images[int(i) - first * int(i >= first)] for i in indices]
        return torch.stack(rows)

    def coefficients(self, method: Method[Any], batches: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        """The paper's coefficients [T,K] of every batch, for encoder and head, from the experts' logits."""
        start: Any = method.start()

        def scored(state: Any, *views: Tensor) -> Any:
            batch = Batch(torch.empty(views[0].shape[1], 0), dict(zip(VIEWS, views, strict=True)))
            return method.scored(batch, state)[1]  # type: ignore[attr-defined]

        if getattr(method, "momentum", 0):
            states, state = [], start
            for indices in batches:
                picked = torch.as_tensor(indices)
                states.append(state := scored(state, *(self.logits[view][:, picked] for view in VIEWS)))
            return torch.stack([state.encoder for state in states]), torch.stack([state.head for state in states])
        pairs = []
        for _, group in groupby(batches, len):  # without momentum every batch stands alone
            picked = torch.as_tensor(np.stack(list(group)))
            views = [self.logits[view][:, picked].transpose(0, 1) for view in VIEWS]  # [T,K,B,C]
            pairs.append(torch.vmap(lambda *own: tuple(getattr(scored(start, *own), n) for n in PARTS))(*views))
        encoder, head = zip(*pairs, strict=True)
        return torch.cat(encoder), torch.cat(head)


class PoolAnswers:
    """A trained pool on its device, and everything that is stored of it."""

    def __init__(self, folder: Path, dataset: Any, given: argparse.Namespace) -> None:
        self._given = given
        whole = ExpertPool.load(folder)
        self.cards = whole.cards
        self._angles = angles_of(folder)
        self.pool = whole.to(given.device, dtype=torch.bfloat16 if given.precision == "bf16-mixed" else None)
        self.names = self.pool.names
        self.data = {card.name: streamed_images(dataset[card.domain or card.name], given.images) for card in self.cards}
        self.arrays: dict[str, np.ndarray] = {}
        self.passes: dict[str, float] = {}
        self.agreement: dict[str, float] = {}  # of the paper's stored answers with the product's steps

    def store(self, *, every_size: bool, whole_networks: Sequence[str], path: Path) -> None:
        """Everything that streams need, in one file."""
        took: dict[str, float] = {}
        for name, step in {
            "experts": self._store_experts,
            "features": self._store_features,
            "paper": lambda: None if self._given.no_paper else self._store_paper(every_size=every_size),
            "whole": lambda: self._store_whole(whole_networks),
        }.items():
            began = time.perf_counter()
            step()
            took[name] = round(time.perf_counter() - began, 1)
        values = [
            {name: getattr(card, name) for name in ("name", "domain", "class_counts", "temperature", "metrics")}
            for card in self.cards
        ]
        recipes = [{"loss": card.recipe.get("loss", "plain"), **_recipe(card.recipe)} for card in self.cards]
        about = {
            **provenance(self._given.device),
            "dataset": self._given.dataset,
            "network": str(self.pool.template.architecture),
            "classes": list(self.pool.classes),
            "cards": [{**card, "recipe": recipe} for card, recipe in zip(values, recipes, strict=True)],
            "shown": self._given.shown,
            "angles": self._angles,
            "passes": self.passes,
            "agreement": self.agreement,
            "seconds": took,
        }
        self.arrays["about"] = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path, **self.arrays)
        print(f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB, {took}", flush=True)
        if min(self.agreement.values(), default=1.0) < LEAST_AGREEMENT:
            raise SystemExit("Grouped models answer otherwise than the product does.")

    @torch.no_grad()
    def _store_experts(self) -> None:
        """Every expert's logits on all images in both views [V,K,N,C], labels, groups, and the last layers."""
        for name, data in self.data.items():
            parts = []
            for indices in torch.arange(len(data)).split(512):
                batch = Batch(self.pool.prepare(data.batch(indices)))
                own = self.pool.logits_of_views(batch, VIEWS)
                parts.append(torch.stack([own[view] for view in VIEWS]).cpu())
            self.arrays[f"{name}/logits"] = torch.cat(parts, dim=2).float().numpy()
            self.arrays[f"{name}/labels"] = data.labels.numpy()
            self.arrays[f"{name}/groups"] = np.asarray([str(g) for g in data.groups or range(len(data))])
        last = self.pool.last_layer
        assert last is not None
        weights, biases = zip(*(last.of_weights(row) for row in self.pool.bank), strict=True)
        self.arrays["heads/weight"] = torch.stack(weights).cpu().numpy()
        self.arrays["heads/bias"] = torch.stack(biases).cpu().numpy()

    def _store_features(self) -> None:
        """The mean encoder's features of every target's images, and of what recurrence and `auto` stream."""
        wanted: dict[tuple[str, frozenset[str]], int] = {}

        def ask(name: str, left_out: set[str], count: int) -> None:
            key = name, frozenset(left_out)
            wanted[key] = max(wanted.get(key, 0), min(count, len(self.data[name])))

        for target in self.names:
            ask(target, {target}, len(self.data[target]))
            following = next_domain(self.names, target)
            for name in (target, following):
                ask(name, {target, following}, self._given.recurrence)
        for site, target in permutations(self.names, 2):
            ask(site, {site, target}, self._given.shown)
        for (name, left_out), count in wanted.items():
            self.arrays[features_key(name, left_out)] = self._features(name, left_out, count).half().numpy()

    @torch.no_grad()
    def _features(self, name: str, left_out: frozenset[str], count: int) -> Tensor:
        pool = self.pool.without(*sorted(left_out))
        weights = pool.merge(torch.full((len(pool),), 1 / len(pool)))
        chunks = torch.arange(count).split(512)
        images = (pool.prepare(self.data[name].batch(indices)) for indices in chunks)
        return torch.cat([pool.forward_with_inputs(weights, batch)[1].cpu() for batch in images])

    def target(self, names: Sequence[str], left_out: Sequence[str], chosen: Sequence[Tensor] | None = None) -> Target:
        """Some images of domains, and the experts that are not left out."""
        pool = self.pool.without(*left_out)
        rows = [self.names.index(name) for name in pool.names]
        picked = chosen or [torch.arange(len(self.data[name])) for name in names]
        logits = [
            torch.from_numpy(self.arrays[f"{name}/logits"])[:, rows][:, :, indices]
            for name, indices in zip(names, picked, strict=True)
        ]
        together = torch.cat(logits, dim=2)
        data = [self.data[name].subset(indices) for name, indices in zip(names, picked, strict=True)]
        return Target(pool, data, dict(zip(VIEWS, together, strict=True)))

    def _store_paper(self, *, every_size: bool) -> None:
        """The paper's rule on every stream."""
        settings = settings_of(self._given.dataset, every_size=every_size)
        for target in self.names:
            own = self.target((target,), (target,))
            self._paper(target, own, [each for each in settings if each.stream != "recurrence"])
            following = next_domain(self.names, target)
            first = [torch.arange(min(self._given.recurrence, len(self.data[name]))) for name in (target, following)]
            both = self.target((target, following), (target, following), first)
            self._paper(f"{target}+{following}", both, [each for each in settings if each.stream == "recurrence"])
        for site, target in permutations(self.names, 2):
            shown = torch.arange(min(self._given.shown, len(self.data[site])))
            labels = self.data[site].labels[shown]
            for mix, chosen in {OWN: shown, RARE: with_rare_class(labels)}.items():
                part = self.target((site,), (site, target), [chosen])
                self._paper(f"{site}<{target}<{mix}", part, [Setting(stream) for stream in PSEUDO_STREAMS], forms=())

    def _paper(self, key: str, target: Target, settings: Sequence[Setting], forms: Sequence[str] = PAPER_FORMS) -> None:
        is_fast = self._given.device == "cuda"
        answered = GroupedModels(target.pool).answers if is_fast else partial(single_models, target.pool)
        small = ms.ExpertPool.from_modules(
            {name: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2, 2)) for name in target.pool.names},
            classes=("a", "b"),
            head="1",
        )  # the rule's scores need no network, only as many experts

        def rule(text: str) -> Method[Any]:
            variant = parse_variant(text)
            return ms.create_method(variant.method, small, **dict(variant.options))

        alone: Tensor | None = None  # in batches of one an image has the same answer on every stream
        for setting in settings:
            batches = list(stream_of(setting, target.labels, self.pool.classes, **target.columns()))
            if setting.size == 1:
                if alone is None:
                    every = [np.asarray([i]) for i in range(len(target.labels))]
                    alone = answered(*target.coefficients(rule(PAPER), every), every, target.images)
                self._keep(key, setting, PAPER, alone[torch.as_tensor(np.concatenate(batches))])
                continue
            usual = setting.stream in MAIN_STREAMS and setting.size == USUAL
            for text in (PAPER, *(forms if usual else ())):
                answers = answered(*target.coefficients(rule(text), batches), batches, target.images)
                self._keep(key, setting, text, answers)

    def _keep(self, key: str, setting: Setting, method: str, logits: Tensor) -> None:
        chances = torch.softmax(logits.float(), dim=-1).numpy()
        self.arrays[f"answers/{key}/{setting}/{method}"] = chances.astype(np.float16)

    def _store_whole(self, methods: Sequence[str]) -> None:
        """Methods that are run as users run them, on the main streams; the paper's rule too, to check the above."""
        for target, text in product(self.names, methods):
            own = self.target((target,), (target,))
            variant = parse_variant(text)
            method = ms.create_method(variant.method, own.pool, **dict(variant.options))
            for setting in (Setting(stream) for stream in MAIN_STREAMS):
                batches = stream_of(setting, own.labels, self.pool.classes, **own.columns())
                method.reset()
                if method.looks_ahead:
                    method.look_ahead(Batch(torch.empty(len(own.labels), 0), dict(own.logits)))
                answers, forwards, images = [], 0.0, 0
                for indices in batches:
                    step = method.step(own.images(torch.as_tensor(indices)))
                    answers.append(step.logits.cpu())
                    forwards += len(indices) * (step.expert_forwards + step.merged_forwards)
                    images += len(indices)
                method.settle()
                if text == PAPER:
                    self._compare(target, setting, torch.cat(answers))
                else:
                    self.passes[text] = round(forwards / images, 3)
                    self._keep(target, setting, text, torch.cat(answers))

    def _compare(self, target: str, setting: Setting, logits: Tensor) -> None:
        """How often a grouped model and the product's own step give an image the same class."""
        stored = torch.from_numpy(self.arrays[f"answers/{target}/{setting}/{PAPER}"]).float()
        agreement = float((logits.argmax(1) == stored.argmax(1)).float().mean())
        difference = float((torch.softmax(logits.float(), 1) - stored).abs().mean())
        self.agreement[f"{target} {setting}"] = round(agreement, 4)
        print(f"{target} {setting}: grouped models agree with steps on {agreement:.4f}, differ by {difference:.5f}")


def _recipe(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What tables say about the training."""
    names = ("steps", "batch_size", "learning_rate", "optimiser", "schedule", "weight_decay", "augmentation", "loss",
             "criterion", "seed", "head_init")  # fmt: skip
    return {name: recipe[name] for name in names if name in recipe}


def angles_of(folder: Path) -> dict[str, float]:
    """Degrees between the experts of each pair, mean over encoder blocks."""
    drift = analyse_drift(folder)
    blocks = [layer.whole.angles for layer in drift.of_kind("block")]
    return {"|".join(pair): float(np.mean([own[k] for own in blocks])) for k, pair in enumerate(drift.pairs)}


def features_key(name: str, left_out: frozenset[str] | set[str]) -> str:
    return f"{name}/features/{'|'.join(sorted(left_out))}"


def train_pool(given: argparse.Namespace, heads: str, seed: int) -> Path:
    """A pool by the product's own command, in this process so that images and kernels are shared."""
    folder = given.work / f"{given.label}-{heads}-{seed}"
    began = time.perf_counter()
    weighted = given.dataset == "midog"
    ms.train(
        given.dataset,
        given.network,
        folder,
        root=given.root,
        init=str(given.init) if given.init else "random",
        recipe="default",
        head_init=heads,
        loss="weighted" if weighted else "plain",
        criterion="balanced" if weighted else "plain",
        steps=given.steps,
        batch_size=given.batch_size,
        learning_rate=given.learning_rate,
        augmentation=given.augmentation,
        validate_every=given.steps // 3,
        seed=seed,
        arg=given.arg,
        device=given.device,
        precision=given.precision,
        keep_every=600.0,
    )
    print(f"{folder.name} trained in {time.perf_counter() - began:.1f} s", flush=True)
    return folder


def pools_of(given: argparse.Namespace) -> Iterator[tuple[str, int]]:
    yield from product(given.heads, given.seeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dataset", choices=STREAMS, required=True)
    for name in ("--root", "--work", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--init", type=Path, help="first weights of the encoder; random without")
    parser.add_argument("--network", required=True)
    parser.add_argument("--arg", nargs="*", default=[], help="of the network, as in img_size=126")
    parser.add_argument("--label", help="of the files; by default the data set")
    parser.add_argument("--heads", nargs="+", default=["shared", "independent"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of training")
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--augmentation", type=float, default=1.0)
    parser.add_argument("--images", type=int, default=1000, help="per domain, at most")
    parser.add_argument("--recurrence", type=int, default=400, help="images per domain of a recurrence")
    parser.add_argument("--shown", type=int, default=160, help="images of a pseudo-target")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--precision", choices=("bf16-mixed", "32-true"), default="bf16-mixed")
    parser.add_argument("--threads", type=int, default=4, help="of the CPU, for answers; training takes one")
    parser.add_argument("--every-size", type=int, nargs="*", default=[], help="seeds whose pools run all batch sizes")
    parser.add_argument("--whole", type=int, nargs="*", default=[], help="seeds whose first pool runs whole networks")
    parser.add_argument("--batchnorm", action="store_true", help="run the forms that re-estimate BatchNorm, too")
    parser.add_argument("--no-check", action="store_true", help="compare no stored answers with the product's steps")
    parser.add_argument("--no-paper", action="store_true", help="store no answers of the paper's rule")
    given = parser.parse_args()
    given.label = given.label or given.dataset
    torch.set_num_threads(given.threads)
    for heads, seed in pools_of(given):
        folder = train_pool(given, heads, seed)
        dataset = ms.load_dataset(given.dataset, root=given.root, size=_image_size(folder))
        first = heads == given.heads[0]
        checked = seed == given.seeds[0] and first and not (given.batchnorm or given.no_check or given.no_paper)
        whole = [PAPER] if checked else []
        whole += list(WHOLE) if seed in given.whole and first else []
        whole += list(WITH_BATCHNORM) if given.batchnorm else []
        PoolAnswers(folder, dataset, given).store(
            every_size=seed in given.every_size and first,
            whole_networks=whole,
            path=given.out / f"{given.label}-{heads}-{seed}.npz",
        )
        torch.cuda.empty_cache()


def _image_size(folder: Path) -> int:
    preprocessing = ExpertPool.load(folder).template.require_preprocessing()
    return int(dataclasses.astuple(preprocessing)[0][0])


if __name__ == "__main__":
    main()
