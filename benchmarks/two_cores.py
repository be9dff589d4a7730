"""Real data on two cores: PACS and MIDOG 2025 with a pretrained ViT-S/14 whose last three blocks are fine-tuned.

The first nine blocks are the same in all experts, so every image passes through them once, and so does its mirror
image. An expert is a network from there on; its input [D,T,2] holds both token matrices, and the view 'hflip', which
turns the last dimension around, swaps them. Everything else is the product: pools, methods, streams, metrics.

    python3 benchmarks/two_cores.py --pacs pacs-128.zip --midog midog25-64.zip --weights vit_small.safetensors --work W
"""

import argparse
import csv
import io
import json
import time
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
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
from mergestream.data.streams import create_stream
from mergestream.functional.metrics import summarise
from mergestream.functional.nested_bootstrap import NestedRun, hierarchical_difference
from mergestream.methods.spelling import parse_variant

SIZE, TAIL, HELD_OUT = 84, 3, 5  # pixels, fine-tuned blocks, one of so many groups is for validation
STEPS = {"pacs": 300, "midog": 250}
STARTS = ("shared", "independent")
STREAMS = {
    "pacs": ("iid", "dirichlet:0.05", "note:0.1", "prevalence:0.02:0", "missing:3"),
    "midog": ("iid", "dirichlet:0.05", "slides", "prevalence:0.02", "prevalence:0.5"),
}
METHODS = (
    "mean", "ensemble", "ensemble(views=hflip)", "entropy_adaptive", "entropy_adaptive(momentum=0.9)", "t3a(mean)",
    "lame(ensemble(views=hflip))", "label_shift(ensemble(views=hflip))", "prior_roid(ensemble(views=hflip))",
    "image_weights", "corrected", "corrected(mean)", "merge_and_fit", "merge_and_fit(correct=False)",
    "merge_and_fit(temperature=1)", "merge_and_fit(views=())", "merge_and_fit(ask_first=256, ask_every=4)",
    "merge_once(ask_first=256)",
)  # fmt: skip
RULES, RIVALS = ("merge_and_fit", "merge_once(ask_first=256)"), (
    "mean", "ensemble", "ensemble(views=hflip)", "entropy_adaptive", "t3a(mean)", "lame(ensemble(views=hflip))",
    "corrected", "corrected(mean)", "merge_and_fit",
)  # fmt: skip
USUAL = 32  # images per batch; other sizes run on the first two streams, variants there only
SIZED = (
    "mean", "ensemble", "ensemble(views=hflip)", "entropy_adaptive", "corrected", "lame(ensemble(views=hflip))",
    "t3a(mean)", *RULES,
)  # fmt: skip
COMPARED = ("accuracy", "balanced_accuracy", "auroc")
METRICS = ("accuracy", "balanced_accuracy", "auroc", "nll", "brier", "ece", "calibration_in_the_large")


class Tail(nn.Module):
    """The last blocks of a ViT, its norm and its head."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.blocks, self.norm = nn.Sequential(*list(network.blocks)[-TAIL:]), network.norm
        self.fc_norm, self.head = network.fc_norm, network.head

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.fc_norm(self.norm(self.blocks(tokens[..., 0].transpose(1, 2)))[:, 0]))


def pretrained(weights: Path, classes: int) -> Any:
    network = timm.create_model("vit_small_patch14_dinov2", img_size=SIZE, num_classes=classes)
    state = {name: value.float() for name, value in load_file(weights).items()}
    network.load_state_dict(checkpoint_filter_fn(state, network), strict=False)
    return network.eval()


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
def tokens_of(dataset: str, archive: Path, weights: Path, work: Path) -> dict[str, Any]:
    """Every domain's tokens [N,D,T,2] before the fine-tuned blocks, labels and groups; computed once."""
    file = work / f"{dataset}.pt"
    if file.exists():
        return torch.load(file, mmap=True, weights_only=False)
    with zipfile.ZipFile(archive) as opened:
        classes, domains = listed(dataset, opened)
        network = pretrained(weights, len(classes)).to(torch.bfloat16)
        result: dict[str, Any] = {"classes": classes, "domains": {}}
        for domain, rows in domains.items():
            parts = [_tokens(network, opened, rows[i : i + 128]) for i in range(0, len(rows), 128)]
            labels, groups = torch.tensor([row[1] for row in rows]), [row[2] for row in rows]
            result["domains"][domain] = {"x": torch.cat(parts), "y": labels, "groups": groups}
    torch.save(result, file)
    return result


def _tokens(network: Any, archive: zipfile.ZipFile, rows: list[tuple[str, int, str]]) -> Tensor:
    pixels = [np.asarray(Image.open(io.BytesIO(archive.read(name))).convert("RGB").resize((SIZE, SIZE), Image.BILINEAR))
              for name, _, _ in rows]  # fmt: skip
    batch = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    batch, both = ((batch - mean) / std).to(torch.bfloat16), []
    for view in (batch, batch.flip(-1)):
        hidden = network.norm_pre(network._pos_embed(network.patch_embed(view)))
        for block in list(network.blocks)[:-TAIL]:
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


def expert_of(dataset: str, domain: str, start: str, data: Any, weights: Path, work: Path) -> dict[str, Any]:
    """Weights of one domain's expert and its logits on validation images; trained once."""
    file = work / f"{dataset}-{start}-0-{domain.replace(' ', '_')}.pt"
    if file.exists():
        return torch.load(file, weights_only=False)
    own, classes, steps = data["domains"][domain], len(data["classes"]), STEPS[dataset]
    train, held = split(own["groups"])
    torch.manual_seed(1000 if start == "shared" else 5000 + sum(map(ord, domain)))
    network = Tail(pretrained(weights, classes))
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
    generator = torch.Generator().manual_seed(0)
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


def pool_of(experts: Mapping[str, Any], data: Any, dataset: str, weights: Path) -> ms.ExpertPool:
    """A pool in bfloat16 with the cards that training would write."""
    classes, modules = tuple(data["classes"]), {}
    for name, expert in experts.items():
        modules[name] = Tail(pretrained(weights, len(classes)))
        modules[name].load_state_dict(expert["state"])
    pool = ms.ExpertPool.from_modules(modules, classes=classes, head="head")
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


@torch.no_grad()
def target_logits(pool: ms.ExpertPool, tokens: Tensor) -> dict[str, Tensor]:
    views = {"original": None, "hflip": "hflip"}
    return {
        name: torch.cat([pool.logits(part, view) for part in tokens.split(256)], dim=1) for name, view in views.items()
    }


def method_of(text: str, pool: ms.ExpertPool) -> ms.Method:
    variant = parse_variant(text)
    return ms.create_method(variant.method, pool, **dict(variant.options))


def run(method: ms.Method, tokens: Tensor, logits: dict[str, Tensor], batches: Any) -> tuple[Tensor, float]:
    """Probabilities in the order of the stream, and forwards per image."""
    method.reset()
    answers, forwards = [], 0.0
    for indices in batches:
        picked = torch.as_tensor(indices)
        own = {view: values[:, picked] for view, values in logits.items()}
        step = method.step(tokens[picked], expert_logits=own)
        answers.append(torch.softmax(step.logits.float(), dim=-1))
        forwards += len(picked) * (step.expert_forwards + step.merged_forwards)
    return torch.cat(answers), forwards / sum(map(len, batches))


def measured(dataset: str, start: str, arguments: argparse.Namespace) -> Iterator[tuple[dict[str, Any], NestedRun]]:
    """Every method at every target of a data set, on every stream and with every stream seed: scores and answers."""
    archive = {"pacs": arguments.pacs, "midog": arguments.midog}[dataset]
    data = tokens_of(dataset, archive, arguments.weights, arguments.work)
    classes = tuple(data["classes"])
    for target in data["domains"]:
        sources = {
            domain: expert_of(dataset, domain, start, data, arguments.weights, arguments.work)
            for domain in data["domains"]
            if domain != target
        }
        pool, own = pool_of(sources, data, dataset, arguments.weights), data["domains"][target]
        for seed in arguments.seeds:
            chosen = np.sort(np.random.RandomState(seed).permutation(len(own["y"]))[: arguments.images])
            tokens, labels = own["x"][chosen], own["y"][chosen]
            logits = target_logits(pool, tokens)
            groups = [own["groups"][i] for i in chosen] if dataset == "midog" else None
            for spec, size in product(STREAMS[dataset], arguments.batch_sizes):
                if size != USUAL and spec not in STREAMS[dataset][:2]:
                    continue
                batches = create_stream(spec, labels, batch_size=size, seed=seed, groups=groups, classes=classes)
                truth = labels[torch.as_tensor(np.concatenate(list(batches)))]
                units = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
                place = {"dataset": dataset, "heads": start, "target": target, "stream": spec, "batch": size}
                for text in METHODS if size == USUAL and spec in STREAMS[dataset][:2] else SIZED:
                    began = time.perf_counter()
                    answers, forwards = run(method_of(text, pool), tokens, logits, batches)
                    report = summarise(answers, truth, classes)
                    row = {**place, "seed": seed, "method": text, "images": len(truth), "forwards": round(forwards, 3)}
                    row |= {"seconds": round(time.perf_counter() - began, 2)} | {name: report[name] for name in METRICS}
                    predictions = answers.argmax(dim=1).numpy()
                    yield row, NestedRun(target, "0", seed, truth.numpy(), predictions, answers.half().numpy(), units)


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
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--images", type=int, default=700, help="streamed per target, at most")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of streams")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    runs: dict[tuple[Any, ...], list[NestedRun]] = defaultdict(list)
    for dataset, start in product(arguments.datasets.split(","), arguments.heads.split(",")):
        for row, nested in measured(dataset, start, arguments):
            rows.append(row)
            runs[dataset, start, row["stream"], row["batch"], row["method"]].append(nested)
            text = f"{dataset} {start} {row['seed']} {row['target']} {row['stream']} {row['batch']} {row['method']}"
            print(f"{text}: {100 * row['accuracy']:.1f} in {row['seconds']} s", flush=True)
    record = {"about": provenance(), "rows": rows, "differences": list(differences(runs))}
    arguments.out.write_text(json.dumps(record, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
