"""The report: findings in, one page and its tables as files out."""

from collections.abc import Callable, Sequence
from pathlib import Path

from mergestream.files import make_folder, write_text
from mergestream.reporting.page import NOTICE, Section, render
from mergestream.reporting.report_findings import ReportFindings
from mergestream.reporting.sections.ablation import ablation
from mergestream.reporting.sections.claims import claims
from mergestream.reporting.sections.confidence import confidence
from mergestream.reporting.sections.cost import cost
from mergestream.reporting.sections.data import data
from mergestream.reporting.sections.drift import drift
from mergestream.reporting.sections.landscape import landscape
from mergestream.reporting.sections.provenance import provenance
from mergestream.reporting.sections.results import results
from mergestream.reporting.sections.streams import streams
from mergestream.reporting.sections.summary import summary
from mergestream.reporting.sections.warnings import warnings
from mergestream.reporting.table_markup import slug
from mergestream.reporting.tables import Table, to_latex, to_markdown

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
