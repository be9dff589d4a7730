"""One expert on disk: its weights, its card `expert.json` and its statistics, tied together by sha-256."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file
from torch import Tensor

from mergestream.pool.expert_card import CARD, ExpertCard, library_versions
from mergestream.pool.model_card import model_card
from mergestream.runtime import files
from mergestream.runtime.errors import CheckpointError, MissingPathError, SignatureError

WEIGHTS, STATISTICS = "weights.safetensors", "statistics.safetensors"
README, SIGNATURE = "README.md", "model.sig"
EXPERT_FILES = (WEIGHTS, CARD, STATISTICS, README)  # all that an expert's folder may hold, beside its signature
STATISTICS_VERSION = 1
PICKLES = (".pt", ".pth", ".bin", ".pkl", ".ckpt")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Mapped pages count as this process's memory until the file is closed, so close it after this many bytes.
REOPEN_AFTER = 32 << 20


def write_expert(folder: Path, state: Mapping[str, Tensor], card: ExpertCard) -> ExpertCard:
    """Write weights and card; an old folder stays until both are on disk."""
    with files.atomic_folder(folder, holds_only_an_expert) as scratch:
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in without_tied(state).items()}
        files.write_atomically(scratch / WEIGHTS, lambda path: save_file(tensors, str(path), metadata={"format": "pt"}))
        sha256 = files.sha256_of_file(scratch / WEIGHTS)
        card = replace(card, weights_sha256=sha256, library_versions=library_versions())
        write_card(scratch, card)
    return card


def write_card(folder: Path, card: ExpertCard) -> None:
    """Write an expert's card for machines and for people. A signature of the old ones is removed."""
    (folder / SIGNATURE).unlink(missing_ok=True)
    files.write_json(folder / CARD, card.to_json())
    files.write_text(folder / README, model_card(card))


def without_tied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep tied tensors under their first name only: a file holds them once."""
    first: dict[Any, str] = {}
    for name, tensor in state.items():
        first.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name, name)
    return {name: state[name] for name in first.values()}


def holds_only_an_expert(path: Path) -> bool:
    return path.is_dir() and files.contains_only(path, {*EXPERT_FILES, SIGNATURE})


def open_weights(folder: Path, card: ExpertCard, signed: Mapping[str, str] | None = None) -> "WeightsFile":
    """Open the weights of an expert folder after checking their hash. `signed`: hashes of the files as signed."""
    path = folder / WEIGHTS
    if not path.is_file():
        pickles = [p.name for p in sorted(folder.glob("*")) if p.suffix in PICKLES]
        if pickles:
            raise CheckpointError(_refuse_pickle(folder / pickles[0]))
        raise CheckpointError(f"{path} is missing. Ask the site for the whole expert folder.")
    if _looks_like_pickle(path):
        raise CheckpointError(_refuse_pickle(path))
    if (files.sha256_of_file(path) if signed is None else signed.get(WEIGHTS)) != card.weights_sha256:
        raise CheckpointError(
            f"{path} does not match the sha-256 in its card: the file is truncated, damaged or changed. "
            f"Ask the site for it again."
        )
    return WeightsFile(path) if signed is None else SignedWeightsFile(path, card.weights_sha256)


class WeightsFile(Mapping[str, Tensor]):
    """A safetensors file as a mapping; only a few tensors' pages are in memory at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None
        self._mapped = 0
        try:
            self._stamp = files.stamp_of(path)
            with safe_open(str(path), framework="pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
                self.metadata = file.metadata() or {}
                self._dtypes = {name: part.get_dtype() for name, part in slices.items()}
                self.shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
                self.numbers = sum(map(math.prod, self.shapes.values()))
        except FileNotFoundError as error:
            raise MissingPathError(f"There is nothing at {path}.") from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a safetensors file ({error}). Ask the site for it again.") from error

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._dtypes:
            raise KeyError(name)
        if self._file is None or self._mapped > REOPEN_AFTER:
            if files.stamp_of(self.path) != self._stamp:
                raise CheckpointError(f"{self.path} was changed or removed while it was in use. Load the pool again.")
            self._file, self._mapped = safe_open(str(self.path), framework="pt"), 0
        tensor: Tensor = self._file.get_tensor(name)
        self._mapped += tensor.nbytes
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._dtypes)

    def __len__(self) -> int:
        return len(self._dtypes)

    def dtypes(self) -> set[torch.dtype]:
        """Floating types in the file, without reading a tensor."""
        return {DTYPES[dtype] for dtype in self._dtypes.values() if dtype in DTYPES}


class SignedWeightsFile(WeightsFile):
    """A safetensors file of which every byte that is used was hashed in memory: nobody can exchange it in between.

    A tensor leaves memory when it is read, so a pass over the file needs the memory of one file.
    """

    def __init__(self, path: Path, sha256: str) -> None:
        self.path, self._sha256 = path, sha256
        self._tensors: dict[str, Tensor] = {}
        content = self._content()
        try:
            header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
            self.metadata = header.pop("__metadata__", {})
            self._dtypes = {name: about["dtype"] for name, about in header.items()}
            self.shapes = {name: tuple(about["shape"]) for name, about in header.items()}
            self.numbers = sum(map(math.prod, self.shapes.values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is not a safetensors file. Ask the site for it again.") from error

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._dtypes:
            raise KeyError(name)
        if name not in self._tensors:
            try:
                self._tensors = load(self._content())
            except SafetensorError as error:
                raise CheckpointError(f"{self.path} is not a safetensors file ({error}).") from error
        return self._tensors.pop(name)

    def _content(self) -> bytes:
        content = self.path.read_bytes() if self.path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != self._sha256:
            raise SignatureError(f"{self.path} was changed after its signature was checked. Load the pool again.")
        return content


def _looks_like_pickle(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:  # of another user: safetensors writes files that only their owner may read
        raise CheckpointError(
            f"{path} cannot be read: {files.error_text(error)}. Give this user access to it."
        ) from error
    return start == b"PK\x03\x04" or (start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05")


def _refuse_pickle(path: Path) -> str:
    return (
        f"{path} is a pickle; unpickling can run code, so only safetensors are read. Convert it where you trust it: "
        f'safetensors.torch.save_file(torch.load("{path.name}", weights_only=True), "{WEIGHTS}").'
    )


@dataclass(frozen=True)
class Statistics:
    """Tensors by 'kind/parameter name', and the number of images per kind. They hold no image.

    Kinds: 'gram' (X^T X / rows of each layer's inputs [groups,in,in]), 'fisher_exact' and 'fisher_mergelm' (shaped
    as the parameter), 'gram_pp-KEY' (Gram matrices of RegMean++, which belong to one pool and one set of options).
    """

    tensors: Mapping[str, Tensor]
    images: Mapping[str, int]

    def of(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one kind by parameter name, read one at a time."""
        for name in sorted(self.names(kind)):
            yield name, self.tensors[f"{kind}/{name}"]

    def names(self, kind: str) -> set[str]:
        return {key.removeprefix(f"{kind}/") for key in self.tensors if key.startswith(f"{kind}/")}

    def with_kind(self, kind: str, tensors: Mapping[str, Tensor], images: int) -> "Statistics":
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
        "schema_version": STATISTICS_VERSION,
        "weights_sha256": card.weights_sha256,
        "images": dict(statistics.images),
    }
    tensors = {key: statistics.tensors[key].detach().cpu().contiguous() for key in statistics.tensors}
    metadata = {"mergestream": json.dumps(about, sort_keys=True)}
    files.write_atomically(folder / STATISTICS, lambda path: save_file(tensors, str(path), metadata=metadata))


def read_statistics(folder: Path, card: ExpertCard, signed: Mapping[str, str] | None = None) -> Statistics | None:
    """Open the statistics in an expert folder; None if it has none. Tensors are read at first use."""
    path = folder / STATISTICS
    if not path.is_file() if signed is None else STATISTICS not in signed:
        return None
    file = WeightsFile(path) if signed is None else SignedWeightsFile(path, signed[STATISTICS])
    try:
        about = dict(json.loads(file.metadata["mergestream"]))
    except (KeyError, TypeError, ValueError, RecursionError):
        about = {}
    if about.get("schema_version") != STATISTICS_VERSION:
        raise CheckpointError(f"{path} has schema_version {about.get('schema_version')!r}, not {STATISTICS_VERSION}.")
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
