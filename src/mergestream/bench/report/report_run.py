"""A report from a folder of runs: read them, compute what is shown, write the page."""

from collections.abc import Callable, Sequence
from pathlib import Path

from mergestream.bench.analysis.collapse import collapses, unspoken_classes
from mergestream.bench.analysis.collection import Collection, collect, count_runs
from mergestream.bench.analysis.comparison import Duel, Row, duel, rows_of
from mergestream.bench.analysis.confidence import reliabilities, risk_coverages
from mergestream.bench.analysis.cost import costs
from mergestream.bench.analysis.overview import few_batches, line_of, majority_shares, seen_targets
from mergestream.bench.analysis.provenance import provenance_of
from mergestream.bench.analysis.standings import standings
from mergestream.bench.analysis.subgroups import subgroup_rows
from mergestream.bench.analysis.traces import Trace, trace_of
from mergestream.bench.claims.checking import check_claims
from mergestream.bench.drift.weights import SCHEMA_VERSION, Drift
from mergestream.bench.landscape.outcome import Landscape
from mergestream.bench.records import Run
from mergestream.bench.report.bench_report import BenchFindings
from mergestream.bench.report.page import Section
from mergestream.bench.report.report import write_report
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.data.datasets import DATASETS
from mergestream.data.datasets.dataset_sources import GeneratedSource
from mergestream.pool.expert_card import is_expert_folder, read_card
from mergestream.runtime.errors import MergestreamError
from mergestream.runtime.files import read_json
from mergestream.runtime.parallel import Track

USUAL = "entropy_adaptive"


def make_report(
    folder: Path,
    out: Path,
    track: Track,
    *,
    command: str,
    tables: Path | None = None,
    drift: Path | None = None,
    landscape: Path | None = None,
) -> ReportFindings:
    """Read the runs under `folder` and write the page to `out`, its tables beside it.

    `drift` and `landscape` are records that `mergestream drift` wrote.
    """
    drifted = None if drift is None else Drift.from_json(read_json(drift, SCHEMA_VERSION))
    surface = None if landscape is None else Landscape.load(landscape)
    with track("reading runs", count_runs(folder)) as advance:
        found = collect(folder, advance)
    findings = findings_of(found, track, command=command, drift=drifted, landscape=surface)
    write_report(findings, out, tables)
    return findings


def findings_of(
    found: Collection,
    track: Track,
    *,
    command: str,
    rows: list[Row] | None = None,
    duels: list[Duel] | None = None,
    drift: Drift | None = None,
    landscape: Landscape | None = None,
    more: Sequence[Section] = (),
) -> ReportFindings:
    """All that a report shows. Rows and duels may be given by who has them already: they take the longest."""
    runs = found.runs
    merged = [run for run in runs if run.arguments["method"] != "single_expert"]
    ours = _reference(found, merged)
    labels = list(dict.fromkeys(run.arguments["label"] for run in merged))
    variants = [label for label in labels if label.startswith(f"{ours}(")]
    rivals = [label for label in labels if label != ours and label not in variants] if duels is None else []
    with track("comparing methods", 2 + len(rivals) + len(variants)) as advance:
        rows = rows_of(runs) if rows is None else rows
        advance()
        compared = _duels(runs, ours, rivals, advance) if duels is None else duels
        ablation = _duels(runs, ours, variants, advance)
        claims = check_claims(runs, shared_start=drift)
        advance()
    network, size = _model(found)
    return ReportFindings(
        title=_title(found),
        bench=_bench(found, merged, rows, compared, network),
        followed=_followed(runs, ours),
        ablation=ablation,
        costs=costs(runs),
        model_bytes=size,
        reliabilities=reliabilities(merged),
        risk_coverages=risk_coverages(merged),
        checked=_checked(runs),
        provenance=provenance_of(found, command),
        claims=claims,
        drift=drift,
        landscape=landscape,
        more=more,
    )


def _reference(found: Collection, merged: Sequence[Run]) -> str:
    """Who the others are compared with: as the benchmark did it, else the paper's method, else the first."""
    duels, labels = found.results.get("duels", []), [run.arguments["label"] for run in merged]
    wanted = [duels[0]["ours"]] if duels else []
    return next((each for each in [*wanted, USUAL, *labels] if each in labels), "")


def _duels(runs: Sequence[Run], ours: str, others: Sequence[str], advance: Callable[[], None]) -> list[Duel]:
    found = []
    for theirs in others:
        found += duel(runs, ours, theirs)
        advance()
    return found


def _bench(found: Collection, merged: Sequence[Run], rows: list[Row], duels: list[Duel], network: str) -> BenchFindings:
    results, runs = found.results, found.runs
    name = runs[0].arguments["data"]["dataset"]
    source = DATASETS.get(name)
    return BenchFindings(
        plan=results.get("plan", {}),
        command=results.get("command", ""),
        rows=rows,
        duels=duels,
        standings=standings(merged),
        majority_shares=majority_shares(runs),
        subgroups=subgroup_rows(merged),
        collapses=collapses(runs),
        left_out=[(each["method"], each["why"]) for each in results.get("left_out", [])],
        warnings=_warnings(found, "" if source is None else source.card.overlap),
        runs=[line_of(run) for run in runs],
        dataset=name,
        synthetic=bool(results.get("synthetic", isinstance(source, GeneratedSource))),
        network=results.get("network", network),
    )


def _warnings(found: Collection, overlap: str) -> list[str]:
    """What the benchmark said, and what the runs themselves show."""
    runs = found.runs
    shown = [*seen_targets(runs), *few_batches(runs), *unspoken_classes(runs)]
    shown += [f"'{runs[0].arguments['data']['dataset']}': {overlap}"] if overlap else []
    if found.passed_over:
        shown.append(f"{found.passed_over:,} older runs lie in {found.folder} and are not counted.")
    return list(dict.fromkeys([*found.results.get("warnings", []), *shown]))


def _checked(runs: Sequence[Run]) -> list[str]:
    said = []
    if not seen_targets(runs):
        said.append("Leakage: in no run does the pool hold an expert that bears its target's name.")
    looked = [run for run in runs if "collapsed" in run.metrics and run.arguments["method"] != "single_expert"]
    if looked and not collapses(runs):
        said.append(f"Collapse: in {len(looked):,} runs no class that every expert answers has vanished.")
    return said


def _followed(runs: Sequence[Run], ours: str) -> list[Trace]:
    """The reference's runs of the first seed and of each target's first pool."""
    mine = [run for run in runs if run.arguments["label"] == ours]
    seed = min((run.arguments["seed"] for run in mine), default=0)
    first: dict[tuple[str, str], Run] = {}
    for run in mine:
        if run.arguments["seed"] == seed:
            first.setdefault((run.arguments["stream"]["name"], run.arguments["data"]["domain"]), run)
    return [trace_of(run) for run in first.values()]


def _model(found: Collection) -> tuple[str, int | None]:
    """The network and its bytes on disk, from the first expert that can still be seen."""
    for pool in found.pools:
        for folder in sorted(filter(is_expert_folder, pool.iterdir())):
            try:
                return str(read_card(folder).architecture), (folder / "weights.safetensors").stat().st_size
            except (MergestreamError, OSError):
                continue
    return "", None


def _title(found: Collection) -> str:
    names = ", ".join(dict.fromkeys(run.arguments["data"]["dataset"] for run in found.runs))
    return "mergestream demo: four hospitals, each left out in turn" if found.is_demo else f"mergestream on {names}"
