"""Everything that the numbers depend on, and the commands that make this page again."""

import json

from mergestream.bench.report.page import PageFold, PageSection, Paragraph, Preformatted
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.result_table import ResultTable

INTRO = "Commands for the runs and this page. Finished runs are reused; the same versions give the same numbers."


def provenance_section(report: ReportFindings) -> PageSection:
    provenance = report.provenance
    plan = json.dumps(report.bench.plan, indent=1, ensure_ascii=False)
    hashes = "\n".join(f"{label}\n  {' '.join(names)}" for label, names in provenance.hashes.items())
    command = report.bench.command or f"(unknown: no results.json in {provenance.folder})"
    return PageSection(
        "Provenance",
        [
            Paragraph(INTRO),
            Preformatted("\n".join(dict.fromkeys([command, provenance.report_command]))),
            _versions(report),
            PageFold("The plan, with all its arguments", [Preformatted(plan)]),
            PageFold("Methods: revisions, options, hashes", [_methods(report)]),
            PageFold("Pools and streams: hashes", [_pools(report), _streams(report)]),
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


def _streams(report: ReportFindings) -> ResultTable:
    rows = tuple((name, target, str(seed), value) for (name, target, seed), value in report.provenance.streams.items())
    return ResultTable("Streams", ("stream", "target", "seed", "hash"), rows)
