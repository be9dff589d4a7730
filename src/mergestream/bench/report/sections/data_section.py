"""The data: where they come from, under which licence, and how much of them was used."""

from mergestream.bench.report.bench_files import describe_majority_shares
from mergestream.bench.report.dataset_card import describe_card
from mergestream.bench.report.page import Bullets, PageSection, Paragraph, Part
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.result_table import ResultTable
from mergestream.data.datasets import DATASETS


def data_section(report: ReportFindings) -> PageSection:
    bench = report.bench
    parts: list[Part] = []
    if bench.synthetic:
        parts.append(Paragraph("These data are synthetic: generated images, no patients."))
    if bench.dataset in DATASETS:
        title, *lines = describe_card(DATASETS[bench.dataset].card)
        parts += [Paragraph(title), Bullets([line.strip() for line in lines])]
    else:
        parts.append(Paragraph(f"'{bench.dataset}' is not a data set of mergestream: its licence is not on record."))
    skew = Paragraph(describe_majority_shares(bench.majority_shares))
    return PageSection("Data and licences", [*parts, _targets(report), skew])


def _targets(report: ReportFindings) -> ResultTable:
    lines = {line["target"]: line for line in report.bench.runs}
    rows = tuple(
        (name, f"{line['images']:,}", str(line["batches"]), str(line["experts"]), report.provenance.data[name][:16])
        for name, line in lines.items()
    )
    note = "Fingerprint: the first 16 digits of a hash over images and labels."
    return ResultTable("Targets", ("target", "images", "batches per run", "experts", "fingerprint"), rows, note=note)
