"""Reads a folder of runs: which of them belong together, the results beside them, and their provenance."""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergestream.bench.records import HEADER, SCHEMA_VERSION, Run, is_finished
from mergestream.methods import list_methods
from mergestream.runtime.errors import InputError
from mergestream.runtime.files import read_json

RUNS, RESULTS, LINES = "runs", "results.json", "results.csv"
SOURCES = ("base", "statistics", "candidates")


@dataclass(frozen=True)
class RunCollection:
    """Runs of one benchmark or demo, its `results` (or {}), and the machines and versions that computed them."""

    folder: Path
    runs: list[Run]
    results: dict[str, Any]
    environments: list[dict[str, Any]]
    older_runs: int  # finished runs in the folder that are not counted

    @property
    def is_demo(self) -> bool:
        return "experts" in self.results

    @property
    def pools(self) -> list[Path]:
        """Folders of the pools that answered, as far as they still exist."""
        named = [Path(each) for each in self.results.get("plan", {}).get("pools", [])]
        beside = sorted(self.folder.glob("pool*")) if self.is_demo else []
        return [each for each in [*named, *beside] if each.is_dir() and "." not in each.name]


def collect(folder: Path, on_run: Callable[[], None] = lambda: None) -> RunCollection:
    """Read what `mergestream bench`, `mergestream demo` or `Run.save` wrote under `folder`."""
    root = folder / RUNS if (folder / RUNS).is_dir() else folder
    finished = {path.name: path for path in sorted(root.glob("[!.]*")) if is_finished(path)} if root.is_dir() else {}
    if not finished:
        raise InputError(
            f"There is no finished run in {root}. Give the folder that 'mergestream bench --out' or 'mergestream demo "
            f"--out' wrote."
        )
    results = read_json(folder / RESULTS, SCHEMA_VERSION) if (folder / RESULTS).is_file() else {}
    headers = {name: read_json(path / HEADER, SCHEMA_VERSION) for name, path in finished.items()}
    chosen = _chosen(folder, finished, headers, results)
    runs = []
    for name in chosen:
        runs.append(Run.load(finished[name]))
        on_run()
    environments = _distinct([headers[name]["environment"] for name in chosen])
    return RunCollection(folder, runs, results, environments, len(finished) - len(chosen))


def collection_of(folder: Path, runs: list[Run], results: dict[str, Any]) -> RunCollection:
    """What `collect` would read, for a caller that has the runs already."""
    headers = [read_json(folder / RUNS / run.hash / HEADER, SCHEMA_VERSION) for run in runs]
    return RunCollection(folder, runs, results, _distinct([each["environment"] for each in headers]), 0)


def _distinct(environments: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({str(each): each for each in environments}.values())


def count_runs(folder: Path) -> int:
    """Estimate how many runs will be read, for a progress bar."""
    root = folder / RUNS if (folder / RUNS).is_dir() else folder
    return sum(1 for _ in root.glob(f"[!.]*/{HEADER}"))


def _chosen(
    folder: Path, finished: dict[str, Path], headers: dict[str, dict[str, Any]], results: dict[str, Any]
) -> list[str]:
    """The runs listed in the results, in that order; without a list, the newest of each kind."""
    listed = results.get("runs") or _listed(folder / LINES)
    if listed:
        absent = [name for name in listed if name not in finished]
        if absent:
            raise InputError(
                f"{len(absent)} of the {len(listed)} runs that {folder} lists are missing, such as {absent[0]}. "
                f"Run its command again: {results.get('command') or 'see results.json'}"
            )
        return list(listed)
    # A demo that was run again with other experts keeps its old runs; its pools differ by their seed.
    pool_matters = "experts" not in results
    newest: dict[tuple[Any, ...], str] = {}
    for name in sorted(finished, key=lambda each: (finished[each] / HEADER).stat().st_mtime):
        newest[_kind(headers[name]["arguments"], pool_matters)] = name
    return _in_order(newest.values(), headers, results.get("plan", {}).get("streams", ()))


def _listed(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [line["run"] for line in csv.DictReader(file)]


def _kind(arguments: dict[str, Any], pool_matters: bool) -> tuple[Any, ...]:
    pool = arguments["pool"]["fingerprint"] if pool_matters else ""
    places = arguments["label"], arguments["stream"]["name"], arguments["data"]["dataset"], arguments["data"]["domain"]
    return *places, arguments["seed"], pool


def _in_order(names: Iterable[str], headers: dict[str, dict[str, Any]], streams: Sequence[str]) -> list[str]:
    """Sort methods and streams in their usual order; the folders, named by hashes, have none."""
    methods = list_methods()

    def key(name: str) -> tuple[Any, ...]:
        arguments = headers[name]["arguments"]
        method, stream = arguments["method"], arguments["stream"]["name"]
        place = methods.index(method) if method in methods else len(methods)
        order = list(streams).index(stream) if stream in streams else len(streams)
        return place, arguments["label"] != method, arguments["label"], order, stream, arguments["seed"], name

    return sorted(names, key=key)


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
            arguments["label"], {"revision": arguments["revision"], "options": arguments["options"], "sources": {}}
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
