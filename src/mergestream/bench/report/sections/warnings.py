"""What a reader must know before believing the numbers."""

from mergestream.bench.report.page import Section, bullets, paragraph
from mergestream.bench.report.report_findings import ReportFindings


def warnings(report: ReportFindings) -> Section:
    said = report.bench.sentences
    parts = [bullets(said)] if said else [paragraph("None.")]
    return Section(
        "Warnings",
        [*parts, paragraph("Looked for and not found:"), bullets(report.checked)] if report.checked else parts,
    )
