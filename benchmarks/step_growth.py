"""How a step's time and memory grow on a CPU: with experts, images, classes, and along a stream; whether it is linear.

    python3 benchmarks/step_growth.py --json step_growth.json --png growth.png
    python3 benchmarks/step_growth.py --from-json step_growth.json --png growth.png  # drawn anew, nothing measured

A micro ViT with random weights, one flipped view, one thread. Times are processor time, so that other work on the
machine counts little; each point is the median of its steps. The stream runs the recommended rule, whose state is the
largest, and says how a step late in the stream compares with one at its beginning.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import provenance
from step_curves import many

import mergestream as ms
from mergestream.bench.demo import MICRO
from mergestream.networks.architecture import create_network

EXPERTS, BATCHES, CLASSES = (2, 4, 8, 16, 32, 64), (1, 4, 16, 64, 256), (2, 10, 100, 1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="of each point")
    parser.add_argument("--stream-steps", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--from-json", type=Path, help="a record to draw, instead of measuring")
    given = parser.parse_args()
    torch.set_num_threads(1)
    record = json.loads(given.from_json.read_text()) if given.from_json else measured(given)
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    if given.png:
        draw(record, given.png)


def measured(given: argparse.Namespace) -> dict[str, Any]:
    record: dict[str, Any] = {"network": f"vit_tiny_patch16_224 {MICRO}", "views": ["hflip"], **provenance()}
    point(given.steps)  # libraries take their memory at the first step
    record["by_experts"] = [point(given.steps, experts=k) for k in EXPERTS]
    record["by_batch"] = [point(given.steps, batch=size) for size in BATCHES]
    record["by_classes"] = [point(given.steps, classes=count) for count in CLASSES]
    for name, key in (("by_experts", "experts"), ("by_batch", "batch")):
        record[f"{name}_line"] = straight_line([(row[key], row["ms"]) for row in record[name]])
    record["stream"] = stream(given.stream_steps)
    print(json.dumps({key: value for key, value in record.items() if key not in ("command", "machine")}, indent=1))
    return record


def pool_of(experts: int, classes: int) -> ms.ExpertPool:
    torch.manual_seed(0)
    network = create_network("vit_tiny_patch16_224", num_classes=classes, **MICRO)
    states = {}
    for k in range(min(experts, 4)):
        generator = torch.Generator().manual_seed(k)
        states[f"expert{k}"] = {
            name: value + 0.05 * torch.randn(value.shape, generator=generator)
            for name, value in network.module.state_dict().items()
        }
    return many(ms.ExpertPool.from_state_dicts(states, network.module, preprocessing=network.preprocessing), experts)


def point(steps: int, *, experts: int = 3, batch: int = 16, classes: int = 7) -> dict[str, Any]:
    """Milliseconds of a step, and MiB that a pool of this size and its steps added."""
    before = resident()
    method = ms.create_method("entropy_adaptive", pool_of(experts, classes))
    times = timed(method, batches(batch), steps)
    about = {"experts": experts, "batch": batch, "classes": classes}
    return {**about, "ms": 1000 * statistics.median(times), "memory_mib": max(0.0, resident() - before)}


def stream(steps: int, batch: int = 1) -> dict[str, Any]:
    """A long stream: time and memory in ten parts of it, and the last against the first."""
    method, images = ms.create_method("merge_and_fit", pool_of(3, 7)), batches(batch)
    timed(method, images, 20)
    parts = []
    for number in range(10):
        times = timed(method, images, steps // 10)
        done = (number + 1) * (steps // 10)
        parts.append({"steps": done, "ms": 1000 * statistics.median(times), "memory_mib": resident()})
        print(json.dumps(parts[-1]), flush=True)
    ratio = {name: parts[-1][name] / parts[0][name] for name in ("ms", "memory_mib")}
    return {"method": "merge_and_fit", "batch": batch, "parts": parts, "last_to_first": ratio}


def batches(size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return list(torch.randint(0, 256, (8, size, 3, 32, 32), dtype=torch.uint8, generator=generator))


def timed(method: ms.Method, images: list[torch.Tensor], steps: int) -> list[float]:
    """Processor seconds of each step after one that warms up."""
    times = []
    for number in range(steps + 1):
        began = time.process_time()
        method.step(images[number % len(images)])
        times.append(time.process_time() - began)
    return times[1:]


def resident() -> float:
    """MiB in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def straight_line(points: list[tuple[int, float]]) -> dict[str, float]:
    """ms = fixed + each * count, and the largest departure from it as a share of the measured."""
    x, y = np.array(points, dtype=float).T
    slope, start = np.polyfit(x, y, 1, w=1 / y)
    worst = float(np.max(np.abs(start + slope * x - y) / y))
    return {"fixed_ms": float(start), "each_ms": float(slope), "largest_departure": worst}


def draw(record: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import NullLocator

    panels = (
        ("by_experts", "experts", "experts K (16 images)"),
        ("by_batch", "batch", "images B (3 experts)"),
        ("by_classes", "classes", "classes C (3 experts, 16 images)"),
        ("stream", "steps", "steps of one stream (merge_and_fit, 1 image)"),
    )
    figure, axes = plt.subplots(1, 4, figsize=(16, 4), constrained_layout=True)
    for ax, (name, key, label) in zip(axes, panels, strict=True):
        rows = record["stream"]["parts"] if name == "stream" else record[name]
        ax.plot([row[key] for row in rows], [row["ms"] for row in rows], "o-", color="#0072B2")
        if name in ("stream", "by_classes"):
            ax.set_ylim(0, 2 * max(row["ms"] for row in rows))
        else:
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter("{x:g}")
        if name != "stream":
            ax.set_xscale("log")
            ax.set_xticks([row[key] for row in rows], [str(row[key]) for row in rows])
            ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xlabel(label)
        ax.set_ylabel("ms per step (processor time)")
        ax.grid(alpha=0.3)
    figure.suptitle(f"{record['network']}, {record['machine']}")
    figure.savefig(path, dpi=110, facecolor="white")


if __name__ == "__main__":
    main()
