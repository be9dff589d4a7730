"""Milliseconds of a step for each method of the results page, on the device at hand, and how often networks run.

    python3 benchmarks/step_methods.py --network vit_base_patch16_224 --dtype bfloat16 --json step_methods.json
    python3 benchmarks/step_methods.py --from-json step_methods.json --streams streams/clip-shared.json --png figure.png

Random weights, three experts, batches of 32, one flipped view. `merge_once` is measured after its first images, when
one network answers. A step's `captured` says that it was replayed from a CUDA graph.
"""

import argparse
import gc
import json
import re
import statistics
from pathlib import Path
from typing import Any

import torch
from provenance import provenance
from step import timed

import mergestream as ms
from mergestream.methods.spelling import create_from_text
from mergestream.networks.architecture import create_network

FORWARDS = 7  # per image where three experts and the merged model answer, with one view
METHODS = (
    "mean",
    "ensemble",
    "ensemble(views=hflip)",
    "entropy_adaptive",
    "entropy_adaptive(score_images=8)",
    "merge_and_fit",
    "merge_once(ask_first=32)",
    "corrected",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", action="append", help="a timm name, or name:img_size; repeatable")
    parser.add_argument("--arg", action="append", default=[], help="name=number, an argument of every network")
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--methods", default="|".join(METHODS), help="separated by |")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--from-json", type=Path, help="a record to draw, instead of measuring")
    parser.add_argument("--streams", type=Path, help="accuracies of the same methods, from benchmarks/results/streams")
    parser.add_argument("--png", type=Path, help="accuracy against milliseconds of the last network")
    given = parser.parse_args()
    if given.from_json:
        draw(json.loads(given.from_json.read_text())["rows"], json.loads(given.streams.read_text())["rows"], given.png)
    else:
        measure_all(given)


def measure_all(given: argparse.Namespace) -> None:
    keys = ("experts", "batch", "dtype", "device", "steps")
    record: dict[str, Any] = {**provenance(given.device), **{key: getattr(given, key) for key in keys}, "rows": []}
    for name in given.network:
        pool = random_pool(given, name)
        shape = (given.steps + 5, given.batch, 3, *pool.template.require_preprocessing().size)
        images = torch.randint(0, 256, shape, dtype=torch.uint8, device=given.device)
        for text in given.methods.split("|"):
            gc.collect()  # the graphs of the method before are in a cycle
            row = {"network": name, "method": text, **measure(pool, text, images, given.device)}
            record["rows"].append(row)
            print(json.dumps({key: value for key, value in row.items() if key != "timings"}), flush=True)
            if given.json:
                given.json.write_text(json.dumps(record, indent=1) + "\n")


def random_pool(given: argparse.Namespace, text: str) -> ms.ExpertPool:
    name, _, size = text.partition(":")
    arguments = {key: int(value) for key, _, value in (item.partition("=") for item in given.arg)}
    arguments |= {"img_size": int(size)} if size else {}
    networks = []
    for seed in range(given.experts):
        torch.manual_seed(seed)
        with torch.device(given.device):
            networks.append(create_network(name, num_classes=7, **arguments))
    states = {f"expert{k}": network.module.state_dict() for k, network in enumerate(networks)}
    pool = ms.ExpertPool.from_state_dicts(states, networks[0].module, preprocessing=networks[0].preprocessing)
    return pool.to(given.device, dtype=getattr(torch, given.dtype))


def measure(pool: ms.ExpertPool, text: str, images: torch.Tensor, device: str) -> dict[str, Any]:
    method = create_from_text(text, pool, inside="the benchmark")

    def take(batch: torch.Tensor) -> torch.Tensor:
        return method.step(batch).logits

    values = timed(take, images, device)
    step = method.step(images[0])
    method.settle()
    return {
        "ms": 1000 * statistics.median(values),
        "expert_forwards": step.expert_forwards,
        "merged_forwards": step.merged_forwards,
        "captured": step.graph is not None,
        "timings": [round(1000 * value, 4) for value in values],
    }


def draw(timings: list[dict[str, Any]], table: dict[str, Any], path: Path) -> None:
    """Mean accuracy over targets, in batches of 32, against milliseconds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    network = timings[-1]["network"]
    ms_of = {plain(row["method"]): row["ms"] for row in timings if row["network"] == network}
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for ax, stream in zip(axes, ("iid", "dirichlet:0.05"), strict=True):
        for name, milliseconds in ms_of.items():
            own = [r for r in rows if plain(r["method"]) == name and (r["stream"], r["batch"]) == (stream, 32)]
            if not own:
                continue
            accuracy, whole = 100 * statistics.mean(row["accuracy"] for row in own), milliseconds
            if name == "merge_once":  # in these streams the experts answer many of the images, so that is what it takes
                asked = (statistics.mean(row["forwards"] for row in own) - 1) / (FORWARDS - 1)
                whole += asked * (ms_of["merge_and_fit"] - milliseconds)
                ax.plot([milliseconds, whole], [accuracy, accuracy], "o--", color="#0072B2", mfc="none", lw=0.8)
                ax.annotate("later", (milliseconds, accuracy), fontsize=8, xytext=(-6, 6), textcoords="offset points")
            ax.plot(whole, accuracy, "o", color="#0072B2")
            below = name in ("corrected", "entropy_adaptive(score_images=8)")
            offset = {"xytext": (4, -11 if below else 4), "textcoords": "offset points"}
            ax.annotate(name, (whole, accuracy), fontsize=8, **offset)
        ax.set(xlabel=f"ms per step of 32 images ({network}, H200)", ylabel="accuracy, %", title=stream, xlim=(0, 26))
        ax.margins(y=0.15)
        ax.grid(alpha=0.3)
    figure.savefig(path, dpi=110, facecolor="white")


def plain(method: str) -> str:
    """A method's name without when it asks the experts."""
    return re.sub(r"\(ask_first=\d+\)$", "", method)


if __name__ == "__main__":
    main()
