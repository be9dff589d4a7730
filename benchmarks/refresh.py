"""What is lost, and what is won, when experts are not scored on every batch: accuracy and time of refresh policies.

    PYTHONPATH=src python3 benchmarks/refresh.py POOL --dataset pacs --root pacs-128.zip --json refresh.json

Every domain is the target once, by the experts of the others. Labels are looked at by the table alone.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from provenance import provenance

import mergestream as ms

POLICIES: tuple[dict[str, float], ...] = (
    {"refresh_every": 1},
    *({"refresh_every": every} for every in (2, 4, 8, 16, 64)),
    *({"refresh_every": 64, "refresh_drift": nats} for nats in (0.02, 0.05, 0.1, 0.2)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pool", type=Path)
    parser.add_argument("--dataset", default="pacs")
    parser.add_argument("--root", required=True)
    parser.add_argument("--streams", default="iid,dirichlet:0.05,sorted")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=3, help="orders of each stream")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    pool = ms.ExpertPool.load(given.pool).to(given.device, dtype=getattr(torch, given.dtype))
    shown = pool.preprocessing
    data = ms.load_dataset(given.dataset, given.root, size=shown.size, interpolation=shown.interpolation)
    images = {name: data[name].batch(torch.arange(len(data[name]))).to(given.device) for name in data.domains}
    labels = {name: data[name].labels for name in data.domains}
    rows = []
    for stream in given.streams.split(","):
        for policy in POLICIES:
            rows.append({"stream": stream, **policy, **measure(given, pool, stream, policy, images, labels)})
            print(json.dumps(rows[-1]), flush=True)
    found = {"experts": len(pool) - 1, "batch": given.batch, "dtype": given.dtype, **provenance(given.device)}
    if given.json:
        given.json.write_text(json.dumps({**found, "rows": rows}, indent=1) + "\n")


def measure(
    given: argparse.Namespace,
    pool: ms.ExpertPool,
    stream: str,
    policy: dict[str, Any],
    images: dict[str, torch.Tensor],
    labels: dict[str, torch.Tensor],
) -> dict[str, Any]:
    """Accuracy in percent, mean over targets and orders, and milliseconds a batch."""
    accuracies: dict[str, list[float]] = {name: [] for name in images}
    batches_seen, seconds = 0, 0.0
    for target in images:
        for seed in range(given.seeds):
            method = ms.create_method("entropy_adaptive", pool.without(target), **policy)
            order = [
                torch.as_tensor(batch)
                for batch in ms.streams.create_stream(stream, labels[target], batch_size=given.batch, seed=seed)
            ]
            batches = [images[target][batch.to(given.device)] for batch in order]
            wait(given)
            began = time.perf_counter()
            answers = [method.step(batch).logits.argmax(dim=-1) for batch in batches]
            method.settle()
            wait(given)
            seconds += time.perf_counter() - began
            batches_seen += len(order)
            right = torch.cat(answers).cpu() == labels[target][torch.cat(order)]
            accuracies[target].append(100 * float(right.float().mean()))
    means = {name: round(sum(values) / len(values), 2) for name, values in accuracies.items()}
    return {
        "accuracy": round(sum(means.values()) / len(means), 2),
        "by_target": means,
        "ms_per_batch": round(1000 * seconds / batches_seen, 3),
    }


def wait(given: argparse.Namespace) -> None:
    if given.device.startswith("cuda"):
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
