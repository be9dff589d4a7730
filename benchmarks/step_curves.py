"""The captured step against the number of experts and the size of the batch: curves, and whether they are straight.

    python3 benchmarks/step_curves.py --network vit_base_patch32_224 --json curves.json --png curves.png
    python3 benchmarks/step_curves.py --from-json curves.json --png curves.png  # drawn anew, nothing measured

Every expert is a copy of one random network with noise of its own; timings are medians by the device's clock.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step import _network, about, require_captured, timed

import mergestream as ms
from mergestream.pool.execution import Execution

EXPERTS, BATCHES = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8, 16, 32, 64, 128, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="vit_base_patch32_224")
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
    record["by_experts"] = [measure(given, k, 32) for k in EXPERTS if k <= given.experts_up_to]
    record["by_batch"] = [measure(given, 3, size) for size in BATCHES if size <= given.batches_up_to]
    record["per_expert"] = straight_line([(row["experts"], row["ms"]) for row in record["by_experts"]])
    printed = {key: record[key] for key in ("by_experts", "by_batch", "per_expert")}
    print(json.dumps(printed, indent=1, default=str)[-3000:])
    return record


def measure(given: argparse.Namespace, experts: int, size: int) -> dict[str, Any]:
    network = _network(given, 0)
    generator = torch.Generator().manual_seed(experts)
    state = network.module.state_dict()
    noisy = {
        f"expert{k}": {
            n: t + 0.01 * torch.randn(t.shape, generator=generator) if t.is_floating_point() else t
            for n, t in state.items()
        }
        for k in range(min(experts, 4))
    }
    pool = ms.ExpertPool.from_state_dicts(noisy, network.module, preprocessing=network.preprocessing)
    pool = many(pool, experts).to(
        given.device,
        dtype=getattr(torch, given.dtype),
        execution=Execution(overlap=given.overlap),
    )
    images = torch.randint(0, 256, (given.steps + 5, size, 3, *network.preprocessing.size), dtype=torch.uint8).to(
        given.device
    )
    if given.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    method = ms.create_method("entropy_adaptive", pool)
    values = timed(lambda batch: method.step(batch).logits, images, given.device)
    require_captured(method, given.device)
    memory = (torch.cuda.max_memory_allocated() - images.numel()) / 2**30 if given.device == "cuda" else None
    return {
        "experts": experts,
        "batch": size,
        "ms": 1000 * statistics.median(values),
        "memory_gib": memory,
        "timings": [round(1000 * v, 4) for v in values],
    }


def many(pool: ms.ExpertPool, count: int) -> ms.ExpertPool:
    """The pool's experts over again: timings do not ask whose weights they are."""
    from dataclasses import replace

    picked = torch.arange(count) % len(pool)
    cards = tuple(replace(pool.cards[int(k)], name=f"expert{number}") for number, k in enumerate(picked))
    integers = tuple(pool.integers[int(k)] for k in picked)
    return pool._with(bank=pool.bank[picked], cards=cards, integers=integers, read_statistics=())


def straight_line(points: list[tuple[int, float]]) -> dict[str, float]:
    """ms = fixed + per_expert * K, and the largest departure from it as a share of the measured."""
    x, y = np.array(points, dtype=float).T
    slope, start = np.polyfit(x, y, 1, w=1 / y)
    worst = float(np.max(np.abs(start + slope * x - y) / y))
    return {"fixed_ms": float(start), "per_expert_ms": float(slope), "largest_departure": worst}


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
