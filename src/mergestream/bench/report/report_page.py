"""The report of a folder of runs: one page, and its tables as files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from mergestream.bench.analysis import duels
from mergestream.bench.analysis.collection import collect
from mergestream.bench.claims import claim_finding
from mergestream.bench.drift import drift_report
from mergestream.bench.drift.pool_drift import Drift
from mergestream.bench.landscape import landscape_record
from mergestream.bench.report import (
    bench_tables,
    expert_sections,
    method_sections,
    provenance_sections,
    result_sections,
)
from mergestream.bench.report.demo_story import with_story
from mergestream.bench.report.page import page_notice, render, write_tables
from mergestream.bench.report.report_findings import ReportFindings, analyse_runs
from mergestream.data.datasets import load_dataset
from mergestream.runtime.files import make_folder, write_text
from mergestream.runtime.parallel import Track

# Modules whose functions the template calls.
SECTIONS = (expert_sections, method_sections, provenance_sections, result_sections)
DESCRIPTIONS = (bench_tables, claim_finding, drift_report, duels, landscape_record)


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

    `drift` and `landscape` are records that `mergestream drift` and `mergestream landscape` wrote.
    """
    drift_record = None if drift is None else Drift.load(drift)
    surface = None if landscape is None else landscape_record.Landscape.load(landscape)
    findings = analyse_runs(collect(folder, track), track, command=command)
    findings = replace(findings, drift=drift_record, landscape=surface)
    if findings.provenance.is_demo:
        images = findings.provenance.results["plan"]["images"]
        findings = with_story(findings, load_dataset(findings.bench.dataset, images=images))
    write_report(findings, out, tables)
    return findings


def write_report(report: ReportFindings, out: Path, tables: Path | None = None) -> None:
    """Write the page to `out`, and every table as Markdown and LaTeX to `tables` (default: beside the page)."""
    notice = page_notice(report.bench.synthetic)
    values: dict[str, Any] = {each.__name__.rpartition(".")[2]: each for each in (*SECTIONS, *DESCRIPTIONS)}
    values["streams"] = report.bench.streams
    page, shown = render("report.html.j2", report.title, notice, report.bench.labels, report=report, **values)
    write_text(out, page)
    write_tables(shown, make_folder(tables or tables_beside(out)))


def tables_beside(out: Path) -> Path:
    return out.with_name(f"{out.stem}-tables")
