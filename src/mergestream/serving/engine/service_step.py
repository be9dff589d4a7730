"""One step of the service, from decoded pictures to an outcome.

No lock, no disk: a replay runs the same code.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mergestream.data.intake.pictures import Picture, stack
from mergestream.functional import coefficients as simplex
from mergestream.functional.scores import entropy
from mergestream.methods import ORIGINAL, Batch, Method, Step
from mergestream.pool.expert_pool import ExpertPool, sha256_of_tensor
from mergestream.runtime.files import sha256_of_json
from mergestream.serving.engine.lineup import Lineup
from mergestream.serving.engine.stream_state import StreamState
from mergestream.serving.guards import findings as codes
from mergestream.serving.guards.batch_guards import (
    BatchTensors,
    abstained,
    abstention,
    look_at_batch,
    neighbour_correlation,
)
from mergestream.serving.guards.findings import Finding, GuardSettings
from mergestream.serving.guards.stream_guards import look_at_stream, remember
from mergestream.serving.quality.step_sums import Window
from mergestream.serving.tracing import span

# What the hash of a merged model is taken of: its weights; or, where hashing those takes far longer than the step, all
# that they follow from: pool, method, and its state or a fallback's coefficients. In lines of version 0.1 it may be a
# recipe: pool, method and coefficients.
WEIGHTS, STATE, RECIPE = "weights", "state", "recipe"
MIDDLE = 512  # pixels of a side


class ModelReply(NamedTuple):
    """Who answered, the method or a fallback: logits [B,C], coefficients [K'] and weights [P] of the model."""

    logits: Tensor
    encoder: Tensor | None
    head: Tensor | None
    weights: Tensor | None  # None: no single model


class Outcome(NamedTuple):
    """Result of one batch. `numbers`: the part of its audit line that a replay must compute again."""

    numbers: dict[str, Any]
    logits: Tensor  # the answer [B,C], on the CPU
    graph: int | None  # of the method's step
    state: StreamState  # of the stream after it


class ComputedStep(NamedTuple):
    """A step that was computed and is not in the log yet. `body`: its audit line, which has pictures as hashes only."""

    lineup: Lineup
    outcome: Outcome
    body: dict[str, Any]
    quality: Window  # of the stream after it


@torch.no_grad()
def take_step(
    lineup: Lineup, before: StreamState, pictures: Sequence[Picture], settings: GuardSettings, hashed: str = WEIGHTS
) -> Outcome:
    """Answer one batch of a stream. Nothing is changed: the outcome holds the stream's next state."""
    pool, method = lineup.active, lineup.active_method
    method.state = start = method.start() if before.method is None else before.method
    stacked = _stacked(pictures, pool.device)
    batch = Batch(pool.prepare(stack(pictures, pool.preprocessing, pool.device) if stacked is None else stacked))
    with span("model"):
        step = method.step(batch, with_experts=settings.watch_experts)
        method.settle()  # an answer leaves only after everything that could refuse it
    experts = step.expert_logits
    if experts is not None:
        batch.expert_logits[ORIGINAL] = experts
    evidence = step.entropy if step.entropy is not None or experts is None else entropy(experts)
    received = _structure(pictures, stacked) if settings.as_received else None
    tensors = BatchTensors(batch.images, step.logits, experts, evidence, pool.names, pool.classes, received)
    memory = remember(before.memory, tensors, settings)
    findings = look_at_batch(tensors, settings) + look_at_stream(memory, tensors, settings)
    choice = _fallback_choice(lineup, findings, settings)
    own = method.merged_weights() if choice is None else None  # taken once: they may be a copy
    if choice is None:
        weights = _expert_alone(method, step) if own is None else own
        reply = ModelReply(step.logits, step.encoder_coefficients, step.head_coefficients, weights)
    else:
        reply = _fallback_reply(pool, batch, choice)
        findings.append(_fallback_finding(choice, findings, settings))
    undecided = abstained(tensors, reply.logits, findings, settings)
    reply = reply._replace(logits=reply.logits.cpu())
    # A batch without evidence does not move the averages.
    state = replace(before, method=method.state if choice is None else start, memory=memory)
    more = lineup.options.get("recalibrate_bn") or (choice is None and step.class_shift is not None)
    if (hashed == RECIPE and more) or (hashed == STATE and not method.weights_follow_state):
        hashed = WEIGHTS
    weights_sha256 = _hash(hashed, lineup, reply, None if own is None else state)
    findings += abstention(undecided, len(pictures), settings)
    numbers = {
        "inputs": [_input_of(picture) for picture in pictures],
        **_measured(step, reply, lineup),
        "head_expert": step.head_expert if choice is None else None,
        "weights_sha256": weights_sha256,
        "abstained": list(undecided),
        "abstained_because": list(undecided.values()),
        "fallback": choice,
        "findings": [asdict(finding) for finding in findings],
    }
    return Outcome(numbers, reply.logits, step.graph, state)


def _input_of(picture: Picture) -> dict[str, Any]:
    """A picture in the log: its hashes, and which image of its file it was."""
    hashes = {"sha256": picture.sha256, "pixels_sha256": picture.pixels_sha256}
    return hashes if picture.frame is None else {**hashes, "frame": picture.frame}


def _measured(step: Step, reply: ModelReply, lineup: Lineup) -> dict[str, Any]:
    """The numbers of a batch; those per expert are of all in the pool, switched off or not."""
    lambdas = None if step.lambdas is None else step.lambdas.reshape(len(step.lambdas), -1).mean(dim=1)
    return {
        "entropy": lineup.spread(step.entropy, None),
        "scores": lineup.spread(step.scores, None),
        "consistency": lineup.spread(step.consistency, None),
        "encoder_coefficients": lineup.spread(reply.encoder, 0.0),
        "head_coefficients": lineup.spread(reply.head, 0.0),
        "lambdas": lineup.spread(lambdas, None),
        "class_shift": None if step.class_shift is None else step.class_shift.tolist(),
        "logits_sha256": sha256_of_tensor(reply.logits),
        "predictions": reply.logits.argmax(dim=-1).tolist(),
    }


def _stacked(pictures: Sequence[Picture], device: torch.device) -> Tensor | None:
    """The pixels [B,3,H,W] of pictures of one size, which are prepared together, as in the Python interface."""
    same = len({picture.pixels.shape for picture in pictures}) == 1
    return torch.from_numpy(np.stack([picture.pixels for picture in pictures])).to(device) if same else None


def _structure(pictures: Sequence[Picture], stacked: Tensor | None) -> Tensor:
    """Correlation of neighbouring pixels [B] in the middle of each picture, as it was received."""
    if stacked is None:
        return torch.cat([neighbour_correlation(_middle(torch.from_numpy(each.pixels)[None])) for each in pictures])
    return neighbour_correlation(_middle(stacked))


def _middle(images: Tensor) -> Tensor:
    top, left = (max(0, (side - MIDDLE) // 2) for side in images.shape[-2:])
    return images[..., top : top + MIDDLE, left : left + MIDDLE]


def _fallback_choice(lineup: Lineup, findings: Sequence[Finding], settings: GuardSettings) -> str | None:
    """The fallback that answers instead of the method; None where the method answers."""
    called = any(finding.code in settings.fallback_on for finding in findings)
    if not called or settings.fallback == codes.NO_FALLBACK:
        return None
    named = settings.fallback.removeprefix(codes.EXPERT)
    absent = settings.fallback.startswith(codes.EXPERT) and named not in lineup.active.names
    return codes.ENSEMBLE if absent else settings.fallback


def _fallback_reply(pool: ExpertPool, batch: Batch, choice: str) -> ModelReply:
    if choice == codes.UNIFORM:
        share = simplex.uniform(len(pool), pool.device)
        weights = pool.merge(share)
        return ModelReply(pool.forward(weights, batch.images), share, share, weights)
    logits = pool.logits_of_views(batch)[ORIGINAL]
    if choice == codes.ENSEMBLE:
        return ModelReply(logits.mean(dim=0), None, None, None)
    expert = pool.index(choice.removeprefix(codes.EXPERT))
    share = simplex.one_hot(expert, len(pool), pool.device)
    return ModelReply(logits[expert], share, share, pool.bank[expert])


def _fallback_finding(choice: str, findings: Sequence[Finding], settings: GuardSettings) -> Finding:
    reasons = [finding.code for finding in findings if finding.code in settings.fallback_on]
    who = {codes.UNIFORM: "the plain mean of the experts", codes.ENSEMBLE: "the experts' averaged logits"}
    replaced = f" The safe choice '{settings.fallback}' is switched off." if choice != settings.fallback else ""
    return Finding(
        codes.FALLBACK,
        codes.WARNING,
        f"This batch was answered by {who.get(choice, choice)}, and did not move the stream's averages.{replaced}",
        {"choice": choice, "because": reasons},
    )


def _expert_alone(method: Method, step: Step) -> Tensor | None:
    """The weights [P] of the one expert that answered; None where several did."""
    share = step.encoder_coefficients
    return method.pool.bank[int(share.argmax())] if share is not None and bool(share.max() == 1) else None


def _hash(hashed: str, lineup: Lineup, reply: ModelReply, state: StreamState | None) -> str | None:
    """`state`: what the weights follow from; None for those of a fallback or of one expert."""
    if reply.weights is None:
        return None
    if hashed == STATE and state is not None:
        return _recipe(STATE, lineup, [lineup.identity["provenance"], state.method_sha256])
    if hashed == WEIGHTS or reply.encoder is None or reply.head is None:
        return sha256_of_tensor(reply.weights)
    return _recipe(RECIPE, lineup, [reply.encoder.tolist(), reply.head.tolist()])


def _recipe(kind: str, lineup: Lineup, source: Any) -> str:
    about = {"method": lineup.method, "options": lineup.options, "pool_sha256": lineup.identity["pool_sha256"]}
    return f"{kind}:{sha256_of_json([about, lineup.off, source])}"


def environment(pool: ExpertPool) -> dict[str, Any]:
    """What the last bits of a step depend on, beside its inputs."""
    device, dtype = pool.device, str(pool.bank.dtype).removeprefix("torch.")
    kind = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else ""
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else kind
    name = f"{device.type} ({kind})" if kind else device.type
    return {"device": name, "threads": torch.get_num_threads(), "dtype": dtype}
