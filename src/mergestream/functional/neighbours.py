"""What the other images of a stream say about an image's class. Pure functions of fp32 tensors.

Shapes: B images, C classes. If the classes of a batch are mixed by a Dirichlet distribution with concentration A
around an expected mix, its labels have the correlation rho = 1 / (1 + A). Answers are soft: their variance is a share
r of the labels' (the reliability), so the answers of one batch have the covariance r² rho of labels.
"""

import math

import torch
from torch import Tensor

ROUNDS = 10
GRID = 64  # values of rho
LEAST, MOST = 1e-4, 0.95  # of rho
LEAST_RELIABLE, TINY = 1e-3, 1e-12
LARGEST_ERROR = 10.0  # of rho: nothing is known then


def correlation(estimate: Tensor, error: Tensor, before: float) -> tuple[Tensor, Tensor]:
    """How probable it is that labels are correlated at all [], and rho [] if they are.

    `estimate` of rho has the standard `error`. Before the stream, `before` is the probability of any correlation, and
    if there is one, all values of rho from 0 to 1 are alike.
    """
    estimate, error = estimate.clamp(0.0, 1.0), error.clamp(1e-6, LARGEST_ERROR)
    low, high = -estimate / error, (1 - estimate) / error
    mass = (torch.special.ndtr(high) - torch.special.ndtr(low)).clamp_min(TINY)
    rho = estimate + error * (_density(low) - _density(high)) / mass
    without = -0.5 * low.square() - (error * (2 * torch.pi) ** 0.5).log()  # log-density if there is none
    odds = torch.logit(torch.full_like(mass, before))
    return torch.sigmoid(odds + mass.log() - without), rho.clamp(LEAST, MOST)


def correlation_in_batches(squares: Tensor, freedom: Tensor, ratio: Tensor, before: float) -> tuple[Tensor, Tensor]:
    """How probable it is that the labels of a batch are correlated [], and rho [] if they are.

    `squares` [] is the sum of squared departures of batches' means, in units of what chance explains: chi-squared with
    `freedom` [] degrees of freedom if labels are independent, and 1 + rho * ratio times as large otherwise. `before` as
    in `correlation`.
    """
    rho = (torch.arange(GRID, device=squares.device) + 0.5) / GRID
    larger = torch.log1p(rho * ratio)
    likelihood = 0.5 * (squares * -torch.expm1(-larger) - freedom * larger)  # log, relative to independence
    odds = torch.logit(torch.full_like(squares, before)) + torch.logsumexp(likelihood, dim=0) - math.log(GRID)
    return torch.sigmoid(odds), (torch.softmax(likelihood, dim=0) * rho).sum().clamp(LEAST, MOST)


def _density(values: Tensor) -> Tensor:
    return torch.exp(-0.5 * values.square()) / (2 * torch.pi) ** 0.5


def reliability(variance: Tensor, mix: Tensor) -> Tensor:
    """r []: the variance of answers by class [C] as a share of that of labels mixed by `mix` [C]."""
    return (variance.sum() / (mix * (1 - mix)).sum().clamp_min(TINY)).clamp(LEAST_RELIABLE, 1.0)


def degrees_of_freedom(variance: Tensor) -> Tensor:
    """Of a sum of squares over classes [], from variances [C]: C - 1 where they are alike, 1 where one dominates."""
    alike = variance.sum().square() / variance.square().sum().clamp_min(TINY**2)
    return (alike * (len(variance) - 1) / len(variance)).clamp_min(1.0)


def answers_in_batch(
    probabilities: Tensor, assumed: Tensor, expected: Tensor, concentration: Tensor, present: Tensor
) -> Tensor:
    """Answers [S,B,C] that use the other images of a batch as evidence of its mix, and never the image itself.

    Belief propagation: image j sends image i its class probabilities, computed without the message from i to j. With
    two images it is exact. `assumed` [S,C] is the mix that the answers were made for, `expected` [S,C] what the
    batch's mix varies around; `present` [B] is 1 for an image and 0 for padding. S: sets of answers to one batch.
    """
    likelihood = (probabilities / assumed[:, None]).clamp_min(TINY)[:, None]  # [S,1,B,C]
    images, before = len(present), (concentration * expected)[:, None, None]
    others = present[None, :, None] * (1 - torch.eye(images, device=present.device))[:, :, None]
    messages = _shares(likelihood * expected[:, None, None]) * others  # [S,i,j,C]: from j to i
    for _ in range(ROUNDS):
        to_sender = messages.sum(dim=2)[:, None] - messages.transpose(1, 2)  # [S,i,j,C]: to j from all but i
        messages = _shares(likelihood * (before + to_sender.clamp_min(0.0))) * others
    return _shares(likelihood[:, 0] * (before[:, 0] + messages.sum(dim=2)))


def _shares(joint: Tensor) -> Tensor:
    return joint / joint.sum(dim=-1, keepdim=True)
