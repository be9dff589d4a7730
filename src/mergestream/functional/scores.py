"""Evidence per expert, from logits alone. Pure functions; always fp32; a lower score is better.

Shapes: K experts, B images, C classes, V views.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mergestream.runtime.errors import InputError

LEAST_AGREEMENT = 0.1  # an expert that never agrees with others keeps some weight


def probabilities(logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """p = softmax(z / tau), fp32. logits [K,B,C]; temperature a number or one per expert [K]."""
    tau = temperature.reshape(-1, 1, 1) if isinstance(temperature, Tensor) else temperature
    return torch.softmax(logits.float() / tau, dim=-1)


def entropy(logits: Tensor, temperature: float | Tensor = 1.0, shares: Tensor | None = None) -> Tensor:
    """E_k = mean over x of -sum_c p log p, in nats (Eq. 3). logits [K,B,C] -> [K].

    Here and below `shares` [B] are the weights of images in the mean; they sum to 1, and padding has 0.
    """
    tau = temperature.reshape(-1, 1, 1) if isinstance(temperature, Tensor) else temperature
    log_p = torch.log_softmax(logits.float() / tau, dim=-1)
    p = log_p.exp()
    # Logits further apart than fp32 reaches give log p = -inf, and 0 * -inf is no number.
    terms = torch.where(p > 0, p * log_p, 0).sum(dim=-1)
    return -(terms.mean(dim=-1) if shares is None else (terms * shares).sum(dim=-1))


def image_entropy(logits: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """H_k(x) = -sum_c p log p, in nats. [K,B,C] -> [K,B]."""
    return torch.special.entr(probabilities(logits, temperature)).sum(dim=-1)


def divergence(logits: Tensor, temperature: float | Tensor = 1.0, shares: Tensor | None = None) -> Tensor:
    """Mean over x of the Jensen-Shannon divergence between p_k and the experts' mean p, in nats. [K,B,C] -> [K]."""
    own = probabilities(logits, temperature)
    common = own.mean(dim=0, keepdim=True)
    between = torch.special.entr((own + common) / 2).sum(dim=-1)
    within = (torch.special.entr(own).sum(dim=-1) + torch.special.entr(common).sum(dim=-1)) / 2
    return _mean((between - within).clamp_min(0.0), shares)


def max_softmax(logits: Tensor, temperature: float | Tensor = 1.0, shares: Tensor | None = None) -> Tensor:
    """1 - mean over x of max_c p: the maximum softmax reversed, so that lower is better. [K,B,C] -> [K]."""
    return 1 - _mean(probabilities(logits, temperature).amax(dim=-1), shares)


def entropy_agreement(logits: Tensor, temperature: float | Tensor = 1.0, shares: Tensor | None = None) -> Tensor:
    """E_k / A_k^4, where A_k is how often other experts predict the same class as expert k. [K,B,C] -> [K].

    An expert that is certain and alone gets a worse score. Two experts agree equally often, so their entropy decides;
    A_k does not depend on the scale of logits.
    """
    own = entropy(logits, temperature, shares)
    if len(logits) == 1:
        return own
    predictions = logits.argmax(dim=-1)
    alike = _mean((predictions[:, None] == predictions[None]).float(), shares)  # [K,K]
    agreement = (alike.sum(dim=1) - alike.diagonal()) / (len(predictions) - 1)
    return own / agreement.clamp_min(LEAST_AGREEMENT) ** 4


def consistency(original: Tensor, views: Tensor, shares: Tensor | None = None) -> Tensor:
    """C_k in [0,1] = mean over x and v of 1 - TV(p_k(x), p_k(v(x))). [K,B,C], [V,K,B,C] -> [K]."""
    total_variation = (views - original).abs().sum(dim=-1) / 2
    agreement = 1 - total_variation
    return agreement.mean(dim=(0, 2)) if shares is None else _mean(agreement.mean(dim=0), shares)


def require_finite(logits: Tensor, owner: str) -> Tensor:
    """Return logits [B,C] or images [B,...]; refuse non-finite ones with the position of the image."""
    finite = finite_images(logits)
    if bool(finite.all()):
        return logits
    raise not_finite(owner, (~finite).nonzero().flatten().tolist())


def finite_images(values: Tensor) -> Tensor:
    """Which images [B] have only finite values [B,...]; the result stays on the device."""
    return torch.linalg.vector_norm(values.flatten(1), ord=torch.inf, dim=-1) < torch.inf


def not_finite(owner: str, images: list[int], batch: str = "this batch") -> InputError:
    return InputError(
        f"{owner} gave NaN or Inf for image {images[0]} of {batch} ({len(images)} in all). "
        f"Check that image; weights in a narrow type may also overflow: load the pool with dtype=torch.float32."
    )


Score = Callable[[Tensor, float | Tensor, Tensor | None], Tensor]
SCORES: dict[str, Score] = {"entropy": entropy, "max_softmax": max_softmax, "entropy_agreement": entropy_agreement}


def _mean(values: Tensor, shares: Tensor | None) -> Tensor:
    """[..., B] -> [...]."""
    return values.mean(dim=-1) if shares is None else (values * shares).sum(dim=-1)
