"""Warnings to read before trusting the numbers, and the checks that passed."""

from mergestream.bench.report.page import Bullets, PageSection, Paragraph, Part
from mergestream.bench.report.report_findings import ReportFindings


def warnings_section(report: ReportFindings) -> PageSection:
    warnings = report.bench.sentences
    parts: list[Part] = [Bullets(warnings) if warnings else Paragraph("None.")]
    if report.passed_checks:
        parts += [Paragraph("Checks that passed:"), Bullets(report.passed_checks)]
    return PageSection("Warnings", parts)
