"""One expert's weights, read and run on noise images: do they fit, and how confident are their answers?"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mergestream.functional.scores import require_finite
from mergestream.networks.architecture import logits_of
from mergestream.networks.flat_layout import Layout
from mergestream.networks.preprocessing import Preprocessing
from mergestream.pool.checkpoint import open_weights
from mergestream.pool.expert_card import ExpertCard
from mergestream.pool.parts import require_classes
from mergestream.runtime.errors import CheckpointError

PROBES = 16


@dataclass(frozen=True)
class ProbeResult:
    """The norm of an expert's head, and the lead of its first answer on noise; None where it cannot run."""

    head_norm: float
    lead: float | None = None


class NoiseProbe:
    """Reads experts of one architecture, one at a time: a large pool needs the memory of one expert only."""

    def __init__(self, card: ExpertCard, folder: Path) -> None:
        """card, folder: the expert to compare with, where the network cannot be built by name."""
        self._head = tuple(f"{part}." for part in card.head)
        self._network = None if card.architecture.library == "custom" else card.network()
        self._layout = Layout.of(self._network.module, card.head) if self._network else None
        self._shapes = None if self._network else _shapes(open_weights(folder, card))
        preprocessing = card.preprocessing if self._network else None
        self._probes = None if preprocessing is None else probes(preprocessing)
        if self._network:
            require_classes(card.classes, self._network)

    def read(self, folder: Path, card: ExpertCard) -> ProbeResult:
        """Run one expert; refuse weights that are damaged, do not fit the network, or are not finite."""
        state, owner = open_weights(folder, card), f"Expert '{card.name}'"
        if self._layout is None:
            return ProbeResult(self._read_unbuilt(state, owner))
        row = torch.empty(self._layout.size, dtype=torch.float32)
        integers = self._layout.write_row(state, row, owner)
        norm = float(row[self._layout.encoder_size :].norm())
        if self._probes is None:
            return ProbeResult(norm)
        assert self._network is not None
        module = self._layout.attach(self._network.module, row, integers).eval()
        try:
            with torch.no_grad():
                logits = logits_of(module(self._probes)).float()
        except (RuntimeError, ValueError, AssertionError) as error:
            size = tuple(self._probes.shape[2:])
            message = str(error).split("\n")[0]
            raise CheckpointError(f"{owner} cannot take images of its own size {size}: {message}") from error
        return ProbeResult(norm, mean_lead(require_finite(logits, owner)))

    def _read_unbuilt(self, state: Mapping[str, Tensor], owner: str) -> float:
        assert self._shapes is not None
        if _shapes(state) != self._shapes:
            odd = sorted(set(_shapes(state).items()) ^ set(self._shapes.items()))[0][0]
            raise CheckpointError(f"{owner} is not built as the pool's other experts: they differ at '{odd}'.")
        squares = 0.0
        for name in state:
            tensor = state[name]
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(f"{owner}: '{name}' holds NaN or Inf. Train or export this expert again.")
            squares += float(tensor.float().square().sum()) if name.startswith(self._head) else 0.0
        return squares**0.5


def probes(preprocessing: Preprocessing) -> Tensor:
    """The same noise images [16,c,H,W] every time: half white noise, half soft clouds."""
    generator = torch.Generator().manual_seed(0)
    channels, size = len(preprocessing.mean), preprocessing.size
    white = torch.rand((PROBES // 2, channels, *size), generator=generator)
    coarse = torch.rand((PROBES // 2, channels, 4, 4), generator=generator)
    clouds = torch.nn.functional.interpolate(coarse, size, mode="bilinear", align_corners=False)
    return preprocessing((torch.cat([white, clouds]) * 255).to(torch.uint8))


def mean_lead(logits: Tensor) -> float:
    """Mean lead of the largest logit over the mean of the others, for logits [B,C]."""
    if logits.shape[-1] < 2:
        return 0.0
    first = logits.amax(dim=-1)
    others = (logits.sum(dim=-1) - first) / (logits.shape[-1] - 1)
    return float((first - others).mean())


def _shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(state[name].shape) for name in state}
