"""Votes of experts that know only some of the classes. Pure functions of fp32 tensors.

Shapes: K experts, B images, C classes. `seen` [K,C] says which expert saw which class; every class was seen by some
expert, and every expert saw some class.
"""

import math

import torch
from torch import Tensor

from mergestream.functional import class_mix
from mergestream.functional import scores as scoring


def alignment(seen: Tensor) -> Tensor:
    """The matrix [K,K] from experts' mean departures on their classes to their offsets; see `filled`."""
    votes = seen.double()
    normal = torch.diag(votes.sum(dim=1)) - (votes / votes.sum(dim=0)) @ votes.T
    return torch.linalg.pinv(normal, hermitian=True).float()


def filled(logits: Tensor, seen: Tensor, alignment: Tensor) -> Tensor:
    """Logits [K,B,C] with those of unseen classes replaced by what the other experts say.

    An expert's logits are the common ones plus an offset of its own, z_kc = t_c + b_k, as far as it saw the class:
    t and b are the least squares over the seen cells, and an unseen cell becomes t_c + b_k. So an expert speaks about
    the odds between classes that it saw, and the mean over experts is t. Experts without a common class are aligned by
    the means of their logits.
    """
    votes = seen[:, None].float()  # [K,1,C]
    count = votes.sum(dim=-1, keepdim=True)
    logits = logits.float()
    mean = (logits * votes).sum(dim=-1, keepdim=True) / count
    centred = (logits - mean) * votes
    common = centred.sum(dim=0) / votes.sum(dim=0)  # [B,C]
    departure = ((centred - common) * votes).sum(dim=-1)  # [K,B]
    offset = (alignment @ departure)[..., None]
    common = ((centred - offset) * votes).sum(dim=0) / votes.sum(dim=0)
    return torch.where(seen[:, None], logits, common + offset + mean)


def masked(logits: Tensor, seen: Tensor) -> Tensor:
    """Logits [K,B,C] with -inf for classes that an expert did not see."""
    return logits.masked_fill(~seen[:, None], -math.inf)


def scores(
    kind: str, seen: Tensor, logits: Tensor, temperature: float | Tensor = 1.0, shares: Tensor | None = None
) -> Tensor:
    """A score of `scoring.SCORES` [K] over the classes that an expert saw, in units of its largest value there.

    An expert of one class is always certain and knows nothing: it gets the largest value.
    """
    logits = masked(logits, seen)
    plain = scoring.SCORES["entropy" if kind == "entropy_agreement" else kind](logits, temperature, shares)
    scaled = _in_units_of_largest(kind, plain, seen.sum(dim=1), seen.shape[1])
    if kind != "entropy_agreement":
        return scaled
    return scaled / agreement(logits, seen, shares).clamp_min(scoring.LEAST_AGREEMENT) ** 4


def image_entropies(logits: Tensor, seen: Tensor, temperature: Tensor) -> Tensor:
    """Entropies [K,B] of single images over the classes that an expert saw, in the same units as `scores`."""
    plain = scoring.image_entropy(masked(logits, seen), temperature)
    return _in_units_of_largest("entropy", plain, seen.sum(dim=1, keepdim=True), seen.shape[1])


def agreement(logits: Tensor, seen: Tensor, shares: Tensor | None) -> Tensor:
    """How often other experts predict the same class [K], over those that saw it; 1 where nobody else did.

    logits [K,B,C]: masked.
    """
    predictions = logits.argmax(dim=-1)  # [K,B]
    asked = seen[:, predictions].transpose(0, 1).float()  # [K,K,B]: whether expert l saw what expert k predicts
    asked = asked * (1 - torch.eye(len(seen), device=seen.device))[..., None]
    alike = (predictions[:, None] == predictions[None]).float() * asked
    weights = class_mix.counted(shares, logits[0])
    agreeing, total = ((values * weights).sum(dim=(1, 2)) for values in (alike, asked))
    return torch.where(total > 0, agreeing / total.clamp_min(torch.finfo(torch.float32).tiny), 1.0)


def _in_units_of_largest(kind: str, values: Tensor, known: Tensor, classes: int) -> Tensor:
    """Scores [K] or [K,B] over `known` [K] or [K,1] of the classes, stretched to the range that all classes have."""
    count = known.float()
    all_classes = torch.full_like(count, classes)
    largest, own = (1 - 1 / n if kind == "max_softmax" else n.log() for n in (all_classes, count))
    stretched = torch.where(known == classes, values, values * (largest / own.clamp_min(1e-6)))
    return torch.where(known > 1, stretched, largest)
