"""The paper's theory on the pools of one data set and backbone."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import mean

from mergestream.bench.analysis.comparison import grouped
from mergestream.bench.claims.claim_checks import QUESTION, check_claims
from mergestream.bench.claims.theory_checks import DriftPoint, answers_of, check_theory, error_parts
from mergestream.bench.drift.pool_drift import Drift, analyse_drift
from mergestream.bench.records import Run
from mergestream.bench.reproduction.dataset_search import DatasetPlace
from mergestream.bench.reproduction.paper_values import DATASETS, short_title
from mergestream.bench.reproduction.reproduction_plan import ReproductionRequest
from mergestream.bench.reproduction.reproduction_record import TheoryCheck
from mergestream.pool.pool_folder import read_pool


def check_pools(
    request: ReproductionRequest, place: DatasetPlace, backbone: str, runs: Mapping[int, Sequence[Run]]
) -> TheoryCheck:
    """Decomposition, claims and drift, from the main comparison's runs by training seed and the experts' weights."""
    every = [run for own in runs.values() for run in own]
    answers = answers_of(every)
    cards = read_pool(request.pool_folder(place.name, backbone)).cards
    counts = {name: [card.class_counts.get(each, 0) for each in card.classes] for name, card in cards.items()}
    where = f"{DATASETS[place.name]} {short_title(backbone)}"
    points = [point for seed, own in runs.items() for point in _drift_points(request, place, backbone, seed, own)]
    # Whether low entropy goes with low error, and what the paper's rule gains over the mean.
    claims = [each for each in check_claims(every) if each.estimate and not each.claim.startswith(QUESTION)]
    findings = check_theory(answers, counts, where)
    findings += [replace(each, stream=where) for each in claims if not each.measure.startswith("Kendall")]
    return TheoryCheck(place.name, backbone, error_parts(answers), findings, points)


def _drift_points(
    request: ReproductionRequest, place: DatasetPlace, backbone: str, seed: int, runs: Sequence[Run]
) -> list[DriftPoint]:
    """One point per target with two experts or more."""
    folder = request.pool_folder(place.name, backbone, seed)
    drift, domains = analyse_drift(folder), {name: card.domain for name, card in read_pool(folder).cards.items()}
    points = []
    for target, own in grouped((run for run in runs if run.stream == "iid"), "target").items():
        experts = [name for name in drift.experts if domains[name] != target]
        angle = _angle(drift, experts)
        singles = [run.accuracy for run in own if run.is_single]
        merged = [run.accuracy for run in own if run.label == "mean"]
        if angle is not None and singles and merged:
            points.append(DriftPoint(place.name, backbone, target, seed, angle, mean(singles) - mean(merged)))
    return points


def _angle(drift: Drift, experts: Sequence[str]) -> float | None:
    """Mean angle over encoder blocks and pairs of these experts, in degrees."""
    pair_positions = [place for place, pair in enumerate(drift.pairs) if set(pair) <= set(experts)]
    angles = [layer.whole.angles[place] for layer in drift.of_kind("block") for place in pair_positions]
    defined = [angle for angle in angles if angle is not None]
    return mean(defined) if defined else None
