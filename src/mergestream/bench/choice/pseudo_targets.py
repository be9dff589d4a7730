"""One site as a pseudo-target: its validation images, answered by the experts of all other sites."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mergestream.bench.choice.candidates import (
    BATCH_SIZE,
    CANDIDATES,
    OWN,
    RARE,
    RARE_SHARE,
    REFERENCE,
    REVISION,
    SEED,
    STREAMS,
    variants_for,
)
from mergestream.bench.engine.pool_at_target import load_pool, method_of, sources_for
from mergestream.bench.evaluation import domain_logits, evaluate
from mergestream.bench.records import Run
from mergestream.data.datasets import DataRequest, Dataset, DomainData, open_data
from mergestream.data.datasets.image_trees import plain_name
from mergestream.data.streams import create_stream, in_order
from mergestream.methods import ORIGINAL, Method
from mergestream.methods.recommendation import (
    FEWEST_SITES,
    METRICS,
    ChoiceEvidence,
    Numbers,
    SitePart,
    hashes_of,
    site_of,
)
from mergestream.methods.recommendation import sites_of as listed_sites
from mergestream.pool.expert_card import ExpertCard
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError, PoolError
from mergestream.runtime.seeding import cpu_threads
from mergestream.training import split_of

Logits = Mapping[str, Tensor]  # [K,N,C] by view
PartRuns = dict[str, dict[str, Run]]  # by method, then by stream and prevalence


@dataclass(frozen=True)
class ChoiceRequest:
    """A pool's folder, its data, and whether to measure pools that lack one more site, for a choice nested in tests."""

    pool: str
    data: DataRequest
    work: Path  # for decoded images
    nested: bool = True
    device: str = "auto"


def measure_site(request: ChoiceRequest, site: str) -> ChoiceEvidence:
    """Every candidate at one site, without the site's own experts; nested, also without those of each other site."""
    pool = load_pool(request.pool, request.device)
    dataset = open_data(request.data.of_pool(pool.classes), pool.template.require_preprocessing(), request.work)
    with cpu_threads(1):  # the order of sums, and so the numbers, are the same in every process
        return measure(pool, Path(request.pool), dataset, site, nested=request.nested)


def measure(pool: ExpertPool, folder: Path, dataset: Dataset, site: str, *, nested: bool) -> ChoiceEvidence:
    """The same, on a pool and a data set that are open."""
    whole = dataset[domain_of(site, dataset)]
    sources = sources_for(pool, folder, [site], [whole], leave_out=True, allow_seen=False)
    data = validation_images(whole, next(card for card in pool.cards if site_of(card) == site))
    return measure_images(site, sources, data, dataset, nested=nested)[0]


def measure_images(
    site: str, sources: ExpertPool, data: DomainData, dataset: Dataset, *, nested: bool
) -> tuple[ChoiceEvidence, list[PartRuns]]:
    """Every candidate on a site's images, with the experts that may answer there; and the runs of every part."""
    methods = [method_of(variant, sources, dataset) for variant in variants_for(dataset, CANDIDATES)]
    views = {ORIGINAL, *(view for method in methods for view in method.asked_views())}
    logits = {view: domain_logits(sources, data, view) for view in sorted(views)}
    others = listed_sites(sources.cards)
    measured = [measure_part(site, sources, data, dataset, logits)]
    # A pool of fewer sites gets the default rule, whatever is measured.
    for left_out in others if nested and len(others) >= FEWEST_SITES else ():
        rest = sources.without(*(card.name for card in sources.cards if site_of(card) == left_out))
        rows = [sources.index(name) for name in rest.names]
        own_logits = {view: values[rows] for view, values in logits.items()}
        measured.append(measure_part(site, rest, data, dataset, own_logits))
    (reference,) = (method_of(variant, sources, dataset).label() for variant in variants_for(dataset, (REFERENCE,)))
    candidates = candidates_of(sources, dataset)
    parts = tuple(part for part, _ in measured)
    return ChoiceEvidence(dataset.name, REVISION, candidates, reference, parts), [runs for _, runs in measured]


def candidates_of(pool: ExpertPool, dataset: Dataset) -> dict[str, int]:
    """The candidates as tables write them, with their revisions."""
    methods = (method_of(variant, pool, dataset) for variant in variants_for(dataset, CANDIDATES))
    return {method.label(): method.revision for method in methods}


def measure_part(
    site: str, pool: ExpertPool, data: DomainData, dataset: Dataset, logits: Logits
) -> tuple[SitePart, PartRuns]:
    """Run every candidate on all streams and prevalences of a site's images."""
    mixes = {OWN: torch.arange(len(data)), RARE: with_rare_class(data.labels)}
    runs: PartRuns = {}
    for variant in variants_for(dataset, CANDIDATES):
        method = method_of(variant, pool, dataset)
        own = runs[method.label()] = dict[str, Run]()
        for mix, chosen in mixes.items():
            part, part_logits = data.subset(chosen), {view: values[:, chosen] for view, values in logits.items()}
            own |= {f"{stream}, {mix}": run for stream, run in run_streams(method, part, part_logits).items()}
    numbers: dict[str, dict[str, Numbers]] = {
        method: {at: {name: run.metrics[name] for name in METRICS} for at, run in own.items()}
        for method, own in runs.items()
    }
    images = {mix: len(chosen) for mix, chosen in mixes.items()}
    return SitePart(site, hashes_of(pool.cards), images, numbers), runs


def run_streams(method: Method, data: DomainData, logits: Logits) -> dict[str, Run]:
    """Runs by stream. A static method answers once: a stream only reorders its answers."""
    results: dict[str, Run] = {}
    for spec in STREAMS:
        if method.static and results:
            results[spec] = next(iter(results.values()))
            continue
        stream = create_stream(spec, data.labels, batch_size=BATCH_SIZE, seed=SEED)
        batches = in_order(len(data), BATCH_SIZE) if method.static else stream
        results[spec] = evaluate(method, data, batches, expert_logits=dict(logits))
    return results


def with_rare_class(labels: Tensor) -> Tensor:
    """Indices [M] of all images but three quarters of the rarest class's, of which at least one stays."""
    present, counts = labels.unique(return_counts=True)
    rare = (labels == present[counts.argmin()]).nonzero().flatten()
    stay = max(1, round(RARE_SHARE * len(rare)))
    order = np.random.RandomState(SEED).permutation(len(rare))
    thinned = torch.ones(len(labels), dtype=torch.bool)
    thinned[rare[torch.from_numpy(order[stay:])]] = False
    return thinned.nonzero().flatten()


def validation_images(data: DomainData, card: ExpertCard) -> DomainData:
    """The images that the site's expert was validated on; all of them where its card does not say which those are.

    Either is sound: the site's own expert does not answer at its pseudo-target.
    """
    if "validation_share" not in card.recipe or "seed" not in card.recipe:
        return data
    return data.subset(split_of(data, card.recipe)[1].sort().values)


def domain_of(site: str, dataset: Dataset) -> str:
    """The domain of the data set that a site's card names, however it is spelt."""
    matches = [domain for domain in dataset.domains if plain_name(domain) == plain_name(site)]
    if not matches:
        raise InputError(
            f"'{dataset.name}' has no domain '{site}', so it cannot be a pseudo-target; its domains: "
            f"{', '.join(dataset.domains)}. Let the site do its part with its own data: --site {site} --out FILE."
        )
    return matches[0]


def require_sites(pool: ExpertPool) -> list[str]:
    """The sites of a pool; refused where there is only one."""
    sites = listed_sites(pool.cards)
    if len(sites) < 2:
        raise PoolError(
            f"The pool has experts of one site only, {sites[0]}: no other site's expert could answer its images, so "
            f"there is nothing to choose by. Without a recommendation 'auto' is the default rule."
        )
    return sites
