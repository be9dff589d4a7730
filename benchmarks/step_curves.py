"""The captured step against experts, images, classes and the network's size: curves, and whether they are straight.

    python3 benchmarks/step_curves.py --network vit_base_patch32_224 --json curves.json --png curves.png
    python3 benchmarks/step_curves.py --from-json curves.json --png curves.png  # drawn anew, nothing measured

Every expert is a copy of one random network with noise of its own; timings are medians by the device's clock.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step import about, require_captured, timed

import mergestream as ms
from mergestream.networks.architecture import create_network
from mergestream.pool.execution import Execution

EXPERTS, BATCHES, CLASSES = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16, 32, 64, 128, 256), (2, 10, 100, 1000)
SIZES = "vit_tiny_patch16_224,vit_small_patch16_224,vit_base_patch16_224,vit_large_patch16_224"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="vit_base_patch32_224")
    parser.add_argument("--sizes", default=SIZES, help="networks of other sizes, by name; 3 experts, 32 images")
    parser.add_argument("--arg", action="append", default=[])
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--experts-up-to", type=int, default=64)
    parser.add_argument("--batches-up-to", type=int, default=256)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--overlap", type=int, default=Execution().overlap)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--from-json", type=Path, help="a record to draw, instead of measuring")
    given = parser.parse_args()
    record = json.loads(given.from_json.read_text()) if given.from_json else measured(given)
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    if given.png:
        draw(record, given.png)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    given.experts, given.batch = "1 to 64", "1 to 256"
    record: dict[str, Any] = about(given, ("hflip",))
    pool = noisy_pool(given, given.network)

    def measure_all(key: str, rows: Iterator[dict[str, Any]], unit: str, line: str = "") -> None:
        record[key] = list(rows)
        if line:
            fit = straight_line([(row[unit], row["ms"]) for row in record[key]])
            record[line] = {name.replace("unit", unit.removesuffix("s")): value for name, value in fit.items()}
        if given.json:  # a lease that ends before the last part keeps this much
            given.json.write_text(json.dumps(record, indent=1) + "\n")

    counts, batches = (
        [n for n in each if n <= most]
        for each, most in ((EXPERTS, given.experts_up_to), (BATCHES, given.batches_up_to))
    )
    measure_all("by_experts", (measure(given, many(pool, count), 32) for count in counts), "experts", "per_expert")
    measure_all("by_batch", (measure(given, many(pool, 3), size) for size in batches), "batch", "by_batch_line")
    pools = (noisy_pool(given, given.network, classes) for classes in CLASSES)
    measure_all("by_classes", (measure(given, many(each, 3), 32) for each in pools), "classes")
    named = ((name, noisy_pool(given, name)) for name in given.sizes.split(","))
    sizes = ({"network": name, **measure(given, many(each, 3), 32)} for name, each in named)
    measure_all("by_size", sizes, "parameters", "by_size_line")
    print(json.dumps({key: bare(value) for key, value in record.items()}, default=str)[-3000:])
    return record


def bare(value: Any) -> Any:
    """A part of the record without single timings."""
    rows = value if isinstance(value, list) else []
    return [{k: v for k, v in row.items() if k != "timings"} for row in rows if isinstance(row, dict)] or value


def noisy_pool(given: argparse.Namespace, name: str, classes: int = 7) -> ms.ExpertPool:
    """Four experts, made on the device."""
    arguments = {key: int(value) for key, _, value in (item.partition("=") for item in given.arg)}
    torch.manual_seed(0)
    with torch.device(given.device):
        network = create_network(name, num_classes=classes, **arguments)
    state, dtype = network.module.state_dict(), getattr(torch, given.dtype)
    generator = torch.Generator(given.device).manual_seed(0)
    noisy = {
        f"expert{k}": {
            n: t + 0.01 * torch.randn(t.shape, generator=generator, device=t.device) if t.is_floating_point() else t
            for n, t in state.items()
        }
        for k in range(4)
    }
    pool = ms.ExpertPool.from_state_dicts(noisy, network.module, preprocessing=network.preprocessing)
    return pool.to(given.device, dtype=dtype, execution=Execution(overlap=given.overlap))


def measure(given: argparse.Namespace, pool: ms.ExpertPool, size: int) -> dict[str, Any]:
    shape = (given.steps + 5, size, 3, *pool.template.require_preprocessing().size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=given.device)
    if given.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    method = ms.create_method("entropy_adaptive", pool)
    values = timed(lambda batch: method.step(batch).logits, images, given.device)
    require_captured(method, given.device)
    memory = (torch.cuda.max_memory_allocated() - images.numel()) / 2**30 if given.device == "cuda" else None
    row = {
        "experts": len(pool),
        "batch": size,
        "classes": len(pool.classes),
        "parameters": pool.layout.size,
        "ms": 1000 * statistics.median(values),
        "memory_gib": memory,
        "timings": [round(1000 * v, 4) for v in values],
    }
    print(json.dumps(bare([row])[0]), flush=True)
    return row


def many(pool: ms.ExpertPool, count: int) -> ms.ExpertPool:
    """The pool's experts over again: timings do not ask whose weights they are."""
    from dataclasses import replace

    picked = torch.arange(count) % len(pool)
    cards = tuple(replace(pool.cards[int(k)], name=f"expert{number}") for number, k in enumerate(picked))
    integers = tuple(pool.integers[int(k)] for k in picked)
    return pool._with(bank=pool.bank[picked], cards=cards, integers=integers, read_statistics=())


def straight_line(points: list[tuple[int, float]]) -> dict[str, float]:
    """ms = fixed + per_unit * x, and the largest departure from it as a share of the measured."""
    x, y = np.array(points, dtype=float).T
    slope, start = np.polyfit(x, y, 1, w=1 / y)
    worst = float(np.max(np.abs(start + slope * x - y) / y))
    return {"fixed_ms": float(start), "per_unit_ms": float(slope), "largest_departure": worst}


def draw(record: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    plain = FuncFormatter(lambda value, _: f"{value:g}")

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for ax, rows, key, label in zip(
        axes,
        (record["by_experts"], record["by_batch"]),
        ("experts", "batch"),
        ("experts K (batch 32)", "images B a batch (K = 3)"),
        strict=True,
    ):
        sizes, times = [row[key] for row in rows], [row["ms"] for row in rows]
        ax.plot(sizes, times, "o-", color="#0072B2")
        for axis, scale, ticks in (
            (ax.xaxis, ax.set_xscale, FixedLocator(sizes)),
            (ax.yaxis, ax.set_yscale, LogLocator(subs=(1, 2, 5))),
        ):
            scale("log")
            axis.set_major_locator(ticks)
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(plain)
        ax.set_ylim(min(1, 0.9 * min(times)))
        ax.set_xlabel(label)
        ax.set_ylabel("ms a step")
        ax.grid(alpha=0.3)
    line = record["per_expert"]
    axes[0].set_title(f"{line['fixed_ms']:.2f} ms + {line['per_expert_ms']:.2f} ms an expert")
    figure.suptitle(f"{record['network']}, {record['dtype']}, {record['machine']}")
    figure.savefig(path, dpi=120, facecolor="white")


if __name__ == "__main__":
    main()
