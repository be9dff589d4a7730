"""Seconds of `mergestream pool statistics`: Gram, Fisher and RegMean++ of every leave-one-out pool of ViT-B/16 experts.

    COMMIT=... PYTHONPATH=src python3 benchmarks/statistics_speed.py --work scratch

Makes generated JPEGs and a pool of perturbed copies of one random network, then times the whole command as a user runs
it: start of Python, decoding of the images, measuring, writing. Then every kind alone, with the images decoded.
"""

import argparse
import csv
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from provenance import provenance

import mergestream as ms
from mergestream.pool.expert_card import library_versions

SITES = ("lyon", "brest", "turin", "graz")
CLASSES = tuple(f"class{number}" for number in range(7))
KINDS = {"gram": 1600, "fisher": 500, "gram-pp": 1600}  # the options without counts, which the command names as its own
SAMPLE_MS = 200
STAGE = re.compile(r"(measuring .+?) +━+\S* +(\d+)/(\d+) +(\d+):(\d+):(\d+)")
# Where the package is missing: cards are then read without their schema, and the record says so.
STAND_IN = """
class Draft202012Validator:
    def __init__(self, schema):
        self.schema = schema
    def iter_errors(self, value):
        return iter(())
"""


def write_site(folder: Path, per_class: int, site: int) -> None:
    """Generated pictures of 256 pixels, blurred colours under grain, in a folder per class."""
    random = np.random.default_rng(site)
    for label in CLASSES:
        (folder / SITES[site] / label).mkdir(parents=True)
        for number in range(per_class):
            colours = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8))
            smooth = np.asarray(colours.resize((256, 256), Image.Resampling.BICUBIC), dtype=np.int16)
            grainy = (smooth + random.integers(-12, 13, smooth.shape, dtype=np.int16)).clip(0, 255).astype(np.uint8)
            Image.fromarray(grainy).save(folder / SITES[site] / label / f"{number:04d}.jpg", quality=90)


def write_pool(folder: Path, network: str) -> None:
    """Copies of one random network that differ by a hundredth of each tensor's spread, with heads of their own."""
    torch.manual_seed(0)
    base = timm.create_model(network, num_classes=len(CLASSES))
    experts = {}
    for site in SITES:
        experts[site] = timm.create_model(network, num_classes=len(CLASSES))
        head = {f"head.{key}": tensor.clone() for key, tensor in experts[site].head.state_dict().items()}
        near = {
            key: tensor + 0.01 * tensor.std(unbiased=False) * torch.randn_like(tensor)
            for key, tensor in base.state_dict().items()
        }
        experts[site].load_state_dict({**near, **head})
    ms.ExpertPool.from_modules(experts, base=base, classes=CLASSES).save(folder)


@contextmanager
def sampled_gpu() -> Iterator[dict[str, float]]:
    """Seconds in which the GPU was busy and its peak memory, from nvidia-smi; empty where there is none."""
    result: dict[str, float] = {}
    if shutil.which("nvidia-smi") is None:
        yield result
        return
    question = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
    sampler = subprocess.Popen([*question, f"--loop-ms={SAMPLE_MS}"], stdout=subprocess.PIPE, text=True)
    began = time.perf_counter()
    try:
        yield result
    finally:
        seconds = time.perf_counter() - began
        sampler.terminate()
        lines = csv.reader(sampler.communicate()[0].splitlines())
        rows = [[float(cell) for cell in row] for row in lines if all(re.fullmatch(r" *[\d.]+", cell) for cell in row)]
        rows = [row for row in rows if len(row) == 2]
        if rows:
            result["gpu_busy_seconds"] = round(seconds * sum(use for use, _ in rows) / len(rows) / 100, 1)
            result["peak_gpu_memory_gb"] = round(max(used for _, used in rows) * 2**20 / 1e9, 1)


def timed_command(arguments: Sequence[str], environment: dict[str, str]) -> dict[str, Any]:
    """The command from start to end: wall seconds, GPU seconds, what each stage took, images that were measured."""
    began = time.perf_counter()
    with sampled_gpu() as gpu:
        done = subprocess.run(
            [sys.executable, "-m", "mergestream", "pool", "statistics", *arguments, "--json"],
            capture_output=True, text=True, env=environment, check=False,
        )  # fmt: skip
    seconds = round(time.perf_counter() - began, 1)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    stages: dict[str, int] = {}
    for title, _, _, hours, minutes, rest in STAGE.findall(done.stderr):
        stages[title] = 3600 * int(hours) + 60 * int(minutes) + int(rest)
    words = " ".join(Path(word).name if "/" in word else word for word in arguments)
    result = {"command": f"mergestream pool statistics {words}", "wall_seconds": seconds, **gpu, "stages": stages}
    print(json.dumps(result, indent=1), flush=True)
    return {**result, "images_per_expert": image_counts(json.loads(done.stdout))}


def image_counts(experts: dict[str, dict[str, int]]) -> dict[str, str]:
    """Every kind of statistics: from how many images per expert, and in how many sets of the pool."""
    kinds: dict[str, set[int]] = {}
    sets: dict[str, set[str]] = {}
    for own in experts.values():
        for kind, count in own.items():
            kinds.setdefault(kind.partition("-")[0], set()).add(count)
            sets.setdefault(kind.partition("-")[0], set()).add(kind)
    return {
        kind: f"{'/'.join(map(str, sorted(counts)))} of {len(experts)} experts"
        + (f", for {len(sets[kind])} pools" if len(sets[kind]) > 1 else "")
        for kind, counts in kinds.items()
    }


def environment_of(work: Path) -> tuple[dict[str, str], bool]:
    """Environment of the command, with a stand-in for jsonschema if that is missing; whether schemas are checked."""
    environment = {**os.environ, "COLUMNS": "160", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}
    if importlib.util.find_spec("jsonschema"):
        return environment, True
    (work / "stand_in").mkdir(parents=True, exist_ok=True)
    (work / "stand_in" / "jsonschema.py").write_text(STAND_IN, encoding="utf-8")
    sys.path.append(str(work / "stand_in"))
    own = environment.get("PYTHONPATH", "")
    return {**environment, "PYTHONPATH": os.pathsep.join(part for part in (own, sys.path[-1]) if part)}, False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True, help="an empty folder for images and pools: 35 GB")
    parser.add_argument("--network", default="vit_base_patch16_224")
    parser.add_argument("--per-class", type=int, default=230, help="pictures per class and site")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "statistics_speed.json")
    parser.add_argument("--whole-only", action="store_true", help="only the whole command, no kind alone")
    given = parser.parse_args()
    environment, checked = environment_of(given.work.resolve())
    began = time.perf_counter()
    with ProcessPoolExecutor() as workers:
        list(workers.map(partial(write_site, given.work / "images", given.per_class), range(len(SITES))))
    write_pool(given.work / "pool", given.network)
    print(f"images and pool made in {time.perf_counter() - began:.0f} s", flush=True)
    device = "cuda" if given.device != "cpu" and torch.cuda.is_available() else "cpu"
    data = ["--dataset", "folder", "--root", str(given.work / "images"), "--data-option", "group=none"]
    data += ["--device", given.device]
    record: dict[str, Any] = {
        "about": provenance(device) | {"cores": str(os.cpu_count())},
        "versions": library_versions(),
        "network": given.network,
        "experts": len(SITES),
        "jpegs": len(SITES) * len(CLASSES) * given.per_class,
        "cards_checked_with_jsonschema": checked,
    }
    if not given.whole_only:
        shutil.copytree(given.work / "pool", given.work / "again")
    record["all"] = timed_command([str(given.work / "pool"), *data], environment)
    record["written_gb"] = round(
        sum(file.stat().st_size for file in (given.work / "pool").glob("*/statistics.safetensors")) / 1e9, 1
    )
    record["nothing_left_to_measure"] = timed_command([str(given.work / "pool"), *data], environment)
    if given.whole_only:
        given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return
    # The same decoded images: the work folder is named after the pool.
    (given.work / "pool.work").rename(given.work / "again.work")
    record["each"] = {
        kind: timed_command([str(given.work / "again"), *data, f"--{kind}", str(count)], environment)
        for kind, count in KINDS.items()
    }
    record["building_methods_seconds"] = building_seconds(given.work / "pool", device)
    given.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def building_seconds(folder: Path, device: str) -> dict[str, float]:
    """Seconds until the paper's three rows stand, built from the statistics just measured, without the first site."""
    pool = ms.ExpertPool.load(folder, device=device).without(SITES[0])
    seconds = {}
    for name, options in (("fisher", {"fisher": "mergelm"}), ("regmean", {}), ("regmean_pp", {})):
        began = time.perf_counter()
        method = ms.create_method(name, pool, **options)
        answers = method(torch.zeros(1, 3, 224, 224, dtype=torch.uint8))
        assert torch.isfinite(answers).all(), name
        seconds[name] = round(time.perf_counter() - began, 1)
    return seconds


if __name__ == "__main__":
    main()
