"""The report's last sections: warnings, data and licences, provenance."""

import json

from mergestream.bench.report.bench_files import describe_majority_shares
from mergestream.bench.report.dataset_card import describe_card
from mergestream.bench.report.page import Bullets, PageFold, PageSection, Paragraph, Part, Preformatted
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.result_table import ResultTable
from mergestream.data.datasets import DATASETS

PROVENANCE_INTRO = (
    "Commands for the runs and this page. Finished runs are reused; the same versions give the same numbers."
)


def warnings_section(report: ReportFindings) -> PageSection:
    warnings = report.bench.sentences
    parts: list[Part] = [Bullets(warnings) if warnings else Paragraph("None.")]
    if report.passed_checks:
        parts += [Paragraph("Checks that passed:"), Bullets(report.passed_checks)]
    return PageSection("Warnings", parts)


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


def provenance_section(report: ReportFindings) -> PageSection:
    provenance = report.provenance
    plan = json.dumps(report.bench.plan, indent=1, ensure_ascii=False)
    hashes = "\n".join(f"{label}\n  {' '.join(names)}" for label, names in provenance.hashes.items())
    command = report.bench.command or f"(unknown: no results.json in {provenance.folder})"
    return PageSection(
        "Provenance",
        [
            Paragraph(PROVENANCE_INTRO),
            Preformatted("\n".join(dict.fromkeys([command, provenance.report_command]))),
            _versions(report),
            PageFold("The plan, with all its arguments", [Preformatted(plan)]),
            PageFold("Methods: revisions, options, hashes", [_methods(report)]),
            PageFold("Pools and streams: hashes", [_pools(report), _stream_hashes(report)]),
            PageFold("Runs: each folder is named by the hash of its arguments", [Preformatted(hashes)]),
        ],
    )


def _versions(report: ReportFindings) -> ResultTable:
    environments = report.provenance.environments
    names = list(dict.fromkeys(name for each in environments for name in each))
    columns = ("library", *(f"machine {number}" for number in range(1, len(environments) + 1)))
    rows = tuple((name, *(str(each.get(name, "–")) for each in environments)) for name in names)
    return ResultTable("Versions and machines", columns, rows, note="As the runs recorded them.")


def _methods(report: ReportFindings) -> ResultTable:
    rows = tuple(
        (label, str(each["revision"]), json.dumps(each["options"], ensure_ascii=False), _sources(each["sources"]))
        for label, each in report.provenance.methods.items()
    )
    return ResultTable("Methods as they were run", ("method", "revision", "options", "also depends on"), rows)


def _sources(sources: dict[str, set[str]]) -> str:
    return "; ".join(f"{name} {', '.join(sorted(hashes))}" for name, hashes in sources.items()) or "–"


def _pools(report: ReportFindings) -> ResultTable:
    rows = tuple((fingerprint, ", ".join(experts)) for fingerprint, experts in report.provenance.pools.items())
    return ResultTable("Pools that answered", ("fingerprint", "experts in order"), rows)


def _stream_hashes(report: ReportFindings) -> ResultTable:
    rows = tuple((name, target, str(seed), value) for (name, target, seed), value in report.provenance.streams.items())
    return ResultTable("Streams", ("stream", "target", "seed", "hash"), rows)
