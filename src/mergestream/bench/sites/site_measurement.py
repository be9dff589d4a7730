"""A pool on one site's own labelled images: all experts, and the candidates of `mergestream choose`; masked."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mergestream.bench.choice.candidates import OWN, RARE, STREAMS
from mergestream.bench.choice.pseudo_targets import PartRuns, measure_images, validation_images
from mergestream.bench.engine.pool_at_target import close_all, load_pool, sources_for
from mergestream.bench.evaluation import domain_logits, require_same_classes
from mergestream.bench.records import Run
from mergestream.bench.sites.site_report import CalibrationBin, ModelAnswers, PairDistance, SiteReport
from mergestream.data.datasets import DataRequest, Dataset, DomainData, open_data
from mergestream.data.datasets.image_trees import plain_name
from mergestream.functional.masked_counts import (
    KEPT_VALUES,
    LEAST,
    MaskedRow,
    bounds,
    estimated_scores,
    estimated_total,
    is_safe,
    masked,
    masked_class_counts,
    masked_rows,
    narrowed_parts,
    sum_bounds,
    total_bounds,
)
from mergestream.functional.metrics import confusion
from mergestream.methods import ORIGINAL
from mergestream.methods.recommendation import ChoiceEvidence, Numbers, hashes_of, site_of
from mergestream.methods.seen_classes import SeenClasses
from mergestream.pool.expert_card import version_of
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError, unknown_name
from mergestream.runtime.parallel import Advance, Track
from mergestream.runtime.seeding import cpu_threads

FEWEST_IMAGES = 20
BINS = 10


def report_site(
    folder: Path,
    data: DataRequest,
    work: Path,
    track: Track,
    *,
    domain: str | None = None,
    site: str | None = None,
    device: str = "auto",
    nested: bool = False,
) -> SiteReport:
    """Run every expert and candidate on a site's images and mask what is counted. `work`: for decoded images."""
    close_all()
    pool = load_pool(str(folder), device)
    dataset = open_data(data.of_pool(pool.classes), pool.template.require_preprocessing(), work)
    whole = dataset[_domain(dataset, domain)]
    require_same_classes(dataset.classes, pool)
    with track("answering this site's images", 2) as advance, cpu_threads(1):
        return _measured(pool, folder, dataset, whole, site or whole.name, nested, advance)


def _domain(dataset: Dataset, name: str | None) -> str:
    if name is None and len(dataset.domains) > 1:
        raise InputError(
            f"'{dataset.name}' has several domains, and a report is of one site: --domain with one of "
            f"{', '.join(dataset.domains)}."
        )
    matches = [each for each in dataset.domains if name is None or plain_name(each) == plain_name(name)]
    if not matches:
        raise unknown_name(f"domain in '{dataset.name}'", str(name), dataset.domains)
    return matches[0]


def _measured(
    pool: ExpertPool, folder: Path, dataset: Dataset, whole: DomainData, site: str, nested: bool, advance: Advance
) -> SiteReport:
    own = [card for card in pool.cards if plain_name(site_of(card)) == plain_name(site)]
    site = site_of(own[0]) if own else site
    data = validation_images(whole, own[0]) if own else whole
    if len(data) < FEWEST_IMAGES:
        raise InputError(
            f"'{site}' has {len(data)} labelled images to measure on. With fewer than {FEWEST_IMAGES} a report would "
            f"say too much about each, and too little about the experts."
        )
    home = {card.name for card in own}
    answers = torch.softmax(SeenClasses.of(pool).filled(domain_logits(pool, data, ORIGINAL)).float(), dim=-1)
    advance()
    evidence, runs = None, list[PartRuns]()
    if len(home) < len(pool):
        sources = sources_for(pool, folder, [site], [whole], leave_out=bool(home), allow_seen=False)
        evidence, runs = measure_images(site, sources, data, dataset, nested=nested)
    advance()
    tables = _Tables(data, answers, runs)
    experts = {
        name: tables.answers(k, answers[k], data.labels, is_home=name in home) for k, name in enumerate(pool.names)
    }
    return SiteReport(
        site,
        dataset.name,
        dataset.synthetic,
        pool.classes,
        tables.totals,
        hashes_of(pool.cards),
        experts,
        tables.candidates(),
        _distances(pool.names, answers),
        tables.choice(evidence) if evidence is not None and home else None,
        version_of("mergestream"),
    )


def _distances(names: Sequence[str], answers: Tensor) -> tuple[PairDistance, ...]:
    pairs = combinations(range(len(names)), 2)
    gaps = {(k, j): float((answers[k] - answers[j]).abs().sum(dim=-1).mean() / 2) for k, j in pairs}
    return tuple(PairDistance(names[k], names[j], round(gap, 2)) for (k, j), gap in gaps.items())


class _Tables:
    """All confusion tables that a report is computed from, masked together: rows of one class have one sum."""

    def __init__(self, data: DomainData, answers: Tensor, parts: Sequence[PartRuns]) -> None:
        self._parts = parts
        # A static method has one run for all streams.
        runs = {id(run): run for part in parts for own in part.values() for run in own.values()}
        self._table_of = {key: len(answers) + number for number, key in enumerate(runs)}
        size = len(data.classes)
        counts = np.bincount(data.labels.numpy(), minlength=size).tolist()
        self.totals = masked_class_counts(counts)
        tables = [confusion(each.argmax(dim=-1), data.labels, size) for each in answers]
        tables += [np.asarray(run.metrics["confusion"]) for run in runs.values()]
        self._rows = [self._masked_class(place, tables, counts[place]) for place in range(size)]
        self._whole = [  # the rows of a class whose images are all counted
            [row for number, row in rows.items() if tables[number][place].sum() == counts[place]]
            for place, rows in enumerate(self._rows)
        ]
        self._sums = [
            sum_bounds(rows, total_bounds(total)) for rows, total in zip(self._whole, self.totals, strict=True)
        ]
        self._images = (0, 1 << 40)  # what published calibration tells about the number of images

    def _masked_class(self, place: int, tables: Sequence[np.ndarray], count: int) -> dict[int, MaskedRow | None]:
        """The masked rows of one class by table; runs with few images of the class have a sum of their own."""
        by_sum = defaultdict[int, list[int]](list)
        for number, table in enumerate(tables):
            by_sum[int(table[place].sum())].append(number)
        rows: dict[int, MaskedRow | None] = {}
        for total, numbers in by_sum.items():
            # A reader may compute the size of a thinned class, so it counts as known.
            span = total_bounds(self.totals[place]) if total == count else (total, total)
            shown = masked_rows([tables[number][place].tolist() for number in numbers], span)
            rows |= dict(zip(numbers, shown, strict=True))
        return rows

    def rows(self, table: int) -> tuple[MaskedRow | None, ...]:
        return tuple(rows[table] for rows in self._rows)

    def answers(self, table: int, probabilities: Tensor, labels: Tensor, *, is_home: bool = False) -> ModelAnswers:
        rows, truth = self.rows(table), probabilities.gather(1, labels[:, None])
        return ModelAnswers(
            rows,
            tuple(round(float(value), 3) for value in probabilities.mean(dim=0)),
            _auroc(probabilities, labels),
            round(float(-truth.clamp_min(1e-12).log().mean()), 3),
            self._calibration(rows, probabilities, labels),
            is_home,
        )

    def candidates(self) -> dict[str, ModelAnswers]:
        """The candidates' answers to the first stream of the site's own mix, all other sites' experts asked."""
        result = {}
        for method, runs in self._parts[0].items() if self._parts else ():
            run = runs[f"{STREAMS[0]}, {OWN}"]
            result[method] = self.answers(self._table_of[id(run)], run.probabilities, run.labels)
        return result

    def choice(self, evidence: ChoiceEvidence) -> ChoiceEvidence:
        """The site's part with every number computed from masked counts, or rounded."""
        sizes = [int(estimated_total(total)) for total in self.totals]
        parts = []
        for part, runs_by_method in zip(evidence.parts, self._parts, strict=True):
            runs = {
                method: {stream: self._numbers(run) for stream, run in own.items()}
                for method, own in runs_by_method.items()
            }
            parts.append(replace(part, runs=runs, images=dict.fromkeys((OWN, RARE), max(1, sum(sizes)))))
        return replace(evidence, parts=tuple(parts))

    def _numbers(self, run: Run) -> Numbers:
        rows = self.rows(self._table_of[id(run)])
        totals = masked_class_counts(np.asarray(run.metrics["confusion"]).sum(axis=1).tolist())
        scores = {key: round(value, 6) for key, value in estimated_scores(rows, totals).items()}
        return {**scores, "nll": round(run.metrics["nll"], 3), "auroc": _auroc(run.probabilities, run.labels)}

    def _calibration(
        self, rows: Sequence[MaskedRow | None], probabilities: Tensor, labels: Tensor
    ) -> tuple[CalibrationBin, ...] | None:
        """Ten bins of confidence; None where their sums would narrow down a count in the confusion table."""
        confidence, predictions = probabilities.max(dim=-1)
        places = (confidence * BINS).long().clamp(max=BINS - 1)
        bins = []
        for place in range(BINS):
            here = places == place
            images, correct = int(here.sum()), int((predictions == labels)[here].sum())
            mean = round(float(confidence[here].mean()), 2) if images >= LEAST else None
            bins.append(CalibrationBin(place / BINS, (place + 1) / BINS, masked(images), masked(correct), mean))
        return tuple(bins) if self._accepts(rows, bins) else None

    def _accepts(self, rows: Sequence[MaskedRow | None], bins: Sequence[CalibrationBin]) -> bool:
        """Whether counts below five stay open with the sums of these bins; if so, the bins count as published."""
        images, correct = (
            (sum(low for low, _ in spans), sum(high for _, high in spans))
            for spans in ([bounds(each.images) for each in bins], [bounds(each.correct) for each in bins])
        )
        images = (max(images[0], self._images[0]), min(images[1], self._images[1]))
        sums = narrowed_parts(self._sums, images)
        hits = [bounds(row[c]) if row is not None else (0, sums[c][1]) for c, row in enumerate(rows)]
        hits = narrowed_parts(hits, correct)
        for place, (own, span) in enumerate(zip(self._whole, sums, strict=True)):
            is_open = self.totals[place] is not None or span[1] - span[0] + 1 >= KEPT_VALUES
            if not is_open or not is_safe(rows[place], span, place, hits[place]):
                return False
            if not all(is_safe(row, span) for row in own):
                return False
        self._images = images
        return True


def _auroc(probabilities: Tensor, labels: Tensor) -> float | None:
    """One class against the rest, mean over the classes with five images or more on both sides."""
    from torchmetrics.functional.classification import binary_auroc

    counts = torch.bincount(labels, minlength=probabilities.shape[1])
    enough = [c for c, count in enumerate(counts.tolist()) if LEAST <= count <= len(labels) - LEAST]
    values = [float(binary_auroc(probabilities[:, c].float(), (labels == c).int())) for c in enough]
    return round(float(np.mean(values)), 2) if values else None
