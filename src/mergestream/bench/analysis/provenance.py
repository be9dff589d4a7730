"""Everything the numbers of a set of runs depend on, by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mergestream.bench.analysis.collection import Collection

SOURCES = ("base", "statistics", "candidates")


@dataclass(frozen=True)
class Provenance:
    """Arguments and hashes as the runs recorded them, and the commands that give them again."""

    methods: Mapping[str, dict[str, Any]]  # label -> revision, options, hashes of what else it uses
    pools: Mapping[str, Sequence[str]]  # fingerprint -> experts in order
    data: Mapping[str, str]  # target -> fingerprint
    streams: Mapping[tuple[str, str, int], str]  # name, target, seed -> hash
    hashes: Mapping[str, Sequence[str]]  # label -> its runs
    environments: Sequence[Mapping[str, Any]]
    folder: str
    report_command: str


def provenance_of(found: Collection, report_command: str) -> Provenance:
    methods: dict[str, dict[str, Any]] = {}
    hashes: dict[str, list[str]] = {}
    told = [run.arguments for run in found.runs]
    for run, arguments in zip(found.runs, told, strict=True):
        hashes.setdefault(arguments["label"], []).append(run.hash)
        known = methods.setdefault(
            arguments["label"],
            {"revision": arguments["revision"], "options": arguments["options"], "sources": {}},
        )
        for name in SOURCES:
            if name in arguments:
                known["sources"].setdefault(name, set()).add(arguments[name][:16])
    return Provenance(
        methods=methods,
        pools={each["pool"]["fingerprint"]: each["pool"]["experts"] for each in told},
        data={each["data"]["domain"]: each["data"]["fingerprint"] for each in told},
        streams={(a["stream"]["name"], a["data"]["domain"], a["seed"]): a["stream"]["hash"] for a in told},
        hashes=hashes,
        environments=found.environments,
        folder=str(found.folder),
        report_command=report_command,
    )
