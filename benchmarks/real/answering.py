"""Methods on streams of one target, fast: the experts' logits are computed once, answers stay on the device."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mergestream.bench.evaluation import CPU_CHUNK, GPU_CHUNK
from mergestream.data.datasets import DomainData
from mergestream.data.stream import Stream
from mergestream.data.streams import create_stream
from mergestream.methods import ORIGINAL, Method
from mergestream.pool.expert_pool import ExpertPool


@dataclass(frozen=True)
class TargetData:
    """One target, or several streamed together: images on the device, what is resampled together in `units`."""

    name: str
    classes: tuple[str, ...]
    images: Tensor  # uint8 [N,3,H,W]
    labels: np.ndarray  # [N]
    units: np.ndarray  # [N]: slide or patient where the data say so, else every image for itself
    domains: tuple[str, ...]  # of every image

    @classmethod
    def of(cls, parts: Sequence[DomainData], device: str) -> "TargetData":
        groups = [
            f"{part.name}/{group}"
            for part in parts
            for group in (part.groups if part.groups is not None else range(len(part)))
        ]
        return cls(
            "+".join(part.name for part in parts),
            parts[0].classes,
            torch.cat([part.batch(torch.arange(len(part))).to(device) for part in parts]),
            np.concatenate([part.labels.numpy() for part in parts]),
            np.unique(groups, return_inverse=True)[1],
            tuple(part.name for part in parts for _ in range(len(part))),
        )

    def __len__(self) -> int:
        return len(self.labels)

    def some(self, count: int) -> "TargetData":
        """At most so many images, always the same ones."""
        if count >= len(self):
            return self
        chosen = np.sort(np.random.RandomState(0).permutation(len(self))[:count])
        images = self.images[torch.from_numpy(chosen).to(self.images.device)]
        units = np.unique(self.units[chosen], return_inverse=True)[1]
        domains = tuple(self.domains[i] for i in chosen)
        return TargetData(self.name, self.classes, images, self.labels[chosen], units, domains)

    def stream(self, spec: str, *, batch_size: int, seed: int) -> Stream:
        several = self.domains if len(set(self.domains)) > 1 else None
        return create_stream(spec, self.labels, batch_size=batch_size, seed=seed, domains=several)


class KnownLogits:
    """Every expert's logits [K,N,C] of a target by view, computed when first asked for, kept on the device."""

    def __init__(self, pool: ExpertPool, images: Tensor, chunk: int | None = None) -> None:
        self._pool, self._images, self._known = pool, images, dict[str, Tensor]()
        self._chunk = chunk or (GPU_CHUNK if pool.device.type == "cuda" else CPU_CHUNK)

    @torch.no_grad()
    def of(self, view: str) -> Tensor:
        if view not in self._known:
            shown = None if view == ORIGINAL else view
            parts = [self._pool.logits(images, shown) for images in self._images.split(self._chunk)]
            self._known[view] = torch.cat(parts, dim=1)
        return self._known[view]

    def for_method(self, method: Method) -> dict[str, Tensor]:
        return {view: self.of(view) for view in (ORIGINAL, *method.options().get("views", ()))}

    def said(self) -> Tensor:
        """The experts' own answers [K,N]."""
        return self.of(ORIGINAL).argmax(dim=-1)


@dataclass(frozen=True)
class Answers:
    """Logits [N,C] in the order of the data, and how long they took."""

    logits: Tensor
    seconds: float


def answer(method: Method, images: Tensor, known: dict[str, Tensor], batches: Stream) -> Answers:
    """A method over a stream from a reset; nothing is read back to the host before the last batch."""
    began = time.perf_counter()
    method.reset()
    order = torch.from_numpy(np.concatenate(list(batches))).to(images.device)
    sizes = [len(batch) for batch in batches]
    arriving = images[order].split(sizes)
    logits = {view: values[:, order].split(sizes, dim=1) for view, values in known.items()}
    parts = []
    for number, batch in enumerate(arriving):
        step = method.step(batch, expert_logits={view: values[number] for view, values in logits.items()})
        parts.append(step.logits)
    method.settle()
    arrived = torch.cat(parts)
    answered = torch.empty_like(arrived)
    answered[order] = arrived
    return Answers(answered, time.perf_counter() - began)
