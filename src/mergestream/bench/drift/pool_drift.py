"""The drift of a pool: a record, and its measurement one slice at a time, so that no whole expert is in memory."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from mergestream.bench.drift.layers import COMPONENTS, NetworkLayer, TensorPlace, layers_of, places_by_name, places_of
from mergestream.bench.drift.spread import Moments, Spread, moments_of, pairs_of, spread_of, total
from mergestream.networks.architecture import from_architecture
from mergestream.pool.checkpoint import DTYPES, open_weights
from mergestream.pool.expert_card import BASE, CARD, ExpertCard, require_alike
from mergestream.pool.pool_folder import PoolFolder, read_pool
from mergestream.runtime.errors import CheckpointError, MergestreamError, MissingPathError, unknown_name
from mergestream.runtime.json_record import JsonRecord
from mergestream.runtime.parallel import Advance, Track, quiet

# Numbers in a slice: half a megabyte in float64, so that a pool of twenty experts still needs little memory.
SLICE = 1 << 16
BUFFERS = "Buffers, such as BatchNorm's running statistics, are not weights and are left out."
BY_NAME = (
    "The network cannot be built from its card, so the order of its layers follows their names, and its own buffers "
    "count as weights. For certainty, in Python: analyse_drift(pool, network=YourNetwork(...))."
)


def _slices(path: Path, name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """A tensor of a weights file as float64 vectors of about SLICE numbers, cut along its first dimension."""
    rows = shape[0] if shape else 1
    step = max(1, SLICE // max(1, math.prod(shape[1:])))
    for start in range(0, rows, step):
        yield _read(path, name, shape, slice(start, min(start + step, rows)))


def _read(path: Path, name: str, shape: tuple[int, ...], rows: slice) -> Tensor:
    owner = path.parent.name
    try:
        # Opened anew each time: mapped pages count as this process's memory until the file is closed.
        with safe_open(str(path), framework="pt") as file:
            own_shape = tuple(file.get_slice(name).get_shape())
            if own_shape != shape:
                raise CheckpointError(
                    f"'{owner}': '{name}' has shape {own_shape}, the pool's network needs {shape}. "
                    f"Run 'mergestream pool verify'."
                )
            part = file.get_slice(name)[rows] if shape else file.get_tensor(name)
            numbers = part.reshape(-1).to(torch.float64, copy=True)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"'{owner}': '{name}' cannot be read from {path} ({error}). Run 'mergestream pool verify'."
        ) from error
    if not bool(torch.isfinite(numbers).all()):
        raise CheckpointError(f"'{owner}': '{name}' holds NaN or Inf. Train or export this expert again.")
    return numbers


@dataclass(frozen=True)
class LayerDrift:
    """One layer: all its parameters, its weights and its biases on their own, and its components."""

    name: str
    label: str
    kind: str
    whole: Spread
    weights: Spread | None
    biases: Spread | None
    components: dict[str, Spread]


@dataclass(frozen=True)
class Drift(JsonRecord):
    """Layers in order of depth; arrays over pairs follow `pairs`, arrays over experts follow `experts`."""

    kind = "drift"
    network: str
    experts: tuple[str, ...]
    has_base: bool
    layers: tuple[LayerDrift, ...]
    weights_sha256: dict[str, str]
    notes: tuple[str, ...]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        return [(self.experts[i], self.experts[j]) for i, j in pairs_of(len(self.experts))]

    @property
    def components(self) -> list[str]:
        """The components of this network, in the heat map's order."""
        return [name for name in COMPONENTS if any(name in layer.components for layer in self.layers)]

    def of_kind(self, kind: str) -> list[LayerDrift]:
        return [layer for layer in self.layers if layer.kind == kind]

    def values(self, kind: str, quantity: str) -> list[float]:
        """A quantity of Spread in the layers of one kind where it is defined."""
        values = [getattr(layer.whole, quantity) for layer in self.of_kind(kind)]
        return [value for value in values if value is not None]

    def above(self, part: str, quantity: str, limit: float) -> list[LayerDrift]:
        """Layers where a quantity of `part` (whole, weights or biases) is at least `limit`."""
        return [layer for layer in self.layers if (getattr(getattr(layer, part), quantity, None) or 0) >= limit]

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "pairs": [list(pair) for pair in self.pairs]}


def analyse_drift(
    pool: str | Path, *, network: nn.Module | None = None, without: Collection[str] = (), track: Track = quiet
) -> Drift:
    """Compare every pair of a pool's experts layer by layer, in the memory of a few slices rather than of K models.

    Pass `network` if the experts' architecture is custom: it gives the order of the layers. `without`: experts to leave
    out, such as a target's own.
    """
    folder = read_pool(Path(pool))
    for name in without:
        if name not in folder.cards:
            raise unknown_name(f"expert in {pool}", name, folder.cards)
    folder = replace(folder, cards={name: card for name, card in folder.cards.items() if name not in without})
    cards = list(folder.cards.values())
    if not cards:
        raise MissingPathError(f"No expert in {pool}: a pool is a folder of expert folders, each with {CARD}.")
    require_alike(cards, folder.base)
    places, notes = _places(cards[0], folder, network)
    layers = layers_of(places, cards[0].head)
    on_disk = folder.cards | ({BASE: folder.base} if folder.base else {})
    files = []
    with track("Checking hashes", len(on_disk)) as advance:
        for name, card in on_disk.items():
            files.append(open_weights(folder.root / name, card).path)
            advance()
    experts, base = files[: len(cards)], files[-1] if folder.base else None
    with track("Comparing experts", len(places)) as advance:
        measured = tuple(_measure(layer, experts, base, advance) for layer in layers)
    hashes = {card.name: card.weights_sha256 for card in on_disk.values()}
    return Drift(str(cards[0].architecture), tuple(folder.cards), base is not None, measured, hashes, notes)


def _places(
    card: ExpertCard, folder: PoolFolder, network: nn.Module | None
) -> tuple[list[TensorPlace], tuple[str, ...]]:
    """The pool's parameters in order, and notes on that order."""
    if network is None and card.architecture.library == "custom":
        tensors = open_weights(folder.root / card.name, card).items()
        shapes = ((name, tuple(tensor.shape)) for name, tensor in tensors if tensor.dtype in DTYPES.values())
        return places_by_name(shapes), (BUFFERS, BY_NAME)
    module = network if network is not None else _structure(card)
    return places_of(module, card.head), (BUFFERS,)


def _structure(card: ExpertCard) -> nn.Module:
    """The network without its weights, which would need an expert's memory."""
    try:
        with torch.device("meta"):
            return from_architecture(card.architecture).module
    except (MergestreamError, RuntimeError):  # a network that computes with its weights while it is built
        return from_architecture(card.architecture).module


def _measure(layer: NetworkLayer, experts: Sequence[Path], base: Path | None, advance: Advance) -> LayerDrift:
    tensors: list[tuple[TensorPlace, Moments]] = []
    for place in layer.parts:
        tensors.append((place, _moments(place, experts, base)))
        advance()
    components: dict[str, list[Moments]] = {}
    for place, moments in tensors:
        components.setdefault(layer.component(place), []).append(moments)
    weights = [moments for place, moments in tensors if not place.name.endswith("bias")]
    biases = [moments for place, moments in tensors if place.name.endswith("bias")]
    return LayerDrift(
        layer.name,
        layer.label,
        layer.kind,
        whole=spread_of(total(moments for _, moments in tensors)),
        weights=spread_of(total(weights)) if weights else None,
        biases=spread_of(total(biases)) if biases else None,
        components={name: spread_of(total(parts)) for name, parts in components.items()},
    )


def _moments(place: TensorPlace, experts: Sequence[Path], base: Path | None) -> Moments:
    """Moments of one tensor, summed over slices; the same slice of all experts is in memory at a time."""
    files = [*experts, *([base] if base else [])]
    slices = zip(*(_slices(file, place.name, place.shape) for file in files), strict=True)
    return total(moments_of(torch.stack(rows[: len(experts)]), rows[-1] if base else None) for rows in slices)
