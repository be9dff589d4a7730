"""How the demo ends: drift and loss landscape of its experts measured, and the report with the hospitals on it."""

from pathlib import Path
from typing import Any

import numpy as np

from mergestream.bench.analysis.collection import collection_of
from mergestream.bench.demo.demo_tables import DemoFindings, hospitals
from mergestream.bench.drift.weights import Drift, analyse_drift
from mergestream.bench.landscape.measuring import StreamedMethod, measure_landscape
from mergestream.bench.landscape.outcome import Landscape
from mergestream.bench.report.report import write_report
from mergestream.bench.report.report_run import findings_of
from mergestream.data.datasets import Dataset
from mergestream.data.streams import create_stream
from mergestream.methods import create_method
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import MergestreamError
from mergestream.runtime.files import write_json
from mergestream.runtime.parallel import Track

REPORT, DRIFT, LANDSCAPE = "report.html", "drift.json", "landscape.json"
IMAGES = 200  # of the landscape's target


def write_demo_page(
    findings: DemoFindings, results: dict[str, Any], dataset: Dataset, out: Path, track: Track, resolution: int
) -> None:
    """Write the page, its tables and the records that `mergestream report` needs to make it again."""
    pool = ExpertPool.load(out / "pool")
    surface = _landscape(pool, dataset, out / LANDSCAPE, resolution, track) if resolution else None
    given = f" --landscape {out / LANDSCAPE}" if surface else ""
    report = findings_of(
        collection_of(out, findings.runs, results),
        track,
        command=f"mergestream report {out} --out {out / REPORT} --drift {out / DRIFT}{given}",
        rows=findings.rows,
        duels=findings.duels,
        drift=_drift(out),
        landscape=surface,
        more=[hospitals(findings.cards, _samples(dataset), dataset.classes)],
    )
    write_report(report, out / REPORT)


def _drift(out: Path) -> Drift:
    drift = analyse_drift(out / "pool")
    write_json(out / DRIFT, drift.to_json())
    return drift


def _landscape(pool: ExpertPool, dataset: Dataset, record: Path, resolution: int, track: Track) -> Landscape:
    """The plane through the other hospitals' experts, on images of the first one; measured once."""
    target = dataset[dataset.domains[0]]
    sources = pool.without(target.name)
    stream = create_stream("sorted", target.labels, seed=0, acquired=target.acquired)
    asked = {"pool": sources.fingerprint(), "data": target.fingerprint(), "stream": stream.hash, "images": IMAGES}
    try:
        known = Landscape.load(record)
        if known.provenance == {**asked, "resolution": resolution}:
            return known
    except MergestreamError:
        pass  # none, or one that is to be written over
    shown = np.linspace(0, len(target) - 1, IMAGES).astype(int)
    found = measure_landscape(
        sources,
        target.images[shown],
        target.labels[shown],
        resolution=resolution,
        path=StreamedMethod(create_method("entropy_adaptive", sources), target, stream),
        track=track,
        provenance={**asked, "resolution": resolution},
    )
    found.save(record)
    return found


def _samples(dataset: Dataset) -> dict[str, np.ndarray]:
    """Two images of every class from every hospital, as [n,H,W,3]."""
    samples = {}
    for domain in dataset.domains:
        data = dataset[domain]
        picked = [int(i) for c in range(len(data.classes)) for i in (data.labels == c).nonzero()[:2, 0]]
        samples[domain] = data.images[picked].permute(0, 2, 3, 1).numpy()
    return samples
