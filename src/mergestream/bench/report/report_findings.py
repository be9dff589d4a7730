"""Everything that a report shows, computed from the runs before any text is written."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from mergestream.bench.analysis.bench_findings import BenchFindings, collapses, seen_targets
from mergestream.bench.analysis.collection import RunCollection
from mergestream.bench.analysis.comparison import grouped
from mergestream.bench.analysis.confidence import Reliability, RiskCoverage, reliabilities, risk_coverages
from mergestream.bench.analysis.cost import Cost, costs
from mergestream.bench.analysis.duels import Duel
from mergestream.bench.analysis.traces import Trace, trace_of
from mergestream.bench.claims.claim_checks import check_claims
from mergestream.bench.claims.claim_finding import ClaimFinding
from mergestream.bench.drift.pool_drift import Drift
from mergestream.bench.landscape.landscape_record import Landscape
from mergestream.bench.records import Run
from mergestream.bench.report.page import PageSection
from mergestream.data.datasets import DATASETS
from mergestream.data.datasets.dataset_sources import GeneratedSource
from mergestream.pool.expert_card import read_card
from mergestream.pool.pool_folder import is_expert_folder
from mergestream.runtime.errors import MergestreamError
from mergestream.runtime.parallel import Advance, Track

SMALLEST_BIN = 0.005  # of a reliability diagram, as a share of the images; with fewer the accuracy is noise
USUAL_REFERENCE = "entropy_adaptive"
DEMO_TITLE = "mergestream demo: four hospitals, each left out in turn"


@dataclass(frozen=True)
class ReportFindings:
    """A benchmark's findings, and what only a report shows."""

    title: str
    bench: BenchFindings
    traces: Sequence[Trace]  # the reference method's runs of one seed and pool
    ablation: Sequence[Duel]  # the full method against each of its variants
    costs: Sequence[Cost]
    model_bytes: int | None
    reliabilities: Sequence[Reliability]
    risk_coverages: Sequence[RiskCoverage]
    passed_checks: Sequence[str]  # problems that were looked for and not found
    provenance: RunCollection
    command: str  # of the report itself
    claims: Sequence[ClaimFinding] = ()
    drift: Drift | None = None
    landscape: Landscape | None = None
    story: Sequence[PageSection] = ()  # of a demo, after the summary

    @property
    def plain_methods(self) -> list[str]:
        """Methods without variants, which would crowd a figure; all of them if there is nothing else."""
        return [label for label in self.bench.methods if "(" not in label] or self.bench.methods

    @property
    def forwards(self) -> dict[str, float]:
        """Forward passes per image by label."""
        return {cost.label: cost.forwards for cost in self.costs}

    @property
    def milliseconds(self) -> dict[str, float | None]:
        """Median over streams of a step's milliseconds, by label; None where they were not measured."""
        rows = grouped(self.bench.rows, "label")
        times = {
            label: [row.milliseconds for row in own if row.milliseconds is not None] for label, own in rows.items()
        }
        return {label: median(own) if own else None for label, own in times.items()}

    @property
    def figure_streams(self) -> list[str]:
        """The first stream and the one with the most skewed batches."""
        skewed = max(self.bench.streams, key=lambda name: self.bench.majority_shares.get(name, 0.0))
        return list(dict.fromkeys([self.bench.streams[0], skewed]))


def analyse_runs(collection: RunCollection, track: Track, *, command: str) -> ReportFindings:
    """Compute what a report shows."""
    runs = collection.runs
    merged = [run for run in runs if not run.is_single]
    ours, (network, model_bytes) = _reference(collection, merged), _model(collection)
    with track("comparing methods", 1 + len({run.label for run in merged} - {ours})) as advance:
        bench = _bench_findings(collection, ours, network, advance)
        claims = check_claims(runs)
        advance()
    variants = [each for each in bench.duels if each.theirs.startswith(f"{ours}(")]
    datasets = dict.fromkeys(run.arguments["data"]["dataset"] for run in runs)
    return ReportFindings(
        title=DEMO_TITLE if collection.is_demo else f"mergestream on {', '.join(datasets)}",
        bench=replace(bench, duels=[each for each in bench.duels if each not in variants]),
        traces=_traces(runs, ours),
        ablation=variants,
        costs=costs(runs),
        model_bytes=model_bytes,
        reliabilities=reliabilities(merged, smallest=SMALLEST_BIN),
        risk_coverages=risk_coverages(merged),
        passed_checks=_passed_checks(runs),
        provenance=collection,
        command=command,
        claims=claims,
    )


def _reference(collection: RunCollection, merged: Sequence[Run]) -> str:
    """The method that others are compared with: the benchmark's own, else the paper's method, else the first."""
    duels, labels = collection.results.get("duels", []), [run.label for run in merged]
    preferred = [*(each["ours"] for each in duels[:1]), USUAL_REFERENCE, *labels]
    return next((label for label in preferred if label in labels), "")


def _bench_findings(collection: RunCollection, ours: str, network: str, on_duel: Advance) -> BenchFindings:
    results, name = collection.results, collection.runs[0].arguments["data"]["dataset"]
    source, older = DATASETS.get(name), collection.older_runs
    uncounted = [f"{older:,} older runs in {collection.folder} are not counted."] if older else []
    return BenchFindings.of(
        collection.runs,
        ours,
        dataset=name,
        overlap="" if source is None else source.card.overlap,
        warnings=[*results.get("warnings", []), *seen_targets(collection.runs), *uncounted],
        on_duel=on_duel,
        plan=results.get("plan", {}),
        command=results.get("command", ""),
        left_out=[(each["method"], each["why"]) for each in results.get("left_out", [])],
        synthetic=bool(results.get("synthetic", isinstance(source, GeneratedSource))),
        network=results.get("network", network),
    )


def _passed_checks(runs: Sequence[Run]) -> list[str]:
    passed = []
    if not seen_targets(runs):
        passed.append("Leakage: in no run does the pool hold an expert with its target's name.")
    checked = [run for run in runs if "collapsed" in run.metrics and not run.is_single]
    if checked and not collapses(runs):
        passed.append(f"Collapse: in {len(checked):,} runs no class that every expert predicts has vanished.")
    return passed


def _traces(runs: Sequence[Run], ours: str) -> list[Trace]:
    """The reference's runs of the first seed and of each target's first pool, if it has coefficients."""
    candidates = [run for run in runs if run.label == ours]
    seed = min((run.stream_seed for run in candidates), default=0)
    of_seed = [run for run in candidates if run.stream_seed == seed]
    traces = [trace_of(own[0]) for own in grouped(of_seed, "stream", "target").values()]
    return [trace for trace in traces if trace.encoder_coefficients is not None]


def _model(collection: RunCollection) -> tuple[str, int | None]:
    """The network and its bytes on disk, from the first expert that is still there."""
    for folder in (path for pool in collection.pools for path in sorted(filter(is_expert_folder, pool.iterdir()))):
        try:
            return str(read_card(folder).architecture), (Path(folder) / "weights.safetensors").stat().st_size
        except (MergestreamError, OSError):
            continue
    return "", None
