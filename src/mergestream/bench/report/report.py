"""The report: findings in, one page and its tables as files out."""

from collections.abc import Callable, Sequence
from pathlib import Path

from mergestream.bench.report.page import NOTICE, Section, render
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.sections.ablation import ablation
from mergestream.bench.report.sections.claims import claims
from mergestream.bench.report.sections.confidence import confidence
from mergestream.bench.report.sections.cost import cost
from mergestream.bench.report.sections.data import data
from mergestream.bench.report.sections.drift import drift
from mergestream.bench.report.sections.landscape import landscape
from mergestream.bench.report.sections.provenance import provenance
from mergestream.bench.report.sections.results import results
from mergestream.bench.report.sections.streams import streams
from mergestream.bench.report.sections.summary import summary
from mergestream.bench.report.sections.warnings import warnings
from mergestream.bench.report.table_markup import slug
from mergestream.bench.report.tables import Table, to_latex, to_markdown
from mergestream.runtime.files import make_folder, write_text

SYNTHETIC = "The data are synthetic: generated images, no patients."
# In the order of the page; sections of a command's own come before the last two.
SECTIONS: tuple[Callable[[ReportFindings], Section | None], ...] = (
    summary,
    results,
    ablation,
    streams,
    claims,
    drift,
    landscape,
    cost,
    confidence,
    warnings,
)
CLOSING: tuple[Callable[[ReportFindings], Section | None], ...] = (data, provenance)


def write_report(report: ReportFindings, out: Path, tables: Path | None = None) -> None:
    """The page to `out`; every table as Markdown and LaTeX into the folder `tables`, by default beside the page."""
    sections = sections_of(report)
    notice = f"{SYNTHETIC} {NOTICE}" if report.bench.synthetic else NOTICE
    write_text(out, render(report.title, notice, sections, report.labels))
    _write_tables([table for section in sections for table in section.tables()], tables or tables_beside(out))


def sections_of(report: ReportFindings) -> list[Section]:
    written = [make(report) for make in SECTIONS]
    closing = [make(report) for make in CLOSING]
    return [each for each in (*written, *report.more, *closing) if each is not None]


def tables_beside(out: Path) -> Path:
    return out.with_name(f"{out.stem}-tables")


def _write_tables(tables: Sequence[Table], folder: Path) -> None:
    make_folder(folder)
    for table in tables:
        name = slug(table.title)
        write_text(folder / f"{name}.md", f"{to_markdown(table)}\n{table.note}\n".rstrip("\n") + "\n")
        write_text(folder / f"{name}.tex", to_latex(table))
