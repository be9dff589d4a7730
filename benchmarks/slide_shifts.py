"""How far a slide moves the log-odds of experts that never saw its tumour: what they share, and what each has alone.

    python3 benchmarks/slide_shifts.py --pool midog-shared-5.npz --out benchmarks/results/slide_shifts.json

From what `real_pools.py` stored, two classes only. For every slide of at least eight images an expert's answers are
compared with its mean answers to the same classes at the target; the mean departure over the slide's images, divided by
the mean of p (1 - p), is a shift in nats. Its covariance between experts, less what chance explains, is shared by all;
the rest is each expert's own.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from provenance import provenance
from real_streams import StoredPool

LEAST_IMAGES = 8


def between_experts(values: np.ndarray) -> tuple[float, float]:
    """Mean covariance of two different rows of [K,N], and mean variance of a row."""
    covariance, experts = np.cov(values), len(values)
    trace = float(np.trace(covariance))
    return (float(covariance.sum()) - trace) / (experts * (experts - 1)), trace / experts


def shifts(stored: StoredPool, target: str) -> dict[str, Any]:
    subject = stored.subject((target,), (target,))
    logits = sum(subject.logits.values()) / len(subject.logits)  # mean over views [K,N,C]
    positive = logits.softmax(dim=-1)[..., 1].numpy()
    labels, groups = subject.labels.numpy(), np.asarray(subject.groups)
    slope = (positive * (1 - positive)).mean(axis=1, keepdims=True)
    departures = positive.copy()
    for label in np.unique(labels):
        departures[:, labels == label] -= positive[:, labels == label].mean(axis=1, keepdims=True)
    departures /= slope
    slides = [groups == slide for slide in np.unique(groups) if (groups == slide).sum() >= LEAST_IMAGES]
    by_slide = np.stack([departures[:, own].mean(axis=1) for own in slides], axis=1)
    chosen = np.any(slides, axis=0)
    within = np.concatenate([departures[:, own] - departures[:, own].mean(axis=1, keepdims=True) for own in slides], 1)
    chance = float(np.mean([1 / own.sum() for own in slides]))
    shared, variance = between_experts(by_slide)
    by_chance = [value * chance for value in between_experts(within)]
    common = max(0.0, shared - by_chance[0])
    return {
        "target": target,
        "slides": len(slides),
        "images": int(chosen.sum()),
        "shared_nats": round(common**0.5, 3),
        "own_nats": round(max(0.0, variance - by_chance[1] - common) ** 0.5, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pool", type=Path, nargs="+", required=True, help="files of real_pools.py")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    pools = [StoredPool.load(path) for path in given.pool]
    rows = [{"pool": stored.name, **shifts(stored, target)} for stored in pools for target in stored.names]
    given.out.write_text(json.dumps({"about": provenance(), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
