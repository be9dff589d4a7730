"""Diagonal Fisher information of a network's weights, from its own probabilities: no label is needed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from mergestream.runtime.errors import NetworkError

Answer = Callable[[Mapping[str, Tensor], Tensor, int], Tensor]  # of parameters, a batch, and how many images it is
log = logging.getLogger(__name__)

# At most this many numbers in the gradients of single examples at a time.
GRADIENTS = 1 << 26


def information(answer: Answer, batch: Tensor, parameters: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Sum the information over a batch, by parameter name. The kinds are the keys of FISHERS.

    answer: computes logits [B,C] from parameters and a batch. A parameter that no answer depends on gets zeros.
    """
    with torch.inference_mode(False), torch.enable_grad():
        plain = {name: tensor.clone() if tensor.is_inference() else tensor for name, tensor in parameters.items()}
        weights = {name: tensor.detach().requires_grad_() for name, tensor in plain.items()}
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
    for examples in batch.split(max(1, GRADIENTS // max(1, size))):
        for name, value in _of_examples(answer, examples, weights).items():
            total[name] += value
    return total


def _of_examples(answer: Answer, examples: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    if len(examples) > 1:
        try:
            return _vectorised(answer, examples, weights)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            log.info("Fisher information one example at a time: this network cannot be vectorised (%s).", error)
    return _one_by_one(answer, examples, weights)


def _vectorised(answer: Answer, examples: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    _require_gradient(_log_probabilities(answer, weights, examples[:1]))
    with torch.no_grad():
        probabilities = _log_probabilities(answer, weights, examples).exp()

    def log_p(values: dict[str, Tensor], image: Tensor, label: int) -> Tensor:
        return _log_probabilities(answer, values, image[None], len(examples))[0, label]

    total: dict[str, Tensor] = {}
    plain = {name: tensor.detach() for name, tensor in weights.items()}
    for label in range(probabilities.shape[1]):
        per_example = torch.func.vmap(torch.func.grad(log_p), in_dims=(None, 0, None))
        with sdpa_kernel(SDPBackend.MATH):  # the only attention with a rule for vectorised examples
            by_name = per_example(plain, examples, label)
        for name, gradients in by_name.items():
            share = torch.einsum("b,b...->...", probabilities[:, label], gradients.detach().float().square())
            total[name] = total[name] + share if name in total else share
    return total


def _one_by_one(answer: Answer, examples: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    total = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in weights.items()}
    for image in examples.split(1):
        log_p = _log_probabilities(answer, weights, image)[0]
        for value in log_p:
            for name, gradient in _gradients(value, weights).items():
                total[name] += value.detach().exp() * gradient.square()
    return total


def _log_probabilities(answer: Answer, weights: dict[str, Tensor], batch: Tensor, images: int | None = None) -> Tensor:
    return torch.log_softmax(answer(weights, batch, images or len(batch)).float(), dim=-1)


def _gradients(value: Tensor, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    _require_gradient(value)
    gradients = torch.autograd.grad(value, list(weights.values()), retain_graph=True, materialize_grads=True)
    return {name: gradient.detach().float() for name, gradient in zip(weights, gradients, strict=True)}


def _require_gradient(value: Tensor) -> None:
    if not value.requires_grad:
        raise NetworkError(
            "Fisher information needs gradients, but this network's outputs have none (it runs under no_grad, or "
            "on integers). Choose a method that needs forward passes only."
        )


Kind = Callable[[Answer, Tensor, dict[str, Tensor]], dict[str, Tensor]]
FISHERS: dict[str, Kind] = {"exact": _exact, "mergelm": _mergelm}
