"""Everything the numbers depend on, and how to get this page again."""

import json

from mergestream.bench.report.page import Fold, Section, paragraph, preformatted
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.tables import Table

TOLD = "The runs, then this page. What is done already is not done again; the same versions give the same numbers."


def provenance(report: ReportFindings) -> Section:
    found = report.provenance
    plan = json.dumps(report.bench.plan, indent=1, ensure_ascii=False)
    hashes = "\n".join(f"{label}\n  {' '.join(names)}" for label, names in found.hashes.items())
    command = report.bench.command or f"(unknown: no results.json in {found.folder})"
    return Section(
        "Provenance",
        [
            paragraph(TOLD),
            preformatted("\n".join(dict.fromkeys([command, found.report_command]))),
            _versions(report),
            Fold("The plan, with all its arguments", [preformatted(plan)]),
            Fold("Methods: revisions, options, hashes", [_methods(report)]),
            Fold("Pools and streams: hashes", [_pools(report), _streams(report)]),
            Fold("Runs: the name of each folder is the hash of its arguments", [preformatted(hashes)]),
        ],
    )


def _versions(report: ReportFindings) -> Table:
    environments = report.provenance.environments
    names = list(dict.fromkeys(name for each in environments for name in each))
    columns = ("library", *(f"machine {number}" for number in range(1, len(environments) + 1)))
    rows = tuple((name, *(str(each.get(name, "–")) for each in environments)) for name in names)
    return Table("Versions and machines", columns, rows, note="As the runs recorded them.")


def _methods(report: ReportFindings) -> Table:
    rows = tuple(
        (label, str(each["revision"]), json.dumps(each["options"], ensure_ascii=False), _sources(each["sources"]))
        for label, each in report.provenance.methods.items()
    )
    return Table("Methods as they were run", ("method", "revision", "options", "also depends on"), rows)


def _sources(found: dict[str, set[str]]) -> str:
    return "; ".join(f"{name} {', '.join(sorted(hashes))}" for name, hashes in found.items()) or "–"


def _pools(report: ReportFindings) -> Table:
    rows = tuple((fingerprint, ", ".join(experts)) for fingerprint, experts in report.provenance.pools.items())
    return Table("Pools that answered", ("fingerprint", "experts in order"), rows)


def _streams(report: ReportFindings) -> Table:
    rows = tuple((name, target, str(seed), value) for (name, target, seed), value in report.provenance.streams.items())
    return Table("Streams", ("stream", "target", "seed", "hash"), rows)
