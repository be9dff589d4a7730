"""Print the table of docs/quality.md, estimated against true accuracy: python scripts/estimated_quality.py DEMO

DEMO is a folder that `mergestream demo` wrote; its experts of seed 0 answer images of each phantom hospital.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

import mergestream as ms
from mergestream.functional import label_free
from mergestream.serving.engine.lineup import Lineup
from mergestream.serving.quality.quality_monitor import QualityMonitor, QualitySettings
from mergestream.serving.quality.step_sums import Window, total_of, with_step
from mergestream.training.training_loop import split_of

IMAGES, BATCH, COVERAGE = 600, 32, 0.9


def measure(pool: ms.ExpertPool, method: str, options: dict[str, Any], images: Tensor, labels: Tensor) -> str:
    """Cells of a row: true accuracy, both estimates, coverage and size of sets, with the true class shares declared."""
    shares = np.bincount(labels.numpy(), minlength=len(pool.classes)) / len(labels)
    monitor = QualityMonitor(QualitySettings(dict(zip(pool.classes, shares.tolist(), strict=True)), COVERAGE), pool)
    lineup, stepper = Lineup(pool, method, options), ms.create_method(method, pool, **options)
    order = np.random.default_rng(0).permutation(len(labels))[:IMAGES]
    window: Window = ()
    right = held = size = 0
    for part in np.array_split(order, max(1, len(order) // BATCH)):
        step = stepper.step(images[part])
        given = {name: getattr(step, name) for name in ("head_coefficients", "encoder_coefficients")}
        numbers = {name: None if value is None else value.tolist() for name, value in given.items()}
        sums, sets = monitor.measure(lineup, {**numbers, "fallback": None}, step.logits, window)
        window = with_step(window, sums)
        right += int((step.logits.argmax(dim=1) == labels[part]).sum())
        held += sum(label in chosen for label, chosen in zip(labels[part].tolist(), sets or [], strict=True))
        size += sum(map(len, sets or []))
    total = total_of(window)
    assert total is not None
    value, low, high = label_free.expected_accuracy(total.confidence, total.variance, total.images)
    by_threshold = "–" if total.sure is None else f"{total.sure / total.images:.1%}"
    by_confidence = f"{value:.1%} ({100 * low:.1f} to {100 * high:.1f})"
    count = len(order)
    return f"{right / count:.1%} | {by_confidence} | {by_threshold} | {held / count:.1%} ({size / count:.2f})"


def main(demo: Path) -> None:
    pool, dataset = ms.ExpertPool.load(demo / "pool"), ms.load_dataset("phantom", images=1000)
    alone = {name: pool.without(*(other for other in pool.names if other != name)) for name in pool.names}
    print("| images of | answers by | true accuracy | by confidence | by threshold | sets hold the truth (mean size) |")
    print("|---|---|---:|---:|---:|---:|")
    for target in dataset.domains:
        data = dataset[target]
        _, validation = split_of(data, pool.cards[pool.index(target)].recipe)
        at_home = (data.images[validation], data.labels[validation])
        print(f"| {target} | its own expert | {measure(alone[target], 'mean', {}, *at_home)} |")
        for other in (name for name in pool.names if name != target):
            print(f"| {target} | expert of {other} | {measure(alone[other], 'mean', {}, data.images, data.labels)} |")
        for method in ("entropy_adaptive", "merge_and_fit"):
            row = measure(pool.without(target), method, {}, data.images, data.labels)
            print(f"| {target} | `{method}` of the other three | {row} |", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
