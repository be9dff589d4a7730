"""Leave-one-domain-out, and one method over one stream: a run that was killed goes on where it was."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergestream.bench.records import Run, StepLines, step_record
from mergestream.data.datasets.domain_data import DomainData
from mergestream.data.streams import Stream
from mergestream.methods import ORIGINAL, ExpertLogits, Method, Step
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.runner import Batch
from mergestream.runtime.errors import InputError, MergestreamError, some
from mergestream.runtime.files import sha256_of_json
from mergestream.runtime.state_file import SavedState

# Images of one forward over a whole domain: a GPU would wait for the host with fewer.
CPU_CHUNK, GPU_CHUNK = 128, 512


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
    partial: SavedState | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> Run:
    """Stream a domain through a method, from a reset. Labels are used only after the last step, for the metrics.

    `expert_logits` may hold the whole domain's `domain_logits` [K,N,C] by view, so that methods share them.
    With `partial` a run that was killed goes on where it was last written down.
    """
    require_same_classes(data.classes, method.pool, hint="Give the pool classes=, or reorder the labels.")
    batches = batches if isinstance(batches, Stream) else Stream("given", tuple(map(np.asarray, batches)))
    _require_fitting(batches, data)
    method.reset()
    logits_of = expert_logits or {}
    steps, answers = _restore(method, partial.load()) if partial else (StepLines(), [])
    if method.looks_ahead and not len(steps):
        whole = logits_of.get(ORIGINAL)
        whole = domain_logits(method.pool, data, ORIGINAL) if whole is None else whole
        method.look_ahead(Batch(torch.empty(whole.shape[1], 0), {ORIGINAL: whole}))
    left = range(len(steps), len(batches))
    for number in left:
        step = _timed_step(method, data, batches[number], logits_of)
        steps.append(step_record(number, step, batches[number]))
        answers.append(torch.softmax(step.logits, dim=-1).cpu())
        if partial:
            partial.save_if_due(
                lambda: {
                    "probabilities": torch.cat(answers),
                    "steps": steps.to_tensor(),
                    "state": method.state_dict()["state"],
                }
            )
        on_step()
    return Run.finish(
        describe_run(method, data, batches) if arguments is None else arguments,
        data.classes,
        steps,
        batches.batches,
        data.labels[torch.as_tensor(np.concatenate(list(batches)))],
        torch.cat(answers),
        **arrivals(data, batches, logits_of),
    )


def require_same_classes(classes: Sequence[str], pool: ExpertPool, name: str = "the pool", hint: str = "") -> None:
    """Refuse data whose classes are not the pool's, in their order."""
    if tuple(classes) != pool.classes:
        raise InputError(
            f"The data's classes, {some(classes)}, are not those of {name}, {some(pool.classes)}, in this order. "
            f"{hint}".rstrip()
        )


def _timed_step(method: Method, data: DomainData, indices: np.ndarray, expert_logits: ExpertLogits) -> Step:
    picked = torch.as_tensor(indices)
    images = data.batch(picked).to(method.pool.device)
    batch_logits = {view: logits[:, picked] for view, logits in expert_logits.items()}
    began = time.perf_counter()
    step = method.step(images, expert_logits=batch_logits)
    method.settle()  # a batch that is refused is not written down
    # A captured step comes back before the device is done with it.
    return replace(step, seconds=max(step.seconds, time.perf_counter() - began))


def arrivals(data: DomainData, stream: Stream, logits: ExpertLogits) -> dict[str, Any]:
    """What a run reports beside its answers, in order of arrival: subgroups, the experts' predictions, and groups."""
    order = torch.as_tensor(np.concatenate(list(stream)))
    # Of patients and slides a run says only their numbers, in the order of their names.
    groups = None if data.groups is None else np.unique(np.asarray(data.groups, dtype=str), return_inverse=True)[1]
    return {
        "subgroups": {kind: [values[i] for i in order.tolist()] for kind, values in data.subgroups.items()},
        "experts": logits[ORIGINAL].argmax(dim=-1)[:, order] if ORIGINAL in logits else None,
        "groups": None if groups is None else torch.from_numpy(groups)[order],
    }


def _restore(method: Method, stored: Any) -> tuple[StepLines, list[Tensor]]:
    """Restore saved steps and state; start afresh if the file is damaged."""
    try:
        method.load_state_dict({**method.provenance, "state": stored["state"]})
        steps = StepLines.from_tensor(stored["steps"])
        return steps, list(stored["probabilities"].split([step["images"] for step in steps]))
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, MergestreamError):
        method.reset()
        return StepLines(), []


def _require_fitting(stream: Stream, data: DomainData) -> None:
    """Every index names a sample of these data, and none twice, unless the stream repeats samples on purpose."""
    if len(stream) == 0 or not all(len(batch) for batch in stream):
        raise InputError("The stream has no batches, or an empty one.")
    indices = np.concatenate(list(stream))
    if (len(indices) > len(data) and not stream.repeats) or indices.min() < 0 or indices.max() >= len(data):
        raise InputError(
            f"The stream '{stream.name}' is longer than the data: it names {len(indices)} samples, up to number "
            f"{indices.max()}, and '{data.name}' has {len(data)}. Make the stream from these data's labels."
        )
    if not stream.repeats and len(np.unique(indices)) != len(indices):
        raise InputError(f"The stream '{stream.name}' names a sample of '{data.name}' twice.")


@torch.no_grad()
def domain_logits(pool: ExpertPool, data: DomainData, view: str) -> Tensor:
    """Expert logits [K,N,C] of a whole domain, in one view of it or as it is ('original')."""
    shown = None if view == ORIGINAL else view
    chunks = torch.arange(len(data)).split(GPU_CHUNK if pool.device.type == "cuda" else CPU_CHUNK)
    return torch.cat([pool.logits(data.batch(chunk).to(pool.device), shown).cpu() for chunk in chunks], dim=1)


def describe_run(method: Method, data: DomainData, stream: Stream) -> dict[str, Any]:
    """Everything a run's numbers depend on; its hash is the run's name."""
    described = {"dataset": data.dataset, "domain": data.name, "fingerprint": data.fingerprint()}
    if data.subgroups:
        # A run reports its subgroups' metrics, so another partition of the same images is another run.
        described["subgroups"] = sha256_of_json({kind: list(values) for kind, values in data.subgroups.items()})
    streamed: dict[str, Any] = {"name": stream.name, "hash": stream.hash, "batches": len(stream)}
    if stream.repeats:
        streamed["repeats"] = True
    if stream.lone is not None:
        streamed["lone"] = data.classes[stream.lone]
    return {
        **method.provenance,
        "label": method.label(),
        "pool": {"fingerprint": method.provenance["pool"], "experts": list(method.pool.names)},
        "data": described,
        "stream": streamed,
    }
