"""Temperature scaling of an expert on its own validation split."""

import torch
from torch import Tensor, nn


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    """Return the temperature tau that minimises the cross-entropy of z / tau on logits [N,C] (Guo et al. 2017)."""
    log_tau = torch.zeros((), requires_grad=True)
    optimiser = torch.optim.LBFGS([log_tau], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(logits / log_tau.exp(), labels)
        loss.backward()
        return loss

    optimiser.step(closure)  # type: ignore[no-untyped-call]
    # A split without a single error would push tau to 0; no expert is trusted that far.
    return float(log_tau.detach().exp().clamp(0.05, 20))
