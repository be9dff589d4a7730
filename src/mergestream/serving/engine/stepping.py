"""One step of the service, from decoded pictures to an outcome. No lock, no disk: a replay runs the same code."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mergestream.data.intake.pictures import Picture, stack
from mergestream.functional import coefficients as simplex
from mergestream.functional.scores import entropy
from mergestream.methods import Method, Step
from mergestream.methods.entropy_adaptive import EntropyAdaptive
from mergestream.methods.merged_model import MergedModel
from mergestream.pool.expert_pool import ExpertPool, sha256_of_tensor
from mergestream.runtime.files import sha256_of_json
from mergestream.serving.engine.switching import Lineup, MethodState
from mergestream.serving.guards import findings as codes
from mergestream.serving.guards.batch_guards import Seen, abstention, look_at_batch
from mergestream.serving.guards.findings import Finding, GuardSettings
from mergestream.serving.guards.stream_guards import Memory, look_at_stream, remember

WEIGHTS, RECIPE = "weights", "recipe"  # what the merged model's hash is taken of


@dataclass(frozen=True)
class Outcome:
    """What a batch brought. Numbers by expert are of those in use [K']."""

    step: Step  # the method's own, whoever answered in the end
    logits: Tensor  # the answer [B,C], on the CPU
    encoder_coefficients: Tensor | None  # of the model that answered
    head_coefficients: Tensor | None
    head_expert: str | None
    weights_sha256: str | None
    findings: tuple[Finding, ...]
    fallback: str | None
    method_state: MethodState  # to go on with
    memory: Memory


@dataclass(frozen=True)
class _Reply:
    logits: Tensor
    encoder: Tensor | None
    head: Tensor | None
    weights: Tensor | None
    head_expert: str | None = None
    class_shift: Tensor | None = None


@torch.no_grad()
def take_step(
    lineup: Lineup,
    method: Method,
    memory: Memory,
    pictures: Sequence[Picture],
    settings: GuardSettings,
    hashed: str = WEIGHTS,
) -> Outcome:
    """Answer one batch with a method that stands where the stream stands; a refused batch leaves it there."""
    pool, before = lineup.active, method.state_dict()
    images = prepare(pool, pictures)
    try:
        step = method.step(images, with_experts=settings.watch_experts)
        method.settle()  # an answer leaves only after all that could refuse it
        alone = settings.watch_experts and step.expert_logits is None
        experts = pool.logits(images) if alone else step.expert_logits
    except BaseException:
        method.load_state_dict(before)
        raise
    evidence = step.entropy if step.entropy is not None or experts is None else entropy(experts)
    seen = Seen(images, step.logits, experts, evidence, pool.names, pool.classes)
    findings = look_at_batch(seen, settings)
    later = remember(memory, seen, settings)
    findings += look_at_stream(later, seen, settings)
    choice = _safe_choice(lineup, findings, settings)
    if choice is None:
        reply = _Reply(
            step.logits,
            step.encoder_coefficients,
            step.head_coefficients,
            _weights_in_use(method, step),
            step.head_expert,
            step.class_shift,
        )
    else:
        reply = _answer_safely(pool, choice, images, experts)
        method.load_state_dict(before)  # what holds no evidence does not move the averages
        findings.append(_fallback_finding(choice, findings, settings))
    return Outcome(
        step,
        reply.logits.cpu(),
        reply.encoder,
        reply.head,
        reply.head_expert,
        _hash(hashed, lineup, reply),
        (*findings, *abstention(reply.logits, settings)),
        choice,
        method.state_dict()["state"],
        later,
    )


def prepare(pool: ExpertPool, pictures: Sequence[Picture]) -> Tensor:
    """Pictures of any sizes as one batch [B,c,H,W]; those of one size are prepared together, as the Python API does."""
    if len({picture.pixels.shape for picture in pictures}) == 1:
        return pool.prepare(torch.stack([torch.from_numpy(picture.pixels) for picture in pictures]))
    return pool.prepare(stack(pictures, pool.preprocessing, pool.device))


def _safe_choice(lineup: Lineup, findings: Sequence[Finding], settings: GuardSettings) -> str | None:
    """Who answers instead of the method: None where nobody has to."""
    called = any(finding.code in settings.fallback_on for finding in findings)
    if not called or settings.fallback == codes.NO_FALLBACK:
        return None
    named = settings.fallback.removeprefix(codes.EXPERT)
    absent = settings.fallback.startswith(codes.EXPERT) and named not in lineup.active.names
    return codes.ENSEMBLE if absent else settings.fallback


def _answer_safely(pool: ExpertPool, choice: str, images: Tensor, experts: Tensor | None) -> _Reply:
    if choice == codes.UNIFORM:
        share = simplex.uniform(len(pool), pool.device)
        weights = pool.merge(share)
        return _Reply(pool.forward(weights, images), share, share, weights)
    if choice == codes.ENSEMBLE:
        logits = pool.logits(images) if experts is None else experts
        return _Reply(logits.mean(dim=0), None, None, None)
    expert = pool.index(choice.removeprefix(codes.EXPERT))
    logits = pool.expert_logits(expert, images) if experts is None else experts[expert]
    share = simplex.one_hot(expert, len(pool), pool.device)
    return _Reply(logits, share, share, pool.bank[expert])


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


def _weights_in_use(method: Method, step: Step) -> Tensor | None:
    """The flat weights [P] that answered; None where no single network did."""
    if isinstance(method, EntropyAdaptive | MergedModel):
        return method.merged_weights()
    share = step.encoder_coefficients
    return None if share is None else method.pool.bank[int(share.argmax())]  # one expert alone


def _hash(hashed: str, lineup: Lineup, reply: _Reply) -> str | None:
    if reply.weights is None:
        return None
    # A recipe names the weights only where they follow from the coefficients alone.
    follows = reply.class_shift is None and not lineup.options.get("recalibrate_bn")
    if hashed == WEIGHTS or reply.encoder is None or reply.head is None or not follows:
        return sha256_of_tensor(reply.weights)
    shares = [reply.encoder.tolist(), reply.head.tolist()]
    return f"{RECIPE}:{sha256_of_json([lineup.identity, lineup.off, shares])}"


def environment(pool: ExpertPool) -> dict[str, Any]:
    """What decides the bits of a step beside its inputs."""
    return {
        "device": device_name(pool.device),
        "threads": torch.get_num_threads(),
        "dtype": str(pool.bank.dtype).removeprefix("torch."),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda ({torch.cuda.get_device_name(device)})"
    return f"{device.type} ({torch.backends.cpu.get_cpu_capability()})" if device.type == "cpu" else device.type
