"""All of PACS through entropy_adaptive, one target after the other: from decoded uint8 in memory, and from files.

    python3 benchmarks/pacs_stream.py --root pacs-128.zip --dtype bfloat16 --device cuda --json FILE

One pool of four random experts; for each target the pool without it, a method, and i.i.d. batches of 32. Timed is all
of that: the change of pool, the copies, the steps, and from files the decoding; not the making of the pool, nor a pass
over two targets that warms up graphs. The files are in the page cache, since they were decoded once before.
"""

import argparse
import json
import statistics
import time
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from step import about, require_captured

import mergestream as ms
from mergestream.data.datasets import Dataset
from mergestream.data.feeding import feed
from mergestream.networks.architecture import create_network
from mergestream.pool.execution import Execution

BATCH = 32
VIEWS = ("hflip",)


def main() -> None:
    given = arguments()
    pool = random_pool(given)
    ways = {"memory": decoded_data(given, pool), "files": lazy_data(given, pool)}
    for data in ways.values():
        one_pass(given, pool, data, data.domains[:2])
    found = {**about(given, VIEWS), "root": given.root.name, "limit": given.limit, "ahead": given.ahead}
    found |= {"size": list(image_size(given, pool)), "decode_on": given.decode_on}
    for way, data in ways.items():
        reset_peak(given)
        passes = [one_pass(given, pool, data, data.domains) for _ in range(given.repeats)]
        found[way] = summary(given, passes, data)
    print(json.dumps({way: {**found[way], "timings": "..."} for way in ways}, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="PACS: its folder or zip")
    parser.add_argument("--network", default="vit_base_patch32_224")
    parser.add_argument("--arg", action="append", default=[], help="name=number, an argument of the network")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--size", type=int, help="decode to so many pixels, and let the device resize; else the network's"
    )
    parser.add_argument("--ahead", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0, help="threads that decode; 0 for one a core")
    parser.add_argument("--decode-on", default="cpu", choices=("cpu", "cuda"), help="JPEGs, where the files are")
    parser.add_argument("--overlap", type=int, default=Execution().overlap, help="experts beside each other")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=int, help="batches of each target, for a try")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.experts, given.batch = 3, BATCH
    return given


def random_pool(given: argparse.Namespace) -> ms.ExpertPool:
    """Four experts that nobody trained, on the device."""
    known = {name: int(value) for name, _, value in (item.partition("=") for item in given.arg)}
    states, network = {}, None
    for seed, domain in enumerate(("art_painting", "cartoon", "photo", "sketch")):
        torch.manual_seed(seed)
        network = create_network(given.network, num_classes=7, **known)
        states[domain] = network.module.state_dict()
    pool = ms.ExpertPool.from_state_dicts(states, network.module, preprocessing=network.preprocessing)
    execution = Execution(overlap=given.overlap)
    return pool.to(given.device, dtype=getattr(torch, given.dtype)).to(execution=execution)


def image_size(given: argparse.Namespace, pool: ms.ExpertPool) -> tuple[int, int]:
    return (given.size, given.size) if given.size else pool.preprocessing.size


def decoded_data(given: argparse.Namespace, pool: ms.ExpertPool) -> Dataset:
    """Every domain as one array in memory; with a limit, only what it needs of each."""
    lazy = lazy_data(given, pool, decode_on="cpu")
    domains = {name: in_memory(given, lazy[name]) for name in lazy.domains}
    return Dataset(lazy.name, lazy.classes, lazy.domains, lazy.views, False, domains.__getitem__)


def in_memory(given: argparse.Namespace, data: ms.DomainData) -> ms.DomainData:
    shown = torch.arange(len(data) if given.limit is None else min(len(data), given.limit * BATCH))
    return ms.DomainData(data.dataset, data.name, data.classes, data.batch(shown), data.labels[shown])


def lazy_data(given: argparse.Namespace, pool: ms.ExpertPool, decode_on: str | None = None) -> Dataset:
    return ms.load_dataset(
        "pacs",
        str(given.root),
        size=image_size(given, pool),
        interpolation=pool.preprocessing.interpolation,
        lazy=True,
        workers=given.workers,
        decode_on=decode_on or given.decode_on,
    )


def one_pass(
    given: argparse.Namespace, pool: ms.ExpertPool, data: Dataset, targets: tuple[str, ...]
) -> dict[str, float]:
    """Seconds of each target, from the whole pool to the last answer on the device."""
    return {target: one_target(given, pool, data[target]) for target in targets}


def one_target(given: argparse.Namespace, pool: ms.ExpertPool, data: ms.DomainData) -> float:
    batches = ms.streams.iid(data.labels, batch_size=BATCH, seed=0)
    wait(given)
    began = time.perf_counter()
    method = ms.create_method("entropy_adaptive", pool.without(data.name), views=VIEWS)
    answers = []
    with closing(feed(data, islice(batches, given.limit), pool.device, ahead=given.ahead)) as fed:
        for images in fed:
            answers.append(method.step(images).logits.argmax(dim=-1))
    method.settle()
    require_captured(method, given.device)
    torch.cat(answers).cpu()
    return time.perf_counter() - began


def summary(given: argparse.Namespace, passes: list[dict[str, float]], data: Dataset) -> dict[str, Any]:
    """Of the median pass; all passes are in `timings`."""
    seconds = statistics.median(sum(each.values()) for each in passes)
    counts = {name: len(data[name]) for name in data.domains}
    if given.limit is not None:
        counts = {name: min(count, given.limit * BATCH) for name, count in counts.items()}
    return {
        "seconds": round(seconds, 4),
        "images": sum(counts.values()),
        "batches": sum(-(-count // BATCH) for count in counts.values()),
        "images_per_second": round(sum(counts.values()) / seconds, 1),
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if given.device.startswith("cuda") else None,
        "timings": [{name: round(value, 5) for name, value in each.items()} for each in passes],
    }


def wait(given: argparse.Namespace) -> None:
    if given.device.startswith("cuda"):
        torch.cuda.synchronize()


def reset_peak(given: argparse.Namespace) -> None:
    if given.device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
