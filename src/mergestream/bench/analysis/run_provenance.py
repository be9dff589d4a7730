"""Everything that the numbers of a set of runs depend on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mergestream.bench.analysis.collection import RunCollection

SOURCES = ("base", "statistics", "candidates")


@dataclass(frozen=True)
class RunProvenance:
    """Arguments and hashes as the runs recorded them, and the command that made the report."""

    methods: Mapping[str, dict[str, Any]]  # label -> revision, options, hashes of what else it uses
    pools: Mapping[str, Sequence[str]]  # fingerprint -> experts in order
    data: Mapping[str, str]  # target -> fingerprint
    streams: Mapping[tuple[str, str, int], str]  # name, target, seed -> hash
    hashes: Mapping[str, Sequence[str]]  # label -> its runs
    environments: Sequence[Mapping[str, Any]]
    folder: str
    report_command: str


def provenance_of(collection: RunCollection, report_command: str) -> RunProvenance:
    methods: dict[str, dict[str, Any]] = {}
    hashes: dict[str, list[str]] = {}
    every = [run.arguments for run in collection.runs]
    for run, arguments in zip(collection.runs, every, strict=True):
        hashes.setdefault(arguments["label"], []).append(run.hash)
        method = methods.setdefault(
            arguments["label"],
            {"revision": arguments["revision"], "options": arguments["options"], "sources": {}},
        )
        for name in SOURCES:
            if name in arguments:
                method["sources"].setdefault(name, set()).add(arguments[name][:16])
    return RunProvenance(
        methods=methods,
        pools={each["pool"]["fingerprint"]: each["pool"]["experts"] for each in every},
        data={each["data"]["domain"]: each["data"]["fingerprint"] for each in every},
        streams={(a["stream"]["name"], a["data"]["domain"], a["seed"]): a["stream"]["hash"] for a in every},
        hashes=hashes,
        environments=collection.environments,
        folder=str(collection.folder),
        report_command=report_command,
    )
