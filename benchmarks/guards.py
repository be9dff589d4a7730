"""How often the guard rails speak at home, and on what else they speak: `python benchmarks/guards.py POOL`.

POOL holds experts of the phantom hospitals, as `mergestream demo --out DIR` writes to DIR/pool. Images are of other
patients than those the experts were trained on.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import mergestream as ms
from mergestream.data.datasets import phantom
from mergestream.methods import ORIGINAL
from mergestream.serving.guards.batch_guards import BatchTensors, look_at_batch
from mergestream.serving.guards.findings import CLASS_DRIFT, ENTROPY_DRIFT, GuardSettings
from mergestream.serving.guards.stream_guards import Memory, look_at_stream, remember

SETTINGS = GuardSettings()
SEED = 23  # not 5, 7 or 11: the defaults were set while looking at those patients


@torch.no_grad()
def findings(pool: ms.ExpertPool, batches: Sequence[Tensor], shift: float = 0.0) -> list[set[str]]:
    """Codes by batch. `shift` is added to the answers' first class, as a merge gone wrong would."""
    method, memory, told = ms.create_method("entropy_adaptive", pool), Memory(), []
    for batch in batches:
        images = pool.prepare(batch)
        experts = pool.logits(images, preprocessed=True)
        step = method.step(images, expert_logits={ORIGINAL: experts}, preprocessed=True)
        logits = step.logits.clone()
        logits[:, 0] += shift
        tensors = BatchTensors(images, logits, experts, step.entropy, pool.names, pool.classes)
        memory = remember(memory, tensors, SETTINGS)
        findings = look_at_batch(tensors, SETTINGS) + look_at_stream(memory, tensors, SETTINGS)
        told.append({finding.code for finding in findings})
    return told


def false_alarms(pool: ms.ExpertPool, data: ms.Dataset) -> None:
    for at_home in (True, False):
        for stream, size, most in (("iid", 1, 1000), ("iid", 4, 600), ("iid", 32, 75), ("dirichlet", 32, 75)):
            total, spoke, codes = 0, 0, Counter[str]()
            for name in data.domains:
                labels = data[name].labels
                alpha = {"alpha": 0.05} if stream == "dirichlet" else {}
                order = getattr(ms.streams, stream)(labels, batch_size=size, seed=1, **alpha)
                used = pool if at_home else pool.without(name)
                told = findings(used, [data[name].batch(batch) for batch in order[:most]])
                total, spoke = total + len(told), spoke + sum(map(bool, told))
                codes.update(code for each in told for code in each)
            where = "at home" if at_home else "left out"
            print(f"| {where} | {stream}, batches of {size} | {total} | {spoke} | {dict(codes) or '—'} |", flush=True)


def what_fires(pool: ms.ExpertPool, data: ms.Dataset) -> None:
    home = {name: [data[name].batch(np.arange(i, i + 32)) for i in range(0, 1280, 32)] for name in data.domains}
    random = torch.Generator().manual_seed(0)
    noise = [torch.randint(0, 256, (32, 3, 32, 32), dtype=torch.uint8, generator=random) for _ in range(10)]
    first = pool.names[0]
    print("noise:", [sorted(each) for each in findings(pool, noise[:1])])
    print("noise after 40 batches of home:", [sorted(each) for each in findings(pool, home[first] + noise)[-3:]])
    print("black:", [sorted(each) for each in findings(pool, [torch.zeros_like(noise[0])])])
    print("one head times 100:", [sorted(each) for each in findings(damaged(pool), home[first][:1])])
    print("all called one class:", [sorted(each) for each in findings(pool, home[first][:5], shift=20.0)])
    for before, after in permutations(data.domains, 2):
        told = findings(pool, home[before] + home[after][:20])[40:]
        waited = next((i for i, each in enumerate(told, 1) if each & {ENTROPY_DRIFT, CLASS_DRIFT}), None)
        print(f"{before} -> {after}: drift alarm after {waited or 'more than 20'} batches", flush=True)


def damaged(pool: ms.ExpertPool) -> ms.ExpertPool:
    experts = {name: pool.network([float(k == i) for i in range(len(pool))]) for k, name in enumerate(pool.names)}
    with torch.no_grad():
        for parameter in experts[pool.names[1]].get_submodule(pool.template.head[0]).parameters():
            parameter.mul_(100)
    return ms.ExpertPool.from_modules(experts, classes=pool.classes, preprocessing=pool.preprocessing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pool", type=Path)
    torch.set_num_threads(1)
    pool = ms.ExpertPool.load(parser.parse_args().pool)
    data = phantom.load(images=2400, seed=SEED)
    false_alarms(pool, data)
    what_fires(pool, data)


if __name__ == "__main__":
    main()
