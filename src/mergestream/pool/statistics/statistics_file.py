"""Statistics of one expert, and their file `statistics.safetensors` beside its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from mergestream.pool.checkpoint import STATISTICS, WeightsFile
from mergestream.pool.expert_card import ExpertCard
from mergestream.runtime.errors import CheckpointError
from mergestream.runtime.files import write_atomically

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Statistics:
    """Tensors by 'kind/parameter name', and the number of images per kind. They hold no image.

    Kinds: 'gram' (X^T X / rows of each layer's inputs [groups,in,in]), 'fisher_exact' and 'fisher_mergelm' (shaped
    as the parameter), 'gram_pp-KEY' (Gram matrices of RegMean++, which belong to one pool and one set of options).
    """

    tensors: Mapping[str, Tensor]
    images: Mapping[str, int]

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(self.images)

    def of(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one kind by parameter name, read one at a time."""
        for key in sorted(self.tensors):
            if key.startswith(f"{kind}/"):
                yield key.removeprefix(f"{kind}/"), self.tensors[key]

    def names(self, kind: str) -> set[str]:
        return {key.removeprefix(f"{kind}/") for key in self.tensors if key.startswith(f"{kind}/")}

    def with_kind(self, kind: str, tensors: Mapping[str, Tensor], images: int) -> Statistics:
        others = {key: self.tensors[key] for key in self.tensors if not key.startswith(f"{kind}/")}
        return Statistics(
            {**others, **{f"{kind}/{name}": tensor for name, tensor in tensors.items()}}, {**self.images, kind: images}
        )

    def fingerprint(self, kind: str) -> str:
        digest = hashlib.sha256(f"{kind}:{self.images.get(kind)}".encode())
        for name, tensor in self.of(kind):
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def write_statistics(folder: Path, statistics: Statistics, card: ExpertCard) -> None:
    """Write statistics beside an expert's weights; the hash of the weights ties both together."""
    about = {
        "schema_version": SCHEMA_VERSION,
        "weights_sha256": card.weights_sha256,
        "images": dict(statistics.images),
    }
    tensors = {key: statistics.tensors[key].detach().cpu().contiguous() for key in statistics.tensors}
    metadata = {"mergestream": json.dumps(about, sort_keys=True)}
    write_atomically(folder / STATISTICS, lambda path: save_file(tensors, str(path), metadata=metadata))


def read_statistics(folder: Path, card: ExpertCard) -> Statistics | None:
    """Open the statistics in an expert folder; None if it has none. Tensors are read at first use."""
    path = folder / STATISTICS
    if not path.is_file():
        return None
    file = WeightsFile(path)
    about = _about(path)
    if about.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointError(f"{path} has schema_version {about.get('schema_version')!r}, not {SCHEMA_VERSION}.")
    if about.get("weights_sha256") != card.weights_sha256:
        raise CheckpointError(
            f"{path} was measured with other weights than those of '{card.name}'. Measure it again at that site, "
            f"or remove the file: only fisher, regmean and regmean_pp need it."
        )
    images = about.get("images")
    kinds = {key.split("/")[0] for key in file}
    if not isinstance(images, dict) or set(images) != kinds or not all(type(n) is int for n in images.values()):
        raise CheckpointError(f"{path} does not say how many images its statistics are from: {images!r}.")
    return Statistics(file, images)


def _about(path: Path) -> dict[str, Any]:
    with safe_open(str(path), framework="pt") as file:
        text = (file.metadata() or {}).get("mergestream", "{}")
    try:
        about = json.loads(text)
    except json.JSONDecodeError:
        about = None
    return about if isinstance(about, dict) else {}
