"""Heads: their initial weights (zero, drawn per site, or fitted on the frozen encoder) and the dropout before them."""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mergestream.networks.architecture import Network, from_architecture
from mergestream.runtime.errors import NetworkError
from mergestream.runtime.seeding import seeded

# How heads start: one seeded head for all sites; one per site, by its size; zero; or the average of the heads that the
# sites fit on the frozen encoder.
DRAWN = {"independent": 1, "independent_large": 3}
HEAD_INITS = ("shared", *DRAWN, "zero", "linear_probe")
PROBE_STEPS, PROBE_DECAY = 200, 1e-4


def zero_head(network: Network) -> None:
    for parameter in head_of(network).parameters():
        nn.init.zeros_(parameter)


def redraw_head(network: Network, seed: int, domain: str, size: int) -> None:
    """Draw a head for this site from its name and the seed, unrelated to any other site's; `size` times as large."""
    with seeded(zlib.crc32(f"{domain}:{seed}".encode())):
        fresh = from_architecture(network.architecture)
    drawn = {name: size * tensor for name, tensor in head_state(fresh).items()}
    network.module.load_state_dict(network.module.state_dict() | drawn)


def head_of(network: Network) -> nn.Module:
    if len(network.head) != 1:
        raise NetworkError(
            f"The head has {len(network.head)} parts, {network.head}; only a head of one part can be initialised."
        )
    return network.module.get_submodule(network.head[0])


def head_state(network: Network) -> dict[str, Tensor]:
    prefixes = tuple(f"{part}." for part in network.head)
    return {name: tensor for name, tensor in network.module.state_dict().items() if name.startswith(prefixes)}


def fit_probe(network: Network, inputs: Iterable[Tensor], labels: Tensor) -> dict[str, Tensor]:
    """Fit a head from zero on the frozen encoder's features of prepared batches [B,c,H,W] and return its weights."""
    features = _features(network, inputs)
    zero_head(network)
    head = head_of(network).train()

    def loss() -> Tensor:
        decay = sum(parameter.square().sum() for parameter in head.parameters())
        return nn.functional.cross_entropy(head(features), labels) + PROBE_DECAY * decay

    minimise(list(head.parameters()), loss, PROBE_STEPS)
    return {name: tensor.detach().cpu().clone() for name, tensor in head_state(network).items()}


def minimise(parameters: Sequence[Tensor], loss: Callable[[], Tensor], steps: int) -> None:
    """Bring a smooth function of a few parameters to its minimum by L-BFGS."""
    optimiser = torch.optim.LBFGS(parameters, max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimiser.step(closure)  # type: ignore[no-untyped-call]


@torch.no_grad()
def _features(network: Network, inputs: Iterable[Tensor]) -> Tensor:
    """Inputs of the head [N,D]."""
    features: list[Tensor] = []
    network.module.eval()
    hook = head_of(network).register_forward_pre_hook(lambda _, inputs: features.append(inputs[0].detach()))
    try:
        for batch in inputs:
            network.module(batch)
    finally:
        hook.remove()
    return torch.cat(features)


@dataclass
class _Dropout:
    """Forward pre-hook that drops a share of the head's inputs."""

    share: float

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return nn.functional.dropout(inputs[0], self.share, module.training), *inputs[1:]


def add_dropout(network: Network, share: float) -> None:
    """Add dropout before the head, unless an earlier fit of the same network already has."""
    head = network.module.get_submodule(network.head[0])
    if share and _Dropout(share) not in head._forward_pre_hooks.values():
        head.register_forward_pre_hook(_Dropout(share))
