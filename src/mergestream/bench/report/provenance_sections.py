"""Parts of the report's last sections: the data set's card, provenance."""

import json
from collections.abc import Sequence

from mergestream.bench.analysis.collection import RunCollection
from mergestream.bench.analysis.comparison import grouped
from mergestream.bench.report.report_findings import ReportFindings
from mergestream.bench.report.result_table import ResultTable, grid_table
from mergestream.data.datasets import DATASETS, DatasetCard

SOURCES = ("base", "candidates", "statistics")  # hashes of what a method uses beside the experts


def card_lines(report: ReportFindings) -> list[str]:
    """The data set's card, line by line; empty if it is not one of ours."""
    source = DATASETS.get(report.bench.dataset)
    return [line.strip() for line in describe_card(source.card)] if source else []


def describe_card(card: DatasetCard) -> list[str]:
    """A title, then one line per fact."""
    facts = {
        "domains": _listed(card.domains),
        "outside tests": _listed(card.outside),
        "classes": _listed(card.classes, 12),
        "images": _images(card),
        "never split": card.group,
        "subgroups": _listed(card.subgroups),
        "parts": _listed(card.parts),
        "views": _listed(card.views),
        "overlap": card.overlap,
        "layout": card.layout,
        "licence": card.licence,
        "where": card.source,
        "loader checked against": f"{card.verified}. {card.verified_note}" if card.verified else "",
        "notes": card.notes,
    }
    return [f"{card.name}: {card.title}", *(f"  {what}: {text}" for what, text in facts.items() if text)]


def _listed(names: Sequence[str], shown: int = 9) -> str:
    return ", ".join(names[:shown]) + (f", … ({len(names)} in all)" if len(names) > shown else "")


def _images(card: DatasetCard) -> str:
    inside = sum(count for domain, count in card.counts.items() if domain not in card.outside) or card.total or 0
    outside = sum(card.counts.get(domain, 0) for domain in card.outside)
    return (f"{inside:,}" if inside else "") + (f", and {outside:,} in the outside tests" if outside else "")


def target_table(report: ReportFindings) -> ResultTable:
    lines = {line["target"]: line for line in report.bench.runs}
    hashes = {run.target: run.arguments["data"]["fingerprint"][:16] for run in report.provenance.runs}
    rows = tuple(
        (name, f"{line['images']:,}", str(line["batches"]), str(line["experts"]), hashes[name])
        for name, line in lines.items()
    )
    note = "Fingerprint: the first 16 digits of a hash over images and labels."
    return ResultTable("Targets", ("target", "images", "batches per run", "experts", "fingerprint"), rows, note=note)


def commands(report: ReportFindings) -> str:
    """The commands of the runs and of the page."""
    bench = report.bench.command or f"(unknown: no results.json in {report.provenance.folder})"
    return "\n".join(dict.fromkeys([bench, report.command]))


def plan_text(report: ReportFindings) -> str:
    return json.dumps(report.bench.plan, indent=1, ensure_ascii=False)


def run_hashes(collection: RunCollection) -> str:
    runs = grouped(collection.runs, "label")
    return "\n".join(f"{label}\n  {' '.join(run.hash for run in own)}" for label, own in runs.items())


def version_table(collection: RunCollection) -> ResultTable:
    machines = {f"machine {number}": each for number, each in enumerate(collection.environments, start=1)}
    cells = {(name, machine): str(value) for machine, each in machines.items() for name, value in each.items()}
    return grid_table("Versions and machines", "library", cells, str, note="As the runs recorded them.")


def method_table(collection: RunCollection) -> ResultTable:
    rows = []
    for label, runs in grouped(collection.runs, "label").items():
        own = [run.arguments for run in runs]
        hashes = {name: sorted({each[name][:16] for each in own if name in each}) for name in SOURCES}
        sources = "; ".join(f"{name} {', '.join(values)}" for name, values in hashes.items() if values) or "–"
        rows.append((label, str(own[-1]["revision"]), json.dumps(own[-1]["options"], ensure_ascii=False), sources))
    return ResultTable("Methods as they were run", ("method", "revision", "options", "also depends on"), tuple(rows))


def pool_table(collection: RunCollection) -> ResultTable:
    pools = {run.arguments["pool"]["fingerprint"]: run.arguments["pool"]["experts"] for run in collection.runs}
    rows = tuple((fingerprint, ", ".join(experts)) for fingerprint, experts in pools.items())
    return ResultTable("Pools that answered", ("fingerprint", "experts in order"), rows)


def stream_table(collection: RunCollection) -> ResultTable:
    places = {(run.stream, run.target, str(run.stream_seed)): run.arguments for run in collection.runs}
    rows = tuple((*place, arguments["stream"]["hash"]) for place, arguments in places.items())
    return ResultTable("Streams", ("stream", "target", "seed", "hash"), rows)
