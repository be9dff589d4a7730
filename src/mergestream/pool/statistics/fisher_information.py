"""Diagonal Fisher information of a network's weights, from its own probabilities: no label is needed."""

import logging
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import NetworkError

Answer = Callable[..., Tensor]  # logits [B,C] of parameters and a batch; images: how many it stands for, if not B
log = logging.getLogger(__name__)

# At most this many numbers in the gradients of single examples at a time; on a GPU as many as an eighth of its free
# memory holds.
GRADIENTS = 1 << 26


def fisher_information(pool: ExpertPool, expert: int, batch: Tensor, kind: str) -> dict[str, Tensor]:
    """Sums over a prepared batch of one expert's information, by parameter name. The kinds are the keys of FISHERS.

    A parameter that no answer depends on gets zeros.
    """
    pool.passes["backward"] += len(batch) * (len(pool.classes) if kind == "exact" else 1)
    views = pool.layout.views(pool.bank[expert])
    with torch.inference_mode(False), torch.enable_grad():
        parameters = {entry.name: views[entry.name] for entry in pool.layout.parameters}
        plain = {name: tensor.clone() if tensor.is_inference() else tensor for name, tensor in parameters.items()}
        weights = {name: tensor.detach().requires_grad_() for name, tensor in plain.items()}
        answer = partial(pool.logits_with, expert=expert)
        return FISHERS[kind](answer, batch.clone() if batch.is_inference() else batch, weights)


def _mergelm(answer: Answer, batch: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """(d/dtheta sum_{i,c} sqrt(p_ic) log p_ic)^2, one gradient for the whole batch, as published by MergeLM."""
    log_p = _log_probabilities(answer, weights, batch)
    root = log_p.detach().exp().sqrt()
    return {name: gradient.square() for name, gradient in _gradients((root * log_p).sum(), weights).items()}


def _exact(answer: Answer, batch: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """sum_i sum_c p_ic (d log p_ic / dtheta)^2, one gradient per example and class."""
    total = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in weights.items()}
    size = sum(tensor.numel() for tensor in weights.values())
    for examples in batch.split(max(1, _numbers_at_once(batch.device) // max(1, size))):
        add_up(total, _of_examples(answer, examples, weights))
    return total


def _numbers_at_once(device: torch.device) -> int:
    if device.type != "cuda":
        return GRADIENTS
    free, _ = torch.cuda.mem_get_info(device)
    return max(GRADIENTS, free // (8 * 4))


def _of_examples(answer: Answer, examples: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    if len(examples) > 1:
        try:
            return _vectorised(answer, examples, weights)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            log.info("Fisher information one example at a time: this network cannot be vectorised (%s).", error)
    return _one_by_one(answer, examples, weights)


def _vectorised(answer: Answer, examples: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """All examples side by side: one forward pass, then one backward pass per class."""
    require_gradient(_log_probabilities(answer, weights, examples[:1]), "Fisher information")
    plain = {name: tensor.detach() for name, tensor in weights.items()}

    def information(image: Tensor) -> dict[str, Tensor]:
        def log_p(values: dict[str, Tensor]) -> Tensor:
            return _log_probabilities(answer, values, image[None], len(examples))[0]

        log_probabilities, pull_back = torch.func.vjp(log_p, plain)[:2]
        total: dict[str, Tensor] = {}
        for label, one in enumerate(torch.eye(len(log_probabilities), device=image.device)):
            share = log_probabilities[label].exp()
            (gradients,) = pull_back(one)
            add_up(total, {name: own.float().square() * share for name, own in gradients.items()})
        return total

    with sdpa_kernel(SDPBackend.MATH):  # the only attention with a rule for vectorised examples
        by_example = torch.func.vmap(information)(examples)
    return {name: values.sum(dim=0).detach() for name, values in by_example.items()}


def _one_by_one(answer: Answer, examples: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for image in examples.split(1):
        for value in _log_probabilities(answer, weights, image)[0]:
            gradients = _gradients(value, weights)
            add_up(total, {name: value.detach().exp() * own.square() for name, own in gradients.items()})
    return total


def add_up(total: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Add tensors to a running total in place, by name."""
    for name, value in more.items():
        total[name] = total[name].add_(value) if name in total else value


def _log_probabilities(answer: Answer, weights: dict[str, Tensor], batch: Tensor, images: int | None = None) -> Tensor:
    return torch.log_softmax(answer(weights, batch, images=images).float(), dim=-1)


def _gradients(value: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    require_gradient(value, "Fisher information")
    gradients = torch.autograd.grad(value, list(weights.values()), retain_graph=True, materialize_grads=True)
    return {name: gradient.detach().float() for name, gradient in zip(weights, gradients, strict=True)}


def require_gradient(value: Tensor, what: str) -> None:
    if not value.requires_grad:
        raise NetworkError(
            f"{what} needs gradients, but this network's outputs have none (it runs under no_grad, or on integers). "
            f"Choose a method that needs forward passes only."
        )


FISHERS = {"exact": _exact, "mergelm": _mergelm}
