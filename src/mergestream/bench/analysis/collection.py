"""A folder of runs, read back: which of them belong together, and what was written beside them."""

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergestream.bench.records import HEADER, SCHEMA_VERSION, Run, is_finished
from mergestream.methods import list_methods
from mergestream.runtime.errors import InputError
from mergestream.runtime.files import read_json

RUNS, RESULTS, LINES = "runs", "results.json", "results.csv"


@dataclass(frozen=True)
class Collection:
    """Runs of one benchmark or demo, `results` as it wrote them (or {}), and where each run was computed."""

    folder: Path
    runs: list[Run]
    results: dict[str, Any]
    environments: list[dict[str, Any]]
    passed_over: int  # finished runs that lie there and are not counted

    @property
    def is_demo(self) -> bool:
        return "experts" in self.results

    @property
    def pools(self) -> list[Path]:
        """Folders of the pools that answered, those that can still be seen from here."""
        named = [Path(each) for each in self.results.get("plan", {}).get("pools", [])]
        beside = sorted(self.folder.glob("pool*")) if self.is_demo else []
        return [each for each in [*named, *beside] if each.is_dir() and "." not in each.name]


def collect(folder: Path, on_run: Callable[[], None] = lambda: None) -> Collection:
    """Read what `mergestream bench`, `mergestream demo` or `Run.save` wrote under `folder`."""
    root = folder / RUNS if (folder / RUNS).is_dir() else folder
    found = {path.name: path for path in sorted(root.glob("[!.]*")) if is_finished(path)} if root.is_dir() else {}
    if not found:
        raise InputError(
            f"There is no finished run in {root}. Give the folder that 'mergestream bench --out' or 'mergestream demo "
            f"--out' wrote."
        )
    results = read_json(folder / RESULTS, SCHEMA_VERSION) if (folder / RESULTS).is_file() else {}
    headers = {name: read_json(path / HEADER, SCHEMA_VERSION) for name, path in found.items()}
    chosen = _chosen(folder, found, headers, results)
    runs = []
    for name in chosen:
        runs.append(Run.load(found[name]))
        on_run()
    environments = list({str(headers[n]["environment"]): headers[n]["environment"] for n in chosen}.values())
    return Collection(folder, runs, results, environments, len(found) - len(chosen))


def collection_of(folder: Path, runs: list[Run], results: dict[str, Any]) -> Collection:
    """What `collect` would read, by who has the runs already."""
    headers = [read_json(folder / RUNS / run.hash / HEADER, SCHEMA_VERSION) for run in runs]
    environments = list({str(each["environment"]): each["environment"] for each in headers}.values())
    return Collection(folder, runs, results, environments, 0)


def count_runs(folder: Path) -> int:
    """About how many runs will be read: for a progress bar."""
    root = folder / RUNS if (folder / RUNS).is_dir() else folder
    return sum(1 for _ in root.glob(f"[!.]*/{HEADER}"))


def _chosen(
    folder: Path, found: dict[str, Path], headers: dict[str, dict[str, Any]], results: dict[str, Any]
) -> list[str]:
    """The runs that a list beside them names, in its order; without one, the newest of each kind."""
    listed = results.get("runs") or _listed(folder / LINES)
    if listed:
        lost = [name for name in listed if name not in found]
        if lost:
            raise InputError(
                f"{len(lost)} of the {len(listed)} runs that {folder} lists are gone, such as {lost[0]}. "
                f"Run its command again: {results.get('command') or 'see results.json'}"
            )
        return list(listed)
    # A demo that was run again with other experts leaves the old runs there; its pools go by their seed.
    pool_matters = "experts" not in results
    newest: dict[tuple[Any, ...], str] = {}
    for name in sorted(found, key=lambda each: (found[each] / HEADER).stat().st_mtime):
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
    """Methods and streams in their usual order; folders are named by hashes and lie in none."""
    methods = list_methods()

    def key(name: str) -> tuple[Any, ...]:
        arguments = headers[name]["arguments"]
        method, stream = arguments["method"], arguments["stream"]["name"]
        place = methods.index(method) if method in methods else len(methods)
        order = list(streams).index(stream) if stream in streams else len(streams)
        return place, arguments["label"] != method, arguments["label"], order, stream, arguments["seed"], name

    return sorted(names, key=key)
