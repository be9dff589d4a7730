"""A stand-in of OrganA, OrganC and OrganSMNIST: three .npz files, smaller than their names say."""

from pathlib import Path
from typing import Any

import numpy as np

from mergestream.data.datasets import organ_mnist
from mergestream.data.datasets.standins.fake_medimeta import grey

EACH = {"train": 2, "val": 1, "test": 2}  # images per class


def write_organ_mnist(folder: Path, resolution: int = 224, pixels: int = 24) -> None:
    """Labels uint8 [N,1], as published; classes in no order."""
    folder.mkdir(parents=True, exist_ok=True)
    for domain, stem in organ_mnist.STEMS.items():
        arrays: dict[str, Any] = {}
        for first, (part, each) in zip((0, 10, 20), EACH.items(), strict=True):
            order = [(label, first + n) for n in range(each) for label in range(len(organ_mnist.CARD.classes))][::-1]
            images = [grey(domain, label, number, pixels) for label, number in order]
            arrays[f"{part}_images"] = np.stack(images)
            arrays[f"{part}_labels"] = np.array([[label] for label, _ in order], dtype=np.uint8)
        np.savez_compressed(folder / f"{stem}{organ_mnist.SUFFIXES[resolution]}.npz", **arrays)
