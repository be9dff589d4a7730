"""Training on a GPU against an eager TF32 loop: images a second of one fit, and a whole pool's wall clock.

    PYTHONPATH=src python3 benchmarks/train_speed.py --root pacs-128.zip --init vit.safetensors --json result.json

Rival and ours learn from the same uint8 images on the device, in the same batches, with the same augmentations.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from provenance import provenance

from mergestream.data.datasets import DataRequest, open_data
from mergestream.networks.architecture import create_network, logits_of
from mergestream.pool.expert_card import library_versions
from mergestream.runtime.parallel import quiet
from mergestream.training import Recipe, augmentation
from mergestream.training.expert_training import encoder_weights
from mergestream.training.recipe import TrainPlan, parse_settings
from mergestream.training.stepper import Stepper
from mergestream.training.training_run import run_training

WARM_UP = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="pacs")
    parser.add_argument("--root", help="of the data; 'phantom' needs none")
    parser.add_argument("--init", required=True, help="a safetensors file, or random")
    parser.add_argument("--network", default="vit_small_patch14_dinov2")
    parser.add_argument("--img-size", type=int, default=126)
    parser.add_argument("--settings", default="learning_rate=1e-5|3e-5|5e-5")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--timed-steps", type=int, default=300)
    parser.add_argument("--ways", default="never,auto,always", help="of compiling a single fit; always takes 40 s")
    parser.add_argument("--compare-jobs", type=int, help="train the pool with --jobs 1 and with so many, in turn")
    parser.add_argument("--pool", type=Path, help="keep the pool here")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    recipe = Recipe(
        steps=given.steps, batch_size=given.batch_size, accelerator="cuda", precision="bf16-mixed", compile="always"
    )
    record = {
        "network": given.network,
        "image_size": given.img_size,
        "batch_size": given.batch_size,
        "device": torch.cuda.get_device_name(),
        "versions": library_versions(),
        "commit": provenance("cuda")["commit"],
        "command": " ".join(["python3", *(Path(word).name if word.startswith("/") else word for word in sys.argv)]),
        "steps": one_fit(given, recipe),
    }
    for row in record["steps"]:
        row["times_the_rival"] = row["images_per_second"] / record["steps"][0]["images_per_second"]
        speed = f"{row['ms_per_step']:7.2f} ms a step, {row['images_per_second']:8.0f} images a second"
        first = f"first step {row['first_step_seconds']:.1f} s, {row['memory_gib']:.2f} GiB"
        print(f"{row['name']:24} {speed}, {row['times_the_rival']:.2f} x, {first}")
    write(given.json, record)  # a lease that ends during the pool keeps this much
    if given.compare_jobs:
        record["jobs"] = compared_jobs(given, replace(recipe, compile="auto"))
    else:
        record["pool"] = whole_pool(given, recipe)
        print(f"pool: {record['pool']['fits']} fits in {record['pool']['seconds']:.1f} s, everything included")
    write(given.json, record)


def compared_jobs(given: argparse.Namespace, recipe: Recipe) -> dict[str, Any]:
    """Seconds of a whole pool with one job and with several, in turn on the same GPU."""
    seconds: dict[str, list[float]] = {}
    for jobs in (1, given.compare_jobs, given.compare_jobs, 1):
        result = whole_pool(given, recipe, jobs)
        seconds.setdefault(str(jobs), []).append(result["seconds"])
        print(f"--jobs {jobs}: {result['fits']} fits of {recipe.steps} steps in {result['seconds']:.1f} s", flush=True)
    return {"steps": recipe.steps, "fits": result["fits"], "seconds": seconds}


def write(path: Path | None, record: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(record, indent=2) + "\n")


def one_fit(given: argparse.Namespace, recipe: Recipe) -> list[dict[str, Any]]:
    """The rival, then our three ways, one after the other on the same batches."""
    with tempfile.TemporaryDirectory() as folder:
        network = fresh(given)
        data = open_data(DataRequest(given.dataset, given.root), network.preprocessing, Path(folder))
        domain = data[data.domains[0]]
    images, labels = domain.images.cuda(), domain.labels.cuda()
    count = given.timed_steps + WARM_UP
    batches = torch.randint(len(images), (count, recipe.batch_size), generator=torch.Generator().manual_seed(0)).cuda()
    rows = [timed("eager TF32 loop (rival)", rival(given, recipe, images, labels, batches), recipe, count)]
    for name, choice in (("eager", "never"), ("graph", "auto"), ("compiled graph", "always")):
        if choice not in given.ways.split(","):
            continue
        chosen = replace(recipe, compile=choice)
        stepper = Stepper(fresh(given), images, labels, batches, chosen)
        stepper.module.train()
        rows.append(timed(f"{name} bf16 (ours)", stepper.take, recipe, count))
        assert stepper.execution == name, stepper.execution
    return rows


def rival(given: argparse.Namespace, recipe: Recipe, images: Any, labels: Any, batches: Any) -> Callable[[int], None]:
    """What one would write first: float32 with TF32 on, everything eager."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    network = fresh(given)
    module = network.module.train()
    optimiser = torch.optim.Adam(module.parameters(), lr=recipe.learning_rate)

    def take(step: int) -> None:
        picked = batches[step - 1]
        draws = augmentation.draw(len(picked), recipe.augmentation, recipe.views, picked.device)
        settings = recipe.augmentation, recipe.views, network.preprocessing
        inputs = augmentation.prepare_batch(*settings, images[picked], draws)
        loss = torch.nn.functional.cross_entropy(logits_of(module(inputs)), labels[picked])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    return take


def timed(name: str, take: Callable[[int], None], recipe: Recipe, count: int) -> dict[str, Any]:
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    take(1)
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    for step in range(2, WARM_UP + 1):
        take(step)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for step in range(WARM_UP + 1, count + 1):
        take(step)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / (count - WARM_UP)
    return {
        "name": name,
        "ms_per_step": 1000 * seconds,
        "images_per_second": recipe.batch_size / seconds,
        "first_step_seconds": first,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def whole_pool(given: argparse.Namespace, recipe: Recipe, jobs: int = 1) -> dict[str, Any]:
    """`mergestream train`, from the zip to the pool's folder."""
    folder = given.pool or Path(tempfile.mkdtemp()) / "pool"
    plan = TrainPlan(
        data=DataRequest(given.dataset, given.root),
        network=given.network,
        settings=parse_settings(given.settings, recipe),
        arguments=(("img_size", given.img_size),),
        init=given.init,
        keep_every=30.0,
    )
    began = time.perf_counter()
    trained = run_training(plan, folder, quiet, jobs=jobs)
    seconds = time.perf_counter() - began
    fits = [candidate for _, candidates in trained for candidate in candidates]
    result = {
        "fits": len(fits),
        "seconds": seconds,
        "images_per_second": len(fits) * recipe.steps * recipe.batch_size / seconds,
        "seconds_by_fit": [candidate.progress["seconds"] for candidate in fits],
        "experts": [
            {
                "domain": card.domain,
                "learning_rate": card.recipe["learning_rate"],
                "best_step": card.metrics["best_step"],
                "validation_accuracy": card.metrics["validation"]["accuracy"],
                "execution": card.metrics["execution"],
            }
            for card, _ in trained
        ],
    }
    if given.pool is None:
        shutil.rmtree(folder.parent)
    return result


def fresh(given: argparse.Namespace) -> Any:
    network = create_network(given.network, num_classes=7, img_size=given.img_size)
    encoder = encoder_weights(given.network, {"img_size": given.img_size}, given.init)
    if encoder is not None:
        network.module.load_state_dict(encoder, strict=False)
    network.module.cuda()
    return network


if __name__ == "__main__":
    main()
