"""Units on disk, and the record made of them: small, mergeable with those of other runs, never of mixed pools."""

import base64
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from units import TRAIN, Stage, Unit

from mergestream.runtime.errors import CheckpointError, InputError
from mergestream.runtime.files import read_json, sha256_of_json, write_text

SCHEMA_VERSION = 1
STEP = 65535  # resamples are kept in so many steps from 0 to 1
Group = dict[str, Any]


@dataclass(frozen=True)
class Asked:
    """What a unit's numbers depend on beside its pool; units of another asking are not taken for done."""

    profile: str
    ours: str
    ablation: tuple[tuple[str, str], ...]
    revisions: tuple[tuple[str, int], ...]  # of every method: numbers of an older one are not its own
    limit: int | None = None
    steps: int | None = None

    @property
    def is_try(self) -> bool:
        return self.profile != "real" or self.limit is not None or self.steps is not None

    @property
    def hash(self) -> str:
        return sha256_of_json(asdict(self))[:8]


def unit_path(out: Path, unit: Unit, asked: Asked) -> Path:
    return out / "units" / unit.stage / f"{unit.name}--{asked.hash}.json"


def write_unit(path: Path, found: dict[str, Any]) -> None:
    coded = {
        key: {name: encoded(np.asarray(values)) for name, values in metrics.items()}
        for key, metrics in found.get("resamples", {}).items()
    }
    write_text(path, json.dumps({"schema_version": SCHEMA_VERSION, **found, "resamples": coded}) + "\n")


def read_unit(path: Path) -> dict[str, Any] | None:
    return read_json(path, SCHEMA_VERSION) if path.exists() else None


def encoded(values: np.ndarray) -> str:
    """Scores between 0 and 1 as base64 of 16 bits each: finer than a hundredth of a point."""
    return base64.b64encode(np.round(values * STEP).astype("<u2").tobytes()).decode()


def decoded(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), dtype="<u2").astype(np.float64) / STEP


def group_of(stage: Stage, units: Sequence[tuple[Unit, dict[str, Any]]], asked: Asked) -> Group:
    """All targets of one pool at one stage: their rows, and every method's resamples as the mean over its targets."""
    pool = units[0][0].pool
    first = units[0][1]
    if len({found["fingerprint"] for _, found in units}) != 1:
        raise InputError(f"Units of {stage.name} are of different pools called {pool.name}; delete them and run again.")
    return {
        "stage": stage.name,
        "kind": units[0][0].kind,
        "pool": pool.name,
        **asdict(pool),
        "fingerprint": first["fingerprint"],
        "ours": asked.ours,
        "seconds": round(sum(found["seconds"] for _, found in units), 2),
        "classes": first["classes"],
        "experts": {"+".join(unit.targets): found["experts"] for unit, found in units},
        "left_out": {name: why for _, found in units for name, why in found["left_out"].items()},
        "rows": [row for _, found in units for row in found["rows"]],
        "resamples": _mean_resamples([found for _, found in units]),
        **{key: first[key] for key in ("specs", "costs", "loud") if key in first},
    }


def _mean_resamples(found: Sequence[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """Of methods that answered wherever their stream was run; a single expert is missing at its own target."""
    streams = {key.split("|", 1)[1] for each in found for key in each["resamples"]}
    kept = {}
    for stream in sorted(streams):
        there = [each["resamples"] for each in found if any(k.split("|", 1)[1] == stream for k in each["resamples"])]
        for key in there[0]:
            if key.split("|", 1)[1] == stream and all(key in own for own in there):
                kept[key] = {
                    metric: encoded(np.mean([decoded(own[key][metric]) for own in there], axis=0))
                    for metric in there[0][key]
                }
    return kept


def training_group(unit: Unit, note: dict[str, Any]) -> Group:
    return {"stage": unit.stage, "kind": TRAIN, "pool": unit.pool.name, **asdict(unit.pool), **note}


def write_record(path: Path, groups: Iterable[Group], asked: Asked, about: dict[str, Any], *, later: bool) -> None:
    head = {"schema_version": SCHEMA_VERSION, "asked": asdict(asked), "is_try": asked.is_try, "later": later, **about}
    lines = ",\n".join(json.dumps(group, separators=(",", ":")) for group in groups)
    write_text(path, json.dumps(head)[:-1] + ', "groups": [\n' + lines + "\n]}\n")


def read_records(paths: Sequence[Path], *, allow_tries: bool = False) -> list[Group]:
    """The groups of several records as one list. The same rows from two different pools are refused."""
    kept: dict[tuple[Any, ...], Group] = {}
    for path in paths:
        record = read_json(path, SCHEMA_VERSION)
        if record["is_try"] and not allow_tries:
            raise InputError(f"{path} is the record of a try (few images, steps or a tiny network): it shows nothing.")
        for group in record["groups"]:
            own = {**group, "later": record["later"], "asked": record["asked"], "file": path.name}
            key = _key(own)
            if key not in kept:
                kept[key] = own
            elif kept[key]["fingerprint"] != own["fingerprint"]:
                raise CheckpointError(
                    f"{kept[key]['file']} and {path.name} hold {own['stage']} of {own['pool']} from two different "
                    f"pools of that name. Delete one of the records, or mark the newer one with run.py --later."
                )
    return list(kept.values())


def _key(group: Group) -> tuple[Any, ...]:
    # A pool may be trained again in another session: both trainings are told.
    own = group["fingerprint"] if group["kind"] == TRAIN else group["ours"]
    return group["stage"], group["pool"], own, group["later"]
