"""Leave-one-domain-out, and one method over one stream."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergestream.datasets.base import DomainData
from mergestream.errors import InputError
from mergestream.methods import ORIGINAL, ExpertLogits, Method
from mergestream.pool import ExpertPool
from mergestream.records import Run, step_record
from mergestream.streams import Stream


@dataclass(frozen=True)
class Fold:
    """One domain held out as the target; the others are the sources."""

    target: str
    sources: tuple[str, ...]


def leave_one_domain_out(domains: Sequence[str]) -> Iterator[Fold]:
    """Every domain in turn as the target."""
    if len(domains) < 2 or len(set(domains)) != len(domains):
        raise InputError(f"Leave-one-domain-out needs at least two distinct domains, got {list(domains)}.")
    for target in domains:
        yield Fold(target, tuple(domain for domain in domains if domain != target))


def evaluate(
    method: Method,
    data: DomainData,
    batches: Stream | Sequence[np.ndarray],
    *,
    expert_logits: ExpertLogits | None = None,
    arguments: dict[str, Any] | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> Run:
    """Stream a domain through a method, from a reset. Labels are used only after the last step, for the metrics.

    `expert_logits` may hold logits [K,N,C] of the whole domain from `precompute`, so that methods share them.
    """
    if len(batches) == 0:
        raise InputError("The stream has no batches.")
    if data.classes != method.pool.classes:
        raise InputError(
            f"The data's classes {data.classes} are not the pool's {method.pool.classes}, in this order. "
            f"Give the pool classes=, or reorder the labels."
        )
    batches = batches if isinstance(batches, Stream) else Stream("given", tuple(map(np.asarray, batches)))
    method.reset()
    steps, answers = [], []
    for number, indices in enumerate(batches):
        picked = torch.as_tensor(indices)
        known = {view: logits[:, picked] for view, logits in (expert_logits or {}).items()}
        step = method.step(data.batch(picked), expert_logits=known)
        steps.append(step_record(number, step, indices))
        answers.append(torch.softmax(step.logits, dim=-1).cpu())
        on_step()
    order = torch.as_tensor(np.concatenate(list(batches)))
    described = describe_run(method, data, batches) if arguments is None else arguments
    return Run.finish(described, data.classes, steps, batches.batches, data.labels[order], torch.cat(answers))


def precompute(pool: ExpertPool, data: DomainData, views: Sequence[str], *, batch_size: int = 128) -> dict[str, Tensor]:
    """Expert logits [K,N,C] of a whole domain, plain and of each view: computed once, used by every method."""
    chunks = torch.arange(len(data)).split(batch_size)

    @torch.no_grad()
    def logits(view: str | None) -> Tensor:
        return torch.cat([pool.logits(data.batch(chunk), view).cpu() for chunk in chunks], dim=1)

    return {ORIGINAL: logits(None), **{view: logits(view) for view in views}}


def describe_run(method: Method, data: DomainData, batches: Stream | Sequence[np.ndarray]) -> dict[str, Any]:
    """Everything a run's numbers depend on; its hash is the run's name."""
    stream = batches if isinstance(batches, Stream) else Stream("given", tuple(map(np.asarray, batches)))
    return {
        "method": method.name,
        "label": method.label(),
        "revision": method.revision,
        "options": method.options(),
        "pool": {"fingerprint": method.identity["pool"], "experts": list(method.pool.names)},
        **{name: value for name, value in method.identity.items() if name in ("base", "statistics", "candidates")},
        "data": {"dataset": data.dataset, "domain": data.name, "fingerprint": data.fingerprint()},
        "stream": {"name": stream.name, "hash": stream.hash, "batches": len(stream)},
    }
