"""What site reports say about a new site: how prevalence differs between sites, and how far experts are off abroad."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mergestream.pool.expert_card import ExpertCard
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import PoolError
from mergestream.runtime.json_record import parsed

SMALLEST = 0.0005  # mean probability: reports round to three digits


@dataclass(frozen=True)
class SiteEvidence:
    """One site's report, as far as the correction of answers needs it."""

    site: str
    classes: tuple[str, ...]
    home: tuple[str, ...]  # experts that were trained there
    images: tuple[float, ...]  # per class, estimated from masked counts
    experts: dict[str, str]  # sha-256 of the weights of those that were trained elsewhere
    answers: dict[str, tuple[float, ...]]  # mean probabilities of these on the site's images


def site_evidence(pool: ExpertPool) -> list[SiteEvidence]:
    """The evidence in pool.json about the pool's experts as they are.

    A site whose own experts are all left out of the pool, such as the target of a benchmark, counts no more.
    """
    listed = [parsed(SiteEvidence, each) for each in (pool.recommendation or {}).get("sites", [])]
    hashes = {card.name: card.weights_sha256 for card in pool.cards}
    return [each for each in listed if (not each.home or set(each.home) & set(hashes)) and _answers_of(each, hashes)]


def variances_by_sites(pool: ExpertPool) -> tuple[Tensor, Tensor]:
    """Variances of the classes' log-odds [C]: of prevalence between sites, and of the experts' bias abroad.

    The bias at a site is that of the mean answer of the experts from elsewhere, against the images' true classes. Few
    sites say little about a variance: one more is thought of, whose prevalence is off by 1 and which has no bias.
    """
    sites = site_evidence(pool)
    if not sites:
        raise PoolError(
            "anchor='sites' needs reports of the sites in pool.json: mergestream choose POOL --join REPORT.json …, "
            "with files of 'mergestream site-report' about these experts."
        )
    hashes = {card.name: card.weights_sha256 for card in pool.cards}
    images = torch.tensor([each.images for each in sites], dtype=torch.float32) + 0.5
    means = torch.stack([torch.tensor(_answers_of(each, hashes)).mean(dim=0) for each in sites]).clamp_min(SMALLEST)
    truth, answers = _centred(images.log()), _centred(means.log())
    prevalence = ((truth - truth.mean(dim=0)).square().sum(dim=0) + 1) / len(sites)
    bias = (answers - truth).square().sum(dim=0) / (len(sites) + 1)
    return prevalence.to(pool.device), bias.to(pool.device)


def _answers_of(each: SiteEvidence, hashes: dict[str, str]) -> list[tuple[float, ...]]:
    return [row for name, row in each.answers.items() if hashes.get(name) == each.experts[name]]


def _centred(logs: Tensor) -> Tensor:
    return logs - logs.mean(dim=1, keepdim=True)


def require_fitting_sites(sites: Sequence[SiteEvidence], cards: Sequence[ExpertCard]) -> None:
    """Refuse reports about other classes or other weights than the pool's."""
    hashes = {card.name: card.weights_sha256 for card in cards}
    for each in sites:
        if each.classes != tuple(cards[0].classes):
            raise PoolError(f"The report of '{each.site}' is about other classes than this pool has.")
        for name, sha256 in each.experts.items():
            if hashes.get(name) != sha256:
                raise PoolError(
                    f"The report of '{each.site}' is about other weights of '{name}' than this pool has. Let the site "
                    f"measure the pool as it is now: mergestream site-report."
                )
