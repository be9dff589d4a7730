"""Real data on two cores: PACS and MIDOG 2025 with a pretrained ViT whose last blocks are fine-tuned.

The earlier blocks are the same in all experts, so every image passes through them once, and so does its mirror
image. An expert is a network from there on; its input [D,T,2] holds both token matrices, and the view 'hflip', which
turns the last dimension around, swaps them. Everything else is the product: pools, methods, streams, metrics.

    python3 benchmarks/two_cores.py --pacs pacs-128.zip --midog midog25-64.zip --weights vit_small.safetensors --work W

`--network clip` takes the image tower of CLIP ViT-B/16 instead of the ViT-S/14.
"""

import argparse
import csv
import io
import json
import time
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from provenance import provenance
from safetensors.torch import load_file
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn

import mergestream as ms
from mergestream.bench.choice.candidates import CANDIDATES, OWN, RARE, REFERENCE
from mergestream.bench.choice.candidates import STREAMS as PSEUDO_STREAMS
from mergestream.bench.choice.pseudo_targets import with_rare_class
from mergestream.data.streams import create_stream
from mergestream.functional.metrics import summarise
from mergestream.functional.nested_bootstrap import NestedRun, hierarchical_difference
from mergestream.methods.recommendation import METRICS as CHOICE_METRICS
from mergestream.methods.recommendation import ChoiceEvidence, SitePart, choose
from mergestream.methods.spelling import parse_variant

HELD_OUT = 5  # one of so many groups is for validation
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
SHOWN = 256  # validation images per pseudo-target, at most
STEPS = {"pacs": 300, "midog": 250}
STARTS = ("shared", "independent")
STREAMS = {
    "pacs": ("iid", "dirichlet:0.05", "note:0.1", "prevalence:0.02:0", "missing:3"),
    "midog": (
        "iid",
        "dirichlet:0.05",
        "slides",
        "prevalence:0.02",
        "prevalence:0.05",
        "prevalence:0.1",
        "prevalence:0.2",
        "prevalence:0.5",
        "lone",
    ),
}
METHODS = (
    "mean", "ensemble", "ensemble(views=hflip)", "entropy_adaptive", "entropy_adaptive(momentum=0.9)", "t3a(mean)",
    "lame(ensemble(views=hflip))", "label_shift(ensemble(views=hflip))", "prior_roid(ensemble(views=hflip))",
    "image_weights", "corrected", "corrected(mean)", "merge_and_fit", "merge_and_fit(correct=False)",
    "merge_and_fit(temperature=1)", "merge_and_fit(views=())", "merge_and_fit(ask_first=256, ask_every=4)",
    "merge_once(ask_first=256)",
)  # fmt: skip
RULES, RIVALS = ("merge_and_fit", "merge_once(ask_first=256)", "auto"), (
    "mean", "ensemble", "ensemble(views=hflip)", "entropy_adaptive", "t3a(mean)", "lame(ensemble(views=hflip))",
    "corrected", "corrected(mean)", "merge_and_fit",
)  # fmt: skip
USUAL = 32  # images per batch; other sizes run on the first two streams, variants there only
SIZED = (
    "mean", "ensemble", "ensemble(views=hflip)", "entropy_adaptive", "corrected", "lame(ensemble(views=hflip))",
    "t3a(mean)", *RULES[:2],
)  # fmt: skip
COMPARED = ("accuracy", "balanced_accuracy", "auroc")
METRICS = ("accuracy", "balanced_accuracy", "auroc", "nll", "brier", "ece", "calibration_in_the_large")


@dataclass(frozen=True)
class Network:
    """A pretrained network: its name in timm, pixels per side, how many blocks are fine-tuned, and its colours."""

    name: str
    size: int
    tail: int
    colours: tuple[tuple[float, ...], tuple[float, ...]]


NETWORKS = {
    "small": Network("vit_small_patch14_dinov2", 84, 3, IMAGENET),
    "clip": Network("vit_base_patch16_clip_quickgelu_224", 96, 2, CLIP),
    "small-whole": Network("vit_small_patch14_dinov2", 84, 12, IMAGENET),
    "clip-whole": Network("vit_base_patch16_clip_quickgelu_224", 96, 12, CLIP),
}


class Tail(nn.Module):
    """The last blocks of a ViT, its norm and its head."""

    def __init__(self, network: Any, blocks: int) -> None:
        super().__init__()
        self.blocks, self.norm = nn.Sequential(*list(network.blocks)[-blocks:]), network.norm
        self.fc_norm, self.head = network.fc_norm, network.head

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.fc_norm(self.norm(self.blocks(tokens[..., 0].transpose(1, 2)))[:, 0]))


class LastLayer(nn.Module):
    """The last layer alone, on features [B,D,1,1] of another network."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, features: Tensor) -> Tensor:
        return self.head(features[:, :, 0, 0])


@dataclass(frozen=True)
class Place:
    """The pretrained network, its file of weights, the folder for what is computed once, and the training seed."""

    network: Network
    weights: Path
    work: Path
    seed: int

    def pretrained(self, classes: int) -> Any:
        network = timm.create_model(self.network.name, img_size=self.network.size, num_classes=classes)
        state = {name: value.float() for name, value in load_file(self.weights).items()}
        network.load_state_dict(checkpoint_filter_fn(state, network), strict=False)
        return network.eval()

    def tail(self, classes: int) -> Tail:
        return Tail(self.pretrained(classes), self.network.tail)


def listed(dataset: str, archive: zipfile.ZipFile) -> tuple[list[str], dict[str, list[tuple[str, int, str]]]]:
    """Classes, and by domain the files with label and group."""
    domains: dict[str, list[tuple[str, int, str]]] = {}
    files = sorted(name for name in archive.namelist() if name.endswith(".webp"))
    if dataset == "pacs":
        classes = sorted({name.split("/")[2] for name in files})
        for name in files:
            domains.setdefault(name.split("/")[1], []).append((name, classes.index(name.split("/")[2]), name))
        return classes, domains
    classes, by_stem = ["NMF", "AMF"], {Path(name).stem: name for name in files}
    table = next(name for name in archive.namelist() if name.endswith(".csv"))
    for row in csv.DictReader(io.StringIO(archive.read(table).decode())):
        name = by_stem.pop(Path(row["image_id"]).stem, None)
        if name is not None and Path(name).stem != "8925":  # listed with two different cells
            domains.setdefault(row["Tumor"], []).append((name, classes.index(row["majority"]), row["filename"]))
    return classes, domains


@torch.no_grad()
def tokens_of(dataset: str, archive: Path, place: Place) -> dict[str, Any]:
    """Every domain's tokens [N,D,T,2] before the fine-tuned blocks, labels and groups; computed once."""
    file = place.work / f"{dataset}.pt"
    if file.exists():
        return torch.load(file, mmap=True, weights_only=False)
    with zipfile.ZipFile(archive) as opened:
        classes, domains = listed(dataset, opened)
        network = place.pretrained(len(classes)).to(torch.bfloat16)
        result: dict[str, Any] = {"classes": classes, "domains": {}}
        for domain, rows in domains.items():
            parts = [_tokens(network, place.network, opened, rows[i : i + 128]) for i in range(0, len(rows), 128)]
            labels, groups = torch.tensor([row[1] for row in rows]), [row[2] for row in rows]
            result["domains"][domain] = {"x": torch.cat(parts), "y": labels, "groups": groups}
    torch.save(result, file)
    return result


def _tokens(network: Any, about: Network, archive: zipfile.ZipFile, rows: list[tuple[str, int, str]]) -> Tensor:
    opened = (Image.open(io.BytesIO(archive.read(name))).convert("RGB") for name, _, _ in rows)
    pixels = [np.asarray(image.resize((about.size, about.size), Image.BILINEAR)) for image in opened]
    batch = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in about.colours)
    batch, both = ((batch - mean) / std).to(torch.bfloat16), []
    for view in (batch, batch.flip(-1)):
        hidden = network.norm_pre(network._pos_embed(network.patch_embed(view)))
        for block in list(network.blocks)[: -about.tail]:
            hidden = block(hidden)
        both.append(hidden.transpose(1, 2))
    return torch.stack(both, dim=-1)


def split(groups: list[str]) -> tuple[Tensor, Tensor]:
    """Images for training and for validation; no group is in both."""
    names = sorted(set(groups))
    np.random.RandomState(0).shuffle(names)
    held = set(names[: max(1, len(names) // HELD_OUT)])
    mask = torch.tensor([group in held for group in groups])
    return torch.where(~mask)[0], torch.where(mask)[0]


def expert_of(dataset: str, domain: str, start: str, data: Any, place: Place) -> dict[str, Any]:
    """Weights of one domain's expert and its logits on validation images; trained once."""
    file = place.work / f"{dataset}-{start}-{place.seed}-{domain.replace(' ', '_')}.pt"
    if file.exists():
        return torch.load(file, weights_only=False)
    own, classes, steps = data["domains"][domain], len(data["classes"]), STEPS[dataset]
    train, held = split(own["groups"])
    torch.manual_seed(place.seed + (1000 if start == "shared" else 5000 + sum(map(ord, domain))))
    network = place.tail(classes)
    nn.init.trunc_normal_(network.head.weight, std=0.02)
    nn.init.zeros_(network.head.bias)
    counts = torch.bincount(own["y"][train], minlength=classes).float()
    loss_weights = counts.sum() / (classes * counts) if dataset == "midog" else None
    body = [value for name, value in network.named_parameters() if "head" not in name]
    rates = [{"params": body, "lr": 5e-5}, {"params": network.head.parameters(), "lr": 5e-4}]
    optimiser = torch.optim.AdamW(rates, weight_decay=0.01)
    cosine = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min(1, (step + 1) / 20) * 0.5 * (1 + np.cos(np.pi * step / steps))
    )
    generator = torch.Generator().manual_seed(place.seed)
    network.train()
    for _ in range(steps):
        picked = train[torch.randint(len(train), (32,), generator=generator)]
        tokens = own["x"][picked].float()
        tokens = tokens.flip(-1) if torch.rand((), generator=generator) < 0.5 else tokens
        with torch.autocast("cpu", torch.bfloat16):
            logits = network(tokens)
        loss = nn.functional.cross_entropy(logits.float(), own["y"][picked], weight=loss_weights)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        cosine.step()
    network.eval()
    with torch.no_grad():
        logits = torch.cat([network(own["x"][part].float()) for part in held.split(256)])
    result = {"state": network.state_dict(), "val_logits": logits, "val": held, "train": train}
    torch.save(result, file)
    return result


def pool_of(experts: Mapping[str, Any], data: Any, dataset: str, place: Place) -> ms.ExpertPool:
    """A pool with the cards that training would write."""
    classes, modules = tuple(data["classes"]), {}
    for name, expert in experts.items():
        modules[name] = place.tail(len(classes))
        modules[name].load_state_dict(expert["state"])
    return with_cards(ms.ExpertPool.from_modules(modules, classes=classes, head="head"), experts, data, dataset)


def with_cards(pool: ms.ExpertPool, experts: Mapping[str, Any], data: Any, dataset: str) -> ms.ExpertPool:
    """The pool in bfloat16, with counts, temperatures and validation results in its cards."""
    classes = pool.classes
    for name, expert in experts.items():
        labels, logits = data["domains"][name]["y"], expert["val_logits"]
        held = labels[expert["val"]]
        heats = torch.logspace(-1, 1, 81)
        losses = torch.stack([nn.functional.cross_entropy(logits / heat, held) for heat in heats])
        mean = torch.softmax(logits, dim=1).mean(dim=0).tolist()
        validation = {
            "accuracy": float((logits.argmax(1) == held).float().mean()),
            "mean_probability": dict(zip(classes, mean, strict=True)),
        }
        pool = pool.annotate(
            name,
            class_counts=dict(zip(classes, torch.bincount(labels, minlength=len(classes)).tolist(), strict=True)),
            temperature=float(heats[losses.argmin()]),
            metrics={"validation": validation},
            recipe={"loss": "weighted" if dataset == "midog" else "plain"},
        )
    return pool.to(dtype=torch.bfloat16)


def last_layers(experts: Mapping[str, Any], data: Any, dataset: str, place: Place) -> ms.ExpertPool:
    """The experts' last layers as a pool, for methods that read the mean encoder's features and never another's."""
    modules = {}
    for name, expert in experts.items():
        tail = place.tail(len(data["classes"]))
        tail.load_state_dict(expert["state"])
        modules[name] = LastLayer(tail.head)
    pool = ms.ExpertPool.from_modules(modules, classes=tuple(data["classes"]), head="head")
    return with_cards(pool, experts, data, dataset)


@torch.no_grad()
def mean_features(pool: ms.ExpertPool, tokens: Tensor) -> Tensor:
    """Features [N,D,1,1] of the mean encoder."""
    weights = pool.merge(torch.full((len(pool),), 1 / len(pool)))
    parts = [pool.forward_with_inputs(weights, part)[1] for part in tokens.split(128)]
    return torch.cat(parts)[:, :, None, None]


@torch.no_grad()
def target_logits(pool: ms.ExpertPool, tokens: Tensor) -> dict[str, Tensor]:
    views = {"original": None, "hflip": "hflip"}
    return {
        name: torch.cat([pool.logits(part, view) for part in tokens.split(256)], dim=1) for name, view in views.items()
    }


@dataclass(frozen=True)
class Subject:
    """Images of one target as the experts of a pool see them."""

    pool: ms.ExpertPool
    last_layers: ms.ExpertPool
    tokens: Tensor  # [N,D,T,2]
    features: Tensor  # of the mean encoder [N,D,1,1]
    logits: dict[str, Tensor]  # of the experts by view [K,N,C]

    @classmethod
    def of(cls, experts: Mapping[str, Any], data: Any, dataset: str, place: Place, tokens: Tensor) -> "Subject":
        pool, lasts = pool_of(experts, data, dataset, place), last_layers(experts, data, dataset, place)
        return cls(pool, lasts, tokens, mean_features(pool, tokens), target_logits(pool, tokens))

    def only(self, chosen: Tensor) -> "Subject":
        logits = {view: values[:, chosen] for view, values in self.logits.items()}
        return replace(self, tokens=self.tokens[chosen], features=self.features[chosen], logits=logits)

    def run(self, text: str, batches: Any) -> tuple[Tensor, float]:
        """Probabilities in the order of the stream, and forwards per image.

        Only the paper's rule merges encoders anew for every batch; the others get the mean encoder's features.
        """
        variant, merges = parse_variant(text), "entropy_adaptive" in text
        images = self.tokens if merges else self.features
        method = ms.create_method(variant.method, self.pool if merges else self.last_layers, **dict(variant.options))
        answers, forwards = [], 0.0
        for indices in batches:
            picked = torch.as_tensor(indices)
            own = {view: values[:, picked] for view, values in self.logits.items()}
            step = method.step(images[picked], expert_logits=own)
            answers.append(torch.softmax(step.logits.float(), dim=-1))
            forwards += len(picked) * (step.expert_forwards + step.merged_forwards)
        return torch.cat(answers), forwards / sum(map(len, batches))


def part_of(site: str, subject: Subject, labels: Tensor, classes: tuple[str, ...]) -> SitePart:
    """A source as pseudo-target, as `mergestream choose` measures it: its validation images, the others' experts."""
    runs: dict[str, dict[str, Any]] = {}
    mixes = {OWN: torch.arange(len(labels)), RARE: with_rare_class(labels)}
    for text, (mix, chosen), spec in product(CANDIDATES, mixes.items(), PSEUDO_STREAMS):
        batches = create_stream(spec, labels[chosen], batch_size=USUAL, seed=0)
        answers, _ = subject.only(chosen).run(text, batches)
        truth = labels[chosen][torch.as_tensor(np.concatenate(list(batches)))]
        report = summarise(answers, truth, classes)
        runs.setdefault(text, {})[f"{spec}, {mix}"] = {name: report[name] for name in CHOICE_METRICS}
    names = {name: name for name in subject.pool.names}
    return SitePart(site, names, {mix: len(rows) for mix, rows in mixes.items()}, runs)


def auto_of(sources: Mapping[str, Any], data: Any, dataset: str, place: Place) -> dict[str, Any]:
    """The method that `mergestream choose` takes for a target's sources: no image, label or expert of the target."""
    parts = []
    for site, expert in sources.items():
        others = {name: each for name, each in sources.items() if name != site}
        own, held = data["domains"][site], expert["val"][:SHOWN]
        subject = Subject.of(others, data, dataset, place, own["x"][held])
        parts.append(part_of(site, subject, own["y"][held], tuple(data["classes"])))
    evidence = ChoiceEvidence(dataset, 0, dict.fromkeys(CANDIDATES, 0), REFERENCE, tuple(parts))
    return asdict(choose(evidence, parts))


def measured(
    dataset: str, start: str, arguments: argparse.Namespace, choices: list[Any]
) -> Iterator[tuple[dict[str, Any], NestedRun]]:
    """Every method at every target of a data set, on every stream and with every stream seed: scores and answers."""
    archive = {"pacs": arguments.pacs, "midog": arguments.midog}[dataset]
    place = Place(NETWORKS[arguments.network], arguments.weights, arguments.work, arguments.training_seed)
    data = tokens_of(dataset, archive, place)
    classes = tuple(data["classes"])
    experts = {domain: expert_of(dataset, domain, start, data, place) for domain in data["domains"]}
    for target, specs in held_out(data["domains"], streams_of(dataset, arguments)) if not arguments.train_only else ():
        sources = {domain: expert for domain, expert in experts.items() if domain not in target}
        methods = [name for name in (*METHODS, "auto") if arguments.methods is None or name in arguments.methods]
        if len(sources) == 2:
            methods = [name for name in methods if name != "auto"]  # no source can judge a pool of one expert
        choice = auto_of(sources, data, dataset, place) if "auto" in methods else None
        setting = {"dataset": dataset, "heads": start, "target": "+".join(target)}
        if choice is not None:
            choices.append({**setting, **choice})
        for seed in arguments.seeds:
            tokens, labels, columns = streamed(target, data, seed, arguments.images)
            subject = Subject.of(sources, data, dataset, place, tokens)
            for spec, size in product(specs, arguments.batch_sizes):
                all_methods = size == USUAL and spec in STREAMS[dataset][:2]
                if arguments.streams is None and size != USUAL and spec not in STREAMS[dataset][:2]:
                    continue
                batches = create_stream(spec, labels, batch_size=size, seed=seed, classes=classes, **columns)
                truth = labels[torch.as_tensor(np.concatenate(list(batches)))]
                units = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
                for text in methods if all_methods else [name for name in methods if name in (*SIZED, "auto")]:
                    began = time.perf_counter()
                    name = choice["method"] if choice is not None and text == "auto" else text
                    answers, forwards = subject.run(name, batches)
                    report = summarise(answers, truth, classes)
                    about = {"stream": spec, "batch": size, "seed": seed, "method": text, "images": len(truth)}
                    row = setting | about | {"forwards": round(forwards, 3)}
                    row |= {"seconds": round(time.perf_counter() - began, 2)} | {name: report[name] for name in METRICS}
                    chances, predictions = answers.half().numpy(), answers.argmax(dim=1).numpy()
                    yield (
                        row,
                        NestedRun(setting["target"], str(place.seed), seed, truth.numpy(), predictions, chances, units),
                    )


def streams_of(dataset: str, arguments: argparse.Namespace) -> tuple[str, ...]:
    return STREAMS[dataset] if arguments.streams is None else tuple(arguments.streams)


def held_out(domains: Iterable[str], specs: Sequence[str]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Domains that are left out together, and their streams; `recurrence` goes to the next domain and comes back."""
    names = list(domains)
    alone = [spec for spec in specs if "recurrence" not in spec]
    together = [spec for spec in specs if "recurrence" in spec]
    for target, following in zip(names, (*names[1:], names[0]), strict=True):
        if alone:
            yield (target,), alone
        if together:
            yield (target, following), together


def streamed(target: Sequence[str], data: Any, seed: int, images: int) -> tuple[Tensor, Tensor, dict[str, list[str]]]:
    """Tokens and labels of at most `images` images per domain, and their groups and domains."""
    tokens, labels, groups, domains = [], [], list[str](), list[str]()
    for domain in target:
        own = data["domains"][domain]
        chosen = np.sort(np.random.RandomState(seed).permutation(len(own["y"]))[:images])
        tokens.append(own["x"][chosen])
        labels.append(own["y"][chosen])
        groups += [own["groups"][i] for i in chosen]
        domains += [domain] * len(chosen)
    return torch.cat(tokens), torch.cat(labels), {"groups": groups, "domains": domains}


def differences(runs: Mapping[tuple[Any, ...], list[NestedRun]]) -> Iterator[dict[str, Any]]:
    """Our rules less each rival wherever both ran: mean over targets with its interval, and the worst target."""
    for (dataset, heads, stream, size, ours), mine in runs.items():
        for rival, metric in product(RIVALS if ours in RULES else (), COMPARED):
            other = runs.get((dataset, heads, stream, size, rival))
            result = None if other is None or rival == ours else hierarchical_difference(mine, other, metric)
            if result is not None:
                low, high = result.interval
                worst = min(result.by_target, key=result.by_target.__getitem__)
                yield {"dataset": dataset, "heads": heads, "stream": stream, "batch": size, "ours": ours,
                       "rival": rival, "metric": metric, "mean": result.mean, "low": low, "high": high,
                       "worst": result.by_target[worst], "worst_target": worst}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("--pacs", "--midog", "--weights", "--work"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/two_cores.json"))
    parser.add_argument("--datasets", default="pacs,midog")
    parser.add_argument("--heads", default=",".join(STARTS))
    parser.add_argument("--network", choices=NETWORKS, default="small")
    parser.add_argument("--training-seed", type=int, default=0)
    parser.add_argument("--train-only", action="store_true", help="compute tokens and experts, and end")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--images", type=int, default=700, help="streamed per target, at most")
    parser.add_argument("--streams", nargs="+", help="instead of those of the table, each with every batch size")
    parser.add_argument("--methods", nargs="+", help="some of the table's, or auto")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of streams")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    about = provenance() | {"network": NETWORKS[arguments.network].name, "training_seed": arguments.training_seed}
    rows, choices = list[dict[str, Any]](), list[Any]()
    runs: dict[tuple[Any, ...], list[NestedRun]] = defaultdict(list)
    for dataset, start in product(arguments.datasets.split(","), arguments.heads.split(",")):
        for row, nested in measured(dataset, start, arguments, choices):
            rows.append(row)
            runs[dataset, start, row["stream"], row["batch"], row["method"]].append(nested)
            text = f"{dataset} {start} {row['seed']} {row['target']} {row['stream']} {row['batch']} {row['method']}"
            print(f"{text}: {100 * row['accuracy']:.1f} in {row['seconds']} s", flush=True)
        if not arguments.train_only:
            record = {"about": about, "rows": rows, "choices": choices, "differences": list(differences(runs))}
            arguments.out.write_text(json.dumps(record, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
