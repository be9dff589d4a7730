"""The data: where they come from, under which licence, and how much of them was seen."""

from mergestream.bench.report.data_text import card_in_words
from mergestream.bench.report.page import Part, Section, bullets, paragraph
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.tables import Table
from mergestream.data.datasets import DATASETS


def data(report: ReportFindings) -> Section:
    bench = report.bench
    parts: list[Part] = []
    if bench.synthetic:
        parts.append(paragraph("These data are synthetic: generated images, no patients."))
    if bench.dataset in DATASETS:
        title, *lines = card_in_words(DATASETS[bench.dataset].card)
        parts += [paragraph(title), bullets([line.strip() for line in lines])]
    else:
        parts.append(
            paragraph(f"'{bench.dataset}' is not one of the data sets that mergestream knows: no licence is on record.")
        )
    shares = ", ".join(f"{name} {100 * share:.0f} %" for name, share in bench.majority_shares.items())
    skew = paragraph(f"Share of a batch's commonest class, as it came out: {shares}.")
    return Section("Data and licences", [*parts, _targets(report), skew])


def _targets(report: ReportFindings) -> Table:
    lines = {line["target"]: line for line in report.bench.runs}
    rows = tuple(
        (name, f"{line['images']:,}", str(line["batches"]), str(line["experts"]), report.provenance.data[name][:16])
        for name, line in lines.items()
    )
    note = "Fingerprint: the first 16 digits of a hash over images and labels."
    return Table("Targets", ("target", "images", "batches a run", "experts", "fingerprint"), rows, note=note)
