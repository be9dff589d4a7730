"""A pool larger than the GPU: what a step of entropy_adaptive costs against K when experts stream from the host.

    python3 benchmarks/large_pool.py --experts 64 --network vit_base_patch32_224 --limit-gib 8 --device cuda \
        --json benchmarks/results/large_pool.json

The process may use no more of the GPU than --limit-gib. Every step sees another uint8 batch that lies on the device.
Random experts, made one at a time. Pools of one and two experts stay in the two staged rows and cost no copies, so the
line is fitted from K = 4 on.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from step import about
from torch import Tensor

import mergestream as ms
from mergestream.networks.architecture import create_network
from mergestream.networks.flat_layout import Layout
from mergestream.pool.checkpoint import ExpertCard
from mergestream.pool.construction import Parts
from mergestream.pool.host_pool import HostPool
from mergestream.pool.staging import SLOTS

CLASSES = ("a", "b", "c", "d", "e", "f", "g")
WARM_UPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="vit_base_patch32_224")
    parser.add_argument("--arg", action="append", default=[], help="name=number, an argument of the network")
    parser.add_argument("--experts", type=int, default=64, help="the largest pool; its halves are measured too")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--views", default="hflip")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit-gib", type=float, default=8.0, help="what the process may use of the GPU")
    parser.add_argument("--steps", type=int, default=20, help="timed at every K")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    on_gpu = torch.device(given.device).type == "cuda"
    if on_gpu:
        whole = torch.cuda.get_device_properties(given.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, given.limit_gib * 2**30 / whole))
    views = tuple(view for view in given.views.split(",") if view)
    pool = random_pool(given)
    images = random_images(given, pool)
    given.compile, given.overlap = False, 1  # steps of a pool that streams are eager, one expert at a time
    found: dict[str, Any] = about(given, views)
    found |= {
        "limit_gib": given.limit_gib if on_gpu else None,
        "row_gib": pool.bank[0].nbytes / 2**30,
        "bank_gib": pool.bank.nbytes / 2**30,
        "rows": [],
        "timings": {},
    }
    for experts in sizes(given.experts):
        row, values = measure(pool.without(*pool.names[experts:]), images, views)
        found["rows"].append(row)
        found["timings"][str(experts)] = [round(1000 * value, 4) for value in values]
        print(json.dumps(row))
    found["fit"] = line_through([row for row in found["rows"] if row["experts"] > SLOTS])
    print(json.dumps({key: found[key] for key in ("network", "dtype", "machine", "limit_gib", "bank_gib", "fit")}))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


def sizes(largest: int) -> list[int]:
    """1, 2, 4, … and the largest."""
    return sorted({1 << power for power in range(largest.bit_length()) if 1 << power < largest} | {largest})


def random_pool(given: argparse.Namespace) -> HostPool:
    """Experts around one random start, each drawn on the device and copied into its row: never two of them at once."""
    arguments = {name: int(value) for name, _, value in (item.partition("=") for item in given.arg)}
    torch.manual_seed(0)
    network = create_network(given.network, num_classes=len(CLASSES), **arguments)
    layout = Layout.of(network.module, network.head)
    start = torch.empty(layout.size)
    integers = layout.write_row(network.module.state_dict(), start, "The start")
    start = start.to(given.device)
    layout.strip(network.module)
    bank = torch.empty(given.experts, layout.size, dtype=getattr(torch, given.dtype))
    for expert, row in enumerate(bank):
        generator = torch.Generator(given.device).manual_seed(expert)
        noise = torch.randn(layout.size, device=given.device, generator=generator)
        row.copy_(noise.mul_(0.1).add_(1).mul_(start))
    cards = [ExpertCard.for_network(f"expert{k}", network, CLASSES) for k in range(given.experts)]
    parts = Parts(tuple(cards), bank, (integers,) * given.experts, network, layout)
    return HostPool(parts, device=given.device)


def random_images(given: argparse.Namespace, pool: HostPool) -> Tensor:
    assert pool.preprocessing is not None
    shape = (given.steps + WARM_UPS, given.batch, 3, *pool.preprocessing.size)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(given.device)


def measure(pool: ms.ExpertPool, images: Tensor, views: tuple[str, ...]) -> tuple[dict[str, Any], list[float]]:
    """One pool's figures and the seconds of each step after those that warm up."""
    assert isinstance(pool, HostPool)
    on_gpu = pool.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    method = ms.create_method("entropy_adaptive", pool, views=views)
    values, before = [], 0
    for number, batch in enumerate(images):
        if number == WARM_UPS:
            before = pool.copies
        began = time.perf_counter()
        method.step(batch)
        if on_gpu:
            torch.cuda.synchronize()
        values.append(time.perf_counter() - began)
    values = values[WARM_UPS:]
    copied = (pool.copies - before) / len(values)
    seconds = statistics.median(values)
    row = {
        "experts": len(pool),
        "ms_per_step": 1000 * seconds,
        "rows_copied_per_step": copied,
        "bus_gb_per_second": copied * pool.bank[0].nbytes / seconds / 1e9,
        "images_per_second": images.shape[1] / seconds,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if on_gpu else None,
    }
    return row, values


def line_through(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Milliseconds a step = fixed + per_expert * K by least squares; the farthest point's deviation as a share."""
    if len(rows) < 2:
        return None
    counts = torch.tensor([float(row["experts"]) for row in rows], dtype=torch.float64)
    taken = torch.tensor([row["ms_per_step"] for row in rows], dtype=torch.float64)
    design = torch.stack([torch.ones_like(counts), counts], dim=1)
    fixed, per_expert = torch.linalg.lstsq(design, taken[:, None]).solution.flatten().tolist()
    off = (fixed + per_expert * counts - taken).abs() / taken
    return {
        "fixed_ms": fixed,
        "ms_per_expert": per_expert,
        "largest_deviation": float(off.max()),
        "over_experts": [row["experts"] for row in rows],
    }


if __name__ == "__main__":
    main()
