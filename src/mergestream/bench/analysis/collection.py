"""Reads a folder of runs: which of them belong together, and the results beside them."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergestream.bench.analysis.bench_findings import RESULTS_VERSION
from mergestream.bench.records import HEADER, SCHEMA_VERSION, Run
from mergestream.methods import list_methods
from mergestream.runtime.errors import InputError
from mergestream.runtime.files import read_json
from mergestream.runtime.parallel import Track, quiet

RUNS, RESULTS, LINES = "runs", "results.json", "results.csv"


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


def collect(folder: Path, track: Track = quiet, names: Sequence[str] = ()) -> RunCollection:
    """Read what `mergestream bench`, `mergestream demo` or `Run.save` wrote under `folder`, or the runs in `names`."""
    root = folder / RUNS if (folder / RUNS).is_dir() else folder
    finished = {path.parent.name: path.parent for path in sorted(root.glob(f"[!.]*/{HEADER}"))}
    if not finished:
        raise InputError(
            f"There is no finished run in {root}. Give the folder that 'mergestream bench --out' or "
            f"'mergestream demo --out' wrote."
        )
    results = read_json(folder / RESULTS, RESULTS_VERSION) if (folder / RESULTS).is_file() else {}
    listed = names or results.get("runs") or _listed(folder / LINES)
    absent = [name for name in listed if name not in finished]
    if absent:
        raise InputError(
            f"{len(absent)} of the {len(listed)} runs that {folder} lists are missing, such as {absent[0]}. "
            f"Run its command again: {results.get('command') or 'see results.json'}"
        )
    chosen = list(listed) or _newest(finished)
    runs, environments = [], {}
    with track("reading runs", len(chosen)) as advance:
        for name in chosen:
            runs.append(Run.load(finished[name]))
            environment = read_json(finished[name] / HEADER, SCHEMA_VERSION)["environment"]
            environments[str(environment)] = environment
            advance()
    return RunCollection(folder, runs, results, list(environments.values()), len(finished) - len(chosen))


def _listed(path: Path) -> list[str]:
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return [line["run"] for line in csv.DictReader(file)]


def _newest(finished: Mapping[str, Path]) -> list[str]:
    """The newest run of each kind, methods in their usual order; the folders, named by hashes, have none."""
    newest: dict[tuple[Any, ...], str] = {}
    methods = list_methods()
    for name in sorted(finished, key=lambda each: (finished[each] / HEADER).stat().st_mtime):
        arguments = read_json(finished[name] / HEADER, SCHEMA_VERSION)["arguments"]
        method, data = arguments["method"], arguments["data"]
        place = methods.index(method) if method in methods else len(methods)
        where = arguments["stream"]["name"], data["dataset"], data["domain"], arguments["seed"]
        key = place, arguments["label"] != method, arguments["label"], *where, arguments["pool"]["fingerprint"]
        newest[key] = name
    return [newest[key] for key in sorted(newest)]
