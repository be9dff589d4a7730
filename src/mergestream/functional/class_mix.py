"""The class mix of a stream and the scale of logits, from a model's own answers. Pure functions of fp32 tensors.

Shapes: B images, C classes. `shares` [B] are the weights of images in a mean, as in `scores`; padding has 0.
"""

import torch
from torch import Tensor

ROUNDS = 10
LEAST = 1e-4  # the smallest share of a class
# 1 / (1 + A) of a batch: 0 if the class of each image is drawn independently, 1 if a batch holds one class.
LEAST_CLUMPED, MOST_CLUMPED = 1e-4, 2 / 3
HALF_TRUSTED = 4.0  # after so many images a ratio of spreads has half its weight
LARGEST_RATIO, LEAST_SPREAD = 3.5, 1e-12  # exp(3.5) = 33


def as_mix(values: Tensor) -> Tensor:
    """Class shares [C] that sum to 1 and are never quite 0."""
    values = (values / values.sum()).clamp_min(LEAST)
    return values / values.sum()


def counted(shares: Tensor | None, images: Tensor) -> Tensor:
    """The weight [B] of each of the images [B,...] in a mean."""
    return torch.full((len(images),), 1 / len(images), device=images.device) if shares is None else shares


def between(seen: Tensor, home: Tensor, anchor: float) -> Tensor:
    """The geometric mean of two mixes [C]: the first at anchor 0, the second at 1."""
    return as_mix(seen.log().lerp(home.log(), anchor).exp())


def reweighted(probabilities: Tensor, mix: Tensor, assumed: Tensor) -> Tensor:
    """Posteriors [B,C] under `mix`, of a classifier that answers for the mix `assumed` (Bayes)."""
    joint = probabilities * (mix / assumed)
    return joint / joint.sum(dim=-1, keepdim=True)


def clumped(probabilities: Tensor, usual: Tensor, shares: Tensor) -> Tensor:
    """How much further a batch's answers are from the usual ones [C] than independent images would be: [] up to 1.

    If the batch's own mix is Dirichlet with concentration A around `usual`, the mean of this over batches is
    1 / (1 + A) for every B > 1. One image gives 0. A bias is no clumping: it is in all batches.
    """
    mean = (probabilities * shares[:, None]).sum(dim=0)
    one = (shares**2).sum()  # 1/B
    spread = (usual * (1 - usual)).sum().clamp_min(LEAST_SPREAD)  # 0 where there is one class
    departure = (mean - usual).square().sum() / spread
    return torch.where(one < 1, (departure - one) / (1 - one).clamp_min(LEAST), 0.0)


def concentration(clumping: Tensor) -> Tensor:
    """The concentration A [] of the Dirichlet distribution of the batches' mixes."""
    return 1 / clumping.clamp(LEAST_CLUMPED, MOST_CLUMPED) - 1


def mix_of_batch(
    probabilities: Tensor, assumed: Tensor, expected: Tensor, concentration: Tensor, shares: Tensor
) -> Tensor:
    """The mix [C] of the classes in one batch: expectation-maximisation with a Dirichlet prior around `expected`."""
    images = 1 / (shares**2).sum()
    mix = expected
    for _ in range(ROUNDS):
        mean = (reweighted(probabilities, mix, assumed) * shares[:, None]).sum(dim=0)
        mix = (images * mean + concentration * expected) / (images + concentration)
    return mix


def moments(logits: Tensor, shares: Tensor) -> Tensor:
    """Moments [n,C+2] of logits [n,B,C] over images, for their spread: 1, squares, every class."""
    centred = logits.float() - logits.float().mean(dim=-1, keepdim=True)  # a shift of all classes has no meaning
    means = (centred * shares[:, None]).sum(dim=1)
    squares = ((centred**2).sum(dim=-1) * shares).sum(dim=1)
    return torch.cat([torch.ones_like(squares)[:, None], squares[:, None], means], dim=1)


def scale_between(own: Tensor, others: Tensor) -> Tensor:
    """The factor [] that gives own logits the spread over images that the others have on (geometric) average.

    From sums of moments [1,C+2] and [K,C+2]. It starts at 1, and is 1 if there is no spread to compare.
    """
    images = own[0, 0]
    ratio = (_spread(others).log().mean() - _spread(own)[0].log()) / 2
    trusted = torch.where(images > 1, images / (images + HALF_TRUSTED), 0.0)
    return (trusted * ratio.clamp(-LARGEST_RATIO, LARGEST_RATIO)).exp()


def _spread(sums: Tensor) -> Tensor:
    """The variance over images, all classes together [n]."""
    mean = sums[:, 1:] / sums[:, :1].clamp_min(1.0)
    return (mean[:, 0] - (mean[:, 1:] ** 2).sum(dim=1)).clamp_min(LEAST_SPREAD)
