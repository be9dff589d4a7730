"""The paper's theory on real pools, from what `real_pools.py` stored of several training seeds: no GPU is needed.

    python3 benchmarks/real_theory.py --pools FOLDER --json benchmarks/results/theory.json

Bias, variance and covariance over training seeds, locality, weakened logits, certainty by class share, entropy against
error, and the angle between experts against the mean's loss of accuracy. Every domain is the target once.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from provenance import provenance
from real_pools import Setting, features_key
from real_streams import StoredPool
from torch import Tensor

from mergestream.bench.claims.claim_checks import QUESTION, Evidence, check_scores
from mergestream.bench.claims.claim_finding import ClaimFinding
from mergestream.bench.claims.theory_checks import (
    DriftPoint,
    TargetAnswers,
    check_drift,
    check_theory,
    error_parts,
)
from mergestream.functional import scores

TITLES = {"pacs": "PACS ViT-S", "clip": "PACS CLIP", "midog": "MIDOG ViT-S"}
DATASETS = {"pacs": "pacs", "clip": "pacs", "midog": "midog"}


def logits_of(pool: StoredPool, target: str) -> tuple[Tensor, Tensor]:
    """Of the other domains' experts [K,N,C] and of the mean of their weights [N,C], in an i.i.d. order."""
    rows = [k for k, name in enumerate(pool.names) if name != target]
    features = torch.from_numpy(pool.arrays[features_key(target, {target})]).float()
    order = torch.as_tensor(np.concatenate(list(pool.subject((target,), (target,)).stream(Setting("iid")))))
    weight, bias = (torch.from_numpy(pool.arrays[f"heads/{part}"])[rows].mean(dim=0) for part in ("weight", "bias"))
    alone = torch.from_numpy(pool.arrays[f"{target}/logits"])[0, rows]  # as they are, not flipped
    return alone[:, order], (features @ weight.T + bias)[order]


def probabilities(logits: Tensor) -> np.ndarray:
    return torch.softmax(logits.double(), dim=-1).numpy()


def batches_of(pool: StoredPool, target: str) -> tuple[int, ...]:
    return tuple(len(batch) for batch in pool.subject((target,), (target,)).stream(Setting("iid")))


def labels_of(pool: StoredPool, target: str) -> np.ndarray:
    subject = pool.subject((target,), (target,))
    return subject.labels[torch.as_tensor(np.concatenate(list(subject.stream(Setting("iid")))))].numpy()


def answers_at(pools: Sequence[StoredPool], target: str) -> TargetAnswers:
    """Answers of every training seed to the same images."""
    labels = labels_of(pools[0], target)
    assert all((labels_of(pool, target) == labels).all() for pool in pools)
    both = [logits_of(pool, target) for pool in pools]
    alone, merged = (np.stack([probabilities(part) for part in parts]) for parts in zip(*both, strict=True))
    experts = tuple(name for name in pools[0].names if name != target)
    return TargetAnswers(target, experts, alone, merged, labels, batches_of(pools[0], target))


def evidence_at(answers: TargetAnswers, seed: int, where: str) -> Evidence:
    """Entropy and error of every expert on every batch."""
    logits = torch.from_numpy(answers.alone[seed]).log()
    wrong = (logits.argmax(dim=-1) != torch.from_numpy(answers.labels)).double()
    parts = logits.split(answers.sizes, dim=1)
    columns = [torch.stack([score(part) for part in parts]) for score in (scores.entropy, scores.max_softmax)]
    errors = torch.stack([part.mean(dim=1) for part in wrong.split(answers.sizes, dim=1)])
    return Evidence(
        answers.target, where, answers.experts, *(each.numpy().astype(float) for each in (*columns, errors))
    )


def drift_points(pools: Sequence[StoredPool], answers: TargetAnswers, where: str) -> list[DriftPoint]:
    """One point per target, the mean over training seeds: seeds of one target are no independent points."""
    angles, failures = [], []
    for pool, alone, merged in zip(pools, answers.alone, answers.merged, strict=True):
        pairs = [each for pair, each in pool.about["angles"].items() if answers.target not in pair.split("|")]
        angles.append(mean(pairs))
        right = (alone.argmax(axis=-1) == answers.labels).mean(), (merged.argmax(axis=-1) == answers.labels).mean()
        failures.append(float(right[0] - right[1]))
    name = pools[0].name.split("-")[0]
    return [DriftPoint(DATASETS[name], where, answers.target, 0, mean(angles), mean(failures))]


def measured(pools: Sequence[StoredPool], where: str) -> tuple[dict[str, Any], list[DriftPoint]]:
    """One data set, network and head start."""
    answers = [answers_at(pools, target) for target in pools[0].names]
    cards = {card["name"]: card for card in pools[0].about["cards"]}
    counts = {k: [card["class_counts"].get(each, 0) for each in pools[0].about["classes"]] for k, card in cards.items()}
    evidence = [evidence_at(each, seed, where) for each in answers for seed in range(len(pools))]
    more = [
        each for each in check_scores(evidence) if not each.claim.startswith(QUESTION) and "Spearman" in each.measure
    ]
    points = [point for each in answers for point in drift_points(pools, each, where)]
    found = [*check_theory(answers, counts, where), *more]
    described = {
        "name": where,
        "network": pools[0].about["network"],
        "images": sum(len(each.labels) for each in answers),
    }
    described |= {"parts": asdict(error_parts(answers)), "findings": [asdict(each) for each in found]}
    return described | {"drift": [asdict(point) for point in points]}, points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pools", type=Path, required=True)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    torch.set_num_threads(1)
    paths: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(given.pools.glob("*-*-[0-9].npz")):
        paths[path.stem.rpartition("-")[0]].append(path)
    settings, points = [], list[DriftPoint]()
    for key, own in paths.items():
        name, heads = key.split("-")
        described, more = measured([StoredPool.load(path) for path in own], f"{TITLES[name]}, {heads}")
        settings.append(described)
        points += more
        print(key, len(own), described["parts"], flush=True)
    drift: ClaimFinding = check_drift(points)
    record = {**provenance(), "settings": settings, "drift": asdict(drift)}
    given.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(drift)


if __name__ == "__main__":
    main()
