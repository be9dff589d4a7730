"""The report of a folder of runs: one page, and its tables as files."""

from collections.abc import Callable
from pathlib import Path

from mergestream.bench.analysis.collection import collect, count_runs
from mergestream.bench.drift.pool_drift import Drift
from mergestream.bench.landscape.landscape_record import Landscape
from mergestream.bench.report.closing_sections import data_section, provenance_section, warnings_section
from mergestream.bench.report.expert_sections import claims_section, drift_section, landscape_section
from mergestream.bench.report.method_sections import confidence_section, cost_section, streams_section
from mergestream.bench.report.page import NOTICE, PageSection, render, slug
from mergestream.bench.report.report_findings import ReportFindings, analyse_runs
from mergestream.bench.report.result_sections import ablation_section, results_section, summary_section
from mergestream.bench.report.result_table import to_latex, to_markdown
from mergestream.runtime.files import make_folder, write_text
from mergestream.runtime.parallel import Track

SYNTHETIC = "The data are synthetic: generated images, no patients."
MakeSection = Callable[[ReportFindings], PageSection | None]
# In the order of the page; a command's own sections come before the closing ones.
SECTIONS: tuple[MakeSection, ...] = (
    summary_section,
    results_section,
    ablation_section,
    streams_section,
    claims_section,
    drift_section,
    landscape_section,
    cost_section,
    confidence_section,
    warnings_section,
)
CLOSING_SECTIONS: tuple[MakeSection, ...] = (data_section, provenance_section)


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
    drift_record = None if drift is None else Drift.load(drift)
    landscape_record = None if landscape is None else Landscape.load(landscape)
    with track("reading runs", count_runs(folder)) as advance:
        collection = collect(folder, advance)
    findings = analyse_runs(collection, track, command=command, drift=drift_record, landscape=landscape_record)
    write_report(findings, out, tables)
    return findings


def write_report(report: ReportFindings, out: Path, tables: Path | None = None) -> None:
    """Write the page to `out`, and every table as Markdown and LaTeX to `tables` (default: beside the page)."""
    written = [make(report) for make in SECTIONS]
    closing = [make(report) for make in CLOSING_SECTIONS]
    sections = [section for section in (*written, *report.more, *closing) if section is not None]
    notice = f"{SYNTHETIC} {NOTICE}" if report.bench.synthetic else NOTICE
    write_text(out, render(report.title, notice, sections, report.labels))
    folder = tables or tables_beside(out)
    make_folder(folder)
    for table in (table for section in sections for table in section.tables()):
        name = slug(table.title)
        write_text(folder / f"{name}.md", f"{to_markdown(table)}\n{table.note}\n".rstrip("\n") + "\n")
        write_text(folder / f"{name}.tex", to_latex(table))


def tables_beside(out: Path) -> Path:
    return out.with_name(f"{out.stem}-tables")
