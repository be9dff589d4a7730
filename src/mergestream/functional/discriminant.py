"""Fit a linear discriminant to softly labelled features, from sums over a stream. Pure functions of fp32 tensors.

Shapes: B images, D features, C classes. Every class is a Gaussian; all share one covariance. Products only, no
factorisation, so that a CUDA graph can hold them.
"""

from torch import Tensor

from mergestream.functional.head_fit import TINY, conjugate_gradients

IMAGES_AT_MIDDLE = 4.0  # how many images at the common mean each class starts with
IMAGES_AT_START = 32.0  # how many images, alike in all directions, the covariance starts with
LEAST_RIDGE = 0.1  # of the mean variance of a feature
LEAST_SHARE = 1e-4  # of a class
ROUNDS = 6  # enough from the last fit on: 16 change no accuracy by 0.1 points (docs/log/experiments.md)


def discriminant(sums: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
    """Weight [C,D] and bias [C] of the classes' log-posteriors, up to a constant.

    From `sums` [1+D,1+D+C] of products of 1 and the features with each other and with the labels, as `head_fit.sums`
    has them. `guess` [C,D] is where the search for the weight begins: the weight of the last fit.
    """
    features = guess.shape[1]
    images = sums[0, 0].clamp_min(1.0)
    middle, counts = sums[0, 1 : 1 + features] / images, sums[0, 1 + features :]
    means = (sums[1:, 1 + features :].T + IMAGES_AT_MIDDLE * middle) / (counts + IMAGES_AT_MIDDLE)[:, None]
    away = means - middle  # [C,D]
    covariance = sums[1:, 1 : 1 + features] / images - middle[:, None] * middle
    covariance = covariance - (away.T * (counts / images)) @ away
    ridge = (LEAST_RIDGE + IMAGES_AT_START / images) * covariance.diagonal().mean().clamp_min(TINY)
    weight = conjugate_gradients(covariance, ridge, away, guess, ROUNDS)
    shares = (counts / counts.sum().clamp_min(TINY)).clamp_min(LEAST_SHARE)
    return weight, shares.log() - 0.5 * (weight * away).sum(dim=1) - weight @ middle
