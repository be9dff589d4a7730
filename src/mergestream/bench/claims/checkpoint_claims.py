"""Whether runs of one site differ more than epochs of one run: variance of the answers among checkpoints."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from mergestream.bench.analysis.comparison import Estimate
from mergestream.bench.analysis.resampling import RESAMPLES
from mergestream.bench.claims.claim_finding import UNKNOWN, VARIANCE, ClaimFinding, missing, verdict_of
from mergestream.bench.evaluation import domain_logits
from mergestream.bench.records import Run
from mergestream.data.datasets.domain_data import DomainData
from mergestream.functional.scores import probabilities
from mergestream.methods import ORIGINAL
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError

# Probabilities [M,N,C] of M checkpoints on the same N images, by 'site at target'.
Answers = Mapping[str, Tensor]
NAME, CLAIM = "runs_vary_more_than_epochs", "Runs of one site differ more than epochs of one run."
MEASURE = "variance of the probabilities among runs less that among epochs (sum over classes, mean over images)"


def answers_of_pools(pools: Iterable[ExpertPool], data: DomainData) -> dict[str, Tensor]:
    """Checkpoints of several pools on one domain's images, grouped by the site that trained them.

    A pool may hold one epoch or one seed of every site, or all epochs of a site as experts whose cards name its domain.
    """
    groups: dict[str, list[Tensor]] = defaultdict(list)
    for pool in pools:
        answers = probabilities(domain_logits(pool, data, ORIGINAL))
        for card, own in zip(pool.cards, answers, strict=True):
            groups[f"{card.domain or card.name} at {data.name}"].append(own)
    return {key: torch.stack(group) for key, group in groups.items() if len(group) > 1}


def answers_of_runs(runs: Sequence[Run]) -> dict[str, Tensor]:
    """The same sites' experts of several pools on one target, from the runs of every expert alone, in data order."""
    groups: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for run in runs:
        arguments = run.arguments
        if arguments["method"] == "single_expert":
            key = f"{arguments['options']['expert']} at {arguments['data']['domain']}"
            order = torch.from_numpy(np.concatenate(run.batches).argsort())
            groups[key].setdefault(arguments["pool"]["fingerprint"], run.probabilities[order])
    return {
        key: torch.stack(list(group.values()))
        for key, group in groups.items()
        if len(group) > 1 and len({len(own) for own in group.values()}) == 1
    }


def variance_per_image(answers: Tensor) -> np.ndarray:
    """Unbiased variance among checkpoints, summed over classes [N], of probabilities [M,N,C]."""
    if answers.ndim != 3 or len(answers) < 2:
        raise InputError(f"Expected probabilities [M,N,C] of two checkpoints or more, got {tuple(answers.shape)}.")
    return answers.double().var(dim=0, unbiased=True).sum(dim=-1).numpy()


def disagreement(answers: Tensor) -> float:
    """Share of images on which two checkpoints differ, mean over pairs."""
    predictions = answers.argmax(dim=-1)
    pairs = torch.combinations(torch.arange(len(predictions)))
    return float((predictions[pairs[:, 0]] != predictions[pairs[:, 1]]).float().mean())


def check_checkpoints(among_runs: Answers, among_epochs: Answers) -> list[ClaimFinding]:
    """One finding over all sites that have both; images are resampled, checkpoints are not."""
    both = [key for key in among_runs if key in among_epochs]
    if not both:
        return [_one_side(among_runs, among_epochs)]
    sides = [[variance_per_image(answers[key]) for key in both] for answers in (among_runs, among_epochs)]
    for key, first, second in zip(both, *sides, strict=True):
        if len(first) != len(second):
            raise InputError(
                f"Runs and epochs of '{key}' answered {len(first)} and {len(second)} images; give the same."
            )
    gaps = [first - second for first, second in zip(*sides, strict=True)]
    estimate = _mean_with_images_resampled(gaps)
    means = [float(np.mean([each.mean() for each in side])) for side in sides]
    shares = [np.mean([disagreement(answers[key]) for key in both]) for answers in (among_runs, among_epochs)]
    sentence = (
        f"Among runs the variance is {means[0]:.4f} and {100 * shares[0]:.1f} % of answers differ between two, among "
        f"epochs {means[1]:.4f} and {100 * shares[1]:.1f} % ({len(both)} sites and targets; other runs may differ: "
        f"the interval resamples images)."
    )
    return [ClaimFinding(NAME, CLAIM, None, MEASURE, VARIANCE, estimate, verdict_of(estimate), sentence)]


def _mean_with_images_resampled(values: Sequence[np.ndarray]) -> Estimate:
    """The mean over groups of the mean over images; groups on one target share its images, so all are drawn alike."""
    random = np.random.RandomState(0)
    drawn = []
    for _ in range(RESAMPLES):
        seed = random.randint(2**31)
        picks = {n: np.random.RandomState(seed).randint(n, size=n) for n in {len(each) for each in values}}
        drawn.append(np.mean([each[picks[len(each)]].mean() for each in values]))
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Estimate(float(np.mean([each.mean() for each in values])), float(low), float(high))


def _one_side(among_runs: Answers, among_epochs: Answers) -> ClaimFinding:
    for have, given, lacking in (
        ("runs", among_runs, "pools of several epochs of one run (answers_of_pools)"),
        ("epochs", among_epochs, "pools of other seeds or settings of the same sites (answers_of_pools)"),
    ):
        if given:
            estimate = _mean_with_images_resampled([variance_per_image(answers) for answers in given.values()])
            share = np.mean([disagreement(answers) for answers in given.values()])
            sentence = (
                f"Among {have} the variance is {estimate.mean:.4f}, and {100 * share:.1f} % of answers differ between "
                f"two. Missing for the comparison: {lacking}."
            )
            measure = f"variance of the probabilities among {have} (sum over classes, mean over images)"
            return ClaimFinding(NAME, CLAIM, None, measure, VARIANCE, estimate, UNKNOWN, sentence)
    return missing(
        NAME, CLAIM, MEASURE, VARIANCE, "pools of several seeds or settings, and of several epochs of one run."
    )
