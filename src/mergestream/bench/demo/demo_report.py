"""The demo's report: drift and loss landscape of its experts, and a section that shows the hospitals."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mergestream.bench.analysis.collection import collection_of
from mergestream.bench.analysis.comparison import ORACLE, Duel, ResultRow
from mergestream.bench.drift.pool_drift import analyse_drift
from mergestream.bench.landscape.landscape_measurement import StreamedMethod, measure_landscape
from mergestream.bench.landscape.landscape_record import Landscape
from mergestream.bench.records import Run
from mergestream.bench.report.bench_tables import results_table
from mergestream.bench.report.figures import draw_samples, new_figure, to_data_uri
from mergestream.bench.report.page import PageImage, PageSection
from mergestream.bench.report.report_findings import analyse_runs
from mergestream.bench.report.report_page import write_report
from mergestream.bench.report.result_table import ResultTable
from mergestream.data.datasets import Dataset
from mergestream.data.streams import create_stream
from mergestream.methods import create_method
from mergestream.pool.expert_card import ExpertCard
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import MergestreamError
from mergestream.runtime.parallel import Track

SYNTHETIC = "The data are synthetic: generated phantom hospitals, no patients."
REPORT, DRIFT, LANDSCAPE = "report.html", "drift.json", "landscape.json"
IMAGES = 200  # of the landscape's target


def write_demo_report(
    out: Path,
    runs: list[Run],
    results: dict[str, Any],
    rows: list[ResultRow],
    duels: list[Duel],
    cards: Sequence[ExpertCard],
    dataset: Dataset,
    resolution: int,
    track: Track,
) -> None:
    """Write the page, its tables and the records that `mergestream report` needs to make it again."""
    surface = _landscape(out, dataset, resolution, track) if resolution else None
    drift = analyse_drift(out / "pool")
    drift.save(out / DRIFT)
    more = f" --landscape {out / LANDSCAPE}" if surface else ""
    report = analyse_runs(
        collection_of(out, runs, results),
        track,
        command=f"mergestream report {out} --out {out / REPORT} --drift {out / DRIFT}{more}",
        rows=rows,
        duels=duels,
        drift=drift,
        landscape=surface,
        more=[_hospitals(cards, dataset)],
    )
    write_report(report, out / REPORT)


def main_tables(rows: Sequence[ResultRow], compact: bool = False) -> list[ResultTable]:
    """Accuracy and balanced accuracy, methods by streams."""
    return [
        results_table(rows, metric, f"{title} on the hospital left out", (ORACLE,), compact)
        for metric, title in (("accuracy", "Accuracy"), ("balanced_accuracy", "Balanced accuracy"))
    ]


def _landscape(out: Path, dataset: Dataset, resolution: int, track: Track) -> Landscape:
    """The plane through the other hospitals' experts, on images of the first one; measured once."""
    target = dataset[dataset.domains[0]]
    sources = ExpertPool.load(out / "pool").without(target.name)
    stream = create_stream("sorted", target.labels, seed=0, acquired=target.acquired)
    provenance: dict[str, Any] = {"pool": sources.fingerprint(), "data": target.fingerprint(), "stream": stream.hash}
    provenance |= {"images": IMAGES, "resolution": resolution}
    try:
        measured = Landscape.load(out / LANDSCAPE)
        if measured.provenance == provenance:
            return measured
    except MergestreamError:
        pass  # there is none, or one of another version
    shown = np.linspace(0, len(target) - 1, IMAGES).astype(int)
    measured = measure_landscape(
        sources,
        target.images[shown],
        target.labels[shown],
        resolution=resolution,
        path=StreamedMethod(create_method("entropy_adaptive", sources), target, stream),
        track=track,
        provenance=provenance,
    )
    measured.save(out / LANDSCAPE)
    return measured


def _hospitals(cards: Sequence[ExpertCard], dataset: Dataset) -> PageSection:
    """Two images of every class from every hospital, and how its expert does at home."""
    figure, axes = new_figure(7, 1.1 * len(dataset.domains), rows=len(dataset.domains))
    for ax, domain in zip(axes[:, 0], dataset.domains, strict=True):
        data = dataset[domain]
        picked = [int(i) for c in range(len(data.classes)) for i in (data.labels == c).nonzero()[:2, 0]]
        draw_samples(ax, data.images[picked].permute(0, 2, 3, 1).numpy(), domain)
    classes = ", ".join(dataset.classes)
    drawn = PageImage(
        to_data_uri(figure),
        f"Sample images of each phantom hospital ({', '.join(dataset.domains)}), two of each class: {classes}.",
        f"Two generated images of each class ({classes}) per hospital: same cells, other stain, optics and artefacts.",
    )
    return PageSection("The hospitals", [drawn, _experts(cards)])


def _experts(cards: Sequence[ExpertCard]) -> ResultTable:
    rows = tuple(
        (
            card.name,
            str(card.recipe["seed"]),
            f"{100 * card.metrics['validation']['accuracy']:.1f}",
            f"{card.metrics['validation']['nll']:.3f}",
            f"{card.temperature:.2f}",
        )
        for card in cards
    )
    columns = ("expert", "seed", "accuracy %", "cross-entropy", "temperature")
    return ResultTable("Experts at home, on their own validation split", columns, rows)
