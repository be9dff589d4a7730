"""`mergestream choose`: measure sites as pseudo-targets, join their parts, and record the recommendation."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mergestream.bench.choice.candidates import REVISION
from mergestream.bench.choice.pseudo_targets import ChoiceRequest, candidates_of, domain_of, measure_site, require_sites
from mergestream.bench.engine.pool_at_target import close_all, load_pool
from mergestream.bench.report.result_table import ResultTable, format_number
from mergestream.bench.sites.site_report import SiteReport, read_joined
from mergestream.data.datasets import DataRequest, open_data
from mergestream.methods.recommendation import Choice, ChoiceEvidence, SitePart, choose, hashes_of, site_of, sites_of
from mergestream.methods.site_evidence import SiteEvidence, require_fitting_sites
from mergestream.pool.expert_card import ExpertCard
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.pool_folder import read_pool, write_recommendation
from mergestream.runtime.errors import InputError, PoolError, unknown_name
from mergestream.runtime.files import json_round_trip, sha256_of_json
from mergestream.runtime.parallel import Track, quiet, run_jobs
from mergestream.training.training_run import work_folder

ALL = "all"
COMPARED = ("revision", "candidates", "reference")


def run_choice(
    pool: Path,
    data: DataRequest | None,
    parts: Sequence[Path],
    *,
    site: str,
    out: Path | None,
    nested: bool,
    require_signed_by: Path | None,
    device: str,
    jobs: int,
    track: Track,
) -> tuple[ChoiceEvidence, Choice | None]:
    """Measure the pool's sites, or join the `parts` that they measured, and record the choice.

    The evidence is also written to `out`. One site alone measures its part, which gives no choice.
    """
    if bool(parts) == (data is not None):
        raise InputError("Give --dataset to measure, or --join with files that sites have measured.")
    if site != ALL and out is None:
        raise InputError("The part of one site goes into a file: add --out FILE.json.")
    reports: list[SiteReport] = []
    if data is None:
        joined, reports = read_joined(parts, require_signed_by)
        evidence = join(joined)
    else:
        folder = pool.resolve()
        request = ChoiceRequest(str(folder), data, work_folder(folder), nested, device)
        evidence = measure_sites(request, site, track, jobs=jobs)
    if out is not None:
        evidence.save(out)
    if site != ALL:
        return evidence, None
    return evidence, recommend(pool, evidence, [report.evidence() for report in reports])


def measure_sites(request: ChoiceRequest, site: str, track: Track, *, jobs: int = 1) -> ChoiceEvidence:
    """Measure one site of the pool as a pseudo-target, or all of them."""
    close_all()
    pool = load_pool(request.pool, request.device)
    sites = require_sites(pool)
    if site not in (ALL, *sites):
        raise unknown_name("site in this pool", site, (ALL, *sites))
    dataset = open_data(request.data.of_pool(pool.classes), pool.template.require_preprocessing(), request.work)
    chosen = sites if site == ALL else [site]
    for name in chosen:
        domain_of(name, dataset)
    with track("measuring sites as pseudo-targets", len(chosen)) as advance:
        measured = run_jobs(
            measure_site, [(request, name) for name in chosen], workers=jobs, on_done=advance, device=request.device
        )
    return join(measured)


def join(evidences: Sequence[ChoiceEvidence]) -> ChoiceEvidence:
    """Join parts of several sites, which must have measured the same candidates in the same way."""
    first, parts = evidences[0], list[SitePart]()
    for evidence in evidences:
        for key, own, other in zip(COMPARED, _settings(first), _settings(evidence), strict=True):
            if own != other:
                raise InputError(
                    f"The parts of {_sites(first)} and {_sites(evidence)} differ in {key}: {own} and {other}. Let all "
                    f"sites measure with the same version of mergestream and the same views."
                )
        for part in evidence.parts:
            if any((part.site, part.experts) == (other.site, other.experts) for other in parts):
                raise InputError(f"The part of '{part.site}' is given twice.")
            parts.append(part)
    dataset = ", ".join(dict.fromkeys(evidence.dataset for evidence in evidences))
    return replace(first, dataset=dataset, parts=tuple(parts))


def _settings(evidence: ChoiceEvidence) -> tuple[int, list[tuple[str, int]], str]:
    return evidence.revision, list(evidence.candidates.items()), evidence.reference


def _sites(evidence: ChoiceEvidence) -> str:
    return ", ".join(dict.fromkeys(f"'{part.site}'" for part in evidence.parts))


def recommend(folder: Path, evidence: ChoiceEvidence, sites: Sequence[SiteEvidence] = ()) -> Choice:
    """Apply the rule of choice to the parts of all sites, and record its result in the pool's `pool.json`.

    `sites`: what site reports say about prevalence and bias, recorded beside it for `corrected(anchor=sites)`.
    """
    cards = list(read_pool(folder).cards.values())
    require_fitting(evidence, cards)
    require_fitting_sites(sites, cards)
    places = {site: number for number, site in enumerate(sites_of(cards))}
    parts = tuple(sorted(evidence.parts, key=lambda part: places[part.site]))
    evidence = replace(evidence, parts=parts)
    choice = choose(evidence, evidence.parts_for(cards))
    hashes = {"experts": hashes_of(cards), "experts_sha256": sha256_of_json(hashes_of(cards))}
    value = {**asdict(choice), **hashes, **asdict(evidence)}
    value |= {"sites": [asdict(site) for site in sites]} if sites else {}
    write_recommendation(folder, json_round_trip(value))
    return choice


def recommend_once(request: ChoiceRequest) -> None:
    """Choose for a pool, unless its recommendation is of the same experts and candidates; one site has no choice."""
    pool = ExpertPool.load(request.pool)
    if len(sites_of(pool.cards)) < 2:
        return
    dataset = open_data(request.data.of_pool(pool.classes), pool.template.require_preprocessing(), request.work)
    present = [hashes_of(pool.cards), REVISION, *candidates_of(pool, dataset).items()]
    value = pool.recommendation
    if value is None or present != [value["experts"], value["revision"], *value["candidates"].items()]:
        recommend(Path(request.pool), measure_sites(request, ALL, quiet))


def require_fitting(evidence: ChoiceEvidence, cards: Sequence[ExpertCard]) -> None:
    """Refuse parts of other experts than the pool's, and a pool of which a site's part is missing."""
    hashes, sites = hashes_of(cards), sites_of(cards)
    for part in evidence.parts:
        if part.site not in sites:
            raise PoolError(f"A part is of the site '{part.site}', of which this pool has no expert.")
        for name, sha256 in part.experts.items():
            if hashes.get(name) != sha256:
                own = f"is {hashes[name][:12]}…" if name in hashes else "is not in this pool"
                raise PoolError(
                    f"The part of '{part.site}' was measured with the expert '{name}' of hash {sha256[:12]}…, which "
                    f"{own}. Let the site measure it again with the pool as it is now."
                )
    for site in sites:
        others = hashes_of([card for card in cards if site_of(card) != site])
        if any((part.site, part.experts) == (site, others) for part in evidence.parts):
            continue
        raise PoolError(
            f"The part of '{site}' is missing: every site of the pool must be a pseudo-target, answered by all "
            f"other sites' experts. There: mergestream choose POOL --site {site} --out FILE.json, with its data."
        )


def choice_table(choice: Choice, evidence: ChoiceEvidence) -> ResultTable:
    """The chosen method and its runner-up, in points."""
    columns = ("method", "score", "accuracy", "balanced accuracy", "NLL", "AUROC")
    rows = [_row(f"{choice.method} (chosen)", choice.numbers)]
    if choice.runner_up is not None and choice.runner_up_numbers is not None:
        rows.append(_row(choice.runner_up, choice.runner_up_numbers))
    note = f"Means over {choice.pseudo_targets} pseudo-targets of '{evidence.dataset}'; score: mean of both accuracies."
    return ResultTable("Choice of a method", columns, tuple(rows), note=note)


def _row(name: str, numbers: dict[str, Any]) -> tuple[str, ...]:
    shares = (format_number(numbers[key], 1, 100) for key in ("score", "accuracy", "balanced_accuracy"))
    return (name, *shares, format_number(numbers["nll"], 3), format_number(numbers["auroc"], 1, 100))


def describe_choice(choice: Choice) -> list[str]:
    """The choice in sentences."""
    sites, points = choice.pseudo_targets, 100 * (choice.better_by or 0)
    weak = (
        f"The choice is weak: one site's expert alone answered each of {sites} pseudo-targets; the default rule stays."
    )
    better = f"'{choice.method}' is {points:.1f} points better than '{choice.runner_up}'."
    equal = (
        f"'{choice.runner_up}' is {-points:.1f} points better than '{choice.method}', not more than chance: the first "
        f"of equals is chosen."
    )
    below = f"Excluded, more than 2 points below the reference at a pseudo-target: {', '.join(choice.excluded)}."
    lines = [weak] if choice.weak else []
    if choice.runner_up is not None:
        lines.append(better if points >= 0 else equal)
    return [*lines, below] if choice.excluded else lines
