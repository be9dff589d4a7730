"""Parts of the report's last sections: data and licences, provenance."""

import json

from mergestream.bench.analysis.collection import RunProvenance
from mergestream.bench.report.dataset_card import describe_card
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.result_table import ResultTable, grid_table
from mergestream.data.datasets import DATASETS


def card_lines(report: ReportFindings) -> list[str]:
    """The data set's card, line by line; empty if it is not one of ours."""
    source = DATASETS.get(report.bench.dataset)
    return [line.strip() for line in describe_card(source.card)] if source else []


def target_table(report: ReportFindings) -> ResultTable:
    lines = {line["target"]: line for line in report.bench.runs}
    rows = tuple(
        (name, f"{line['images']:,}", str(line["batches"]), str(line["experts"]), report.provenance.data[name][:16])
        for name, line in lines.items()
    )
    note = "Fingerprint: the first 16 digits of a hash over images and labels."
    return ResultTable("Targets", ("target", "images", "batches per run", "experts", "fingerprint"), rows, note=note)


def commands(report: ReportFindings) -> str:
    """The commands of the runs and of the page."""
    bench = report.bench.command or f"(unknown: no results.json in {report.provenance.folder})"
    return "\n".join(dict.fromkeys([bench, report.provenance.report_command]))


def plan_text(report: ReportFindings) -> str:
    return json.dumps(report.bench.plan, indent=1, ensure_ascii=False)


def run_hashes(provenance: RunProvenance) -> str:
    return "\n".join(f"{label}\n  {' '.join(names)}" for label, names in provenance.hashes.items())


def version_table(provenance: RunProvenance) -> ResultTable:
    machines = {f"machine {number}": each for number, each in enumerate(provenance.environments, start=1)}
    cells = {(name, machine): str(value) for machine, each in machines.items() for name, value in each.items()}
    return grid_table("Versions and machines", "library", cells, str, note="As the runs recorded them.")


def method_table(provenance: RunProvenance) -> ResultTable:
    rows = tuple(
        (label, str(each["revision"]), json.dumps(each["options"], ensure_ascii=False), _sources(each["sources"]))
        for label, each in provenance.methods.items()
    )
    return ResultTable("Methods as they were run", ("method", "revision", "options", "also depends on"), rows)


def _sources(sources: dict[str, set[str]]) -> str:
    return "; ".join(f"{name} {', '.join(sorted(hashes))}" for name, hashes in sources.items()) or "–"


def pool_table(provenance: RunProvenance) -> ResultTable:
    rows = tuple((fingerprint, ", ".join(experts)) for fingerprint, experts in provenance.pools.items())
    return ResultTable("Pools that answered", ("fingerprint", "experts in order"), rows)


def stream_table(provenance: RunProvenance) -> ResultTable:
    rows = tuple((name, target, str(seed), value) for (name, target, seed), value in provenance.streams.items())
    return ResultTable("Streams", ("stream", "target", "seed", "hash"), rows)
