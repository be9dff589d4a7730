"""The record of a reproduction on a GPU, from the folder that benchmarks/reproduction.sh filled.

    IN=folder-of-inputs OUT=out bash benchmarks/reproduction.sh
    python3 benchmarks/reproduction.py out benchmarks/results/reproduction.json

Machine's own paths are cut from it.
"""

import json
import re
import sys
import tarfile
from pathlib import Path
from typing import Any

LINE = re.compile(r"^ *(\d+\.\d) (.*)$")
STAGE = re.compile(r"^([^:]+): (.+?) ━")
STATISTIC = re.compile(r" *(measuring .+|writing|whole command): (\d+\.\d) s")


def without_folders(text: str) -> str:
    return re.sub(r"(?<![\w.])/[\w./-]+/", "", text)


def calls_of(lines: list[tuple[float, str]]) -> list[dict[str, Any]]:
    """Every call of `mergestream reproduce`: its options, seconds, and how it ended."""
    calls: list[dict[str, Any]] = []
    for at, text in lines:
        if text.startswith("start: reproduce"):
            calls.append({"options": text.removeprefix("start: reproduce "), "began": at})
        elif (
            calls and "ended" not in calls[-1] and text.startswith(("SIGKILL", "exit code", "ended before", "TIME IS"))
        ):
            calls[-1] |= {"ended": ending(text), "seconds": round(at - calls[-1].pop("began"), 1)}
    return calls


def ending(text: str) -> str:
    """How a call ended, in words."""
    if match := re.match(r"SIGKILL with (\d+) finished of .*/(candidates|runs)/", text):
        return (
            f"killed in training, {match[1]} fits finished" if match[2] == "candidates" else f"killed, {match[1]} runs"
        )
    return "finished" if text == "exit code 0" else without_folders(text)


def statistics_of(lines: list[tuple[float, str]]) -> dict[str, float]:
    """Seconds of every statistic of `mergestream pool statistics`; several of one kind are added up."""
    seconds: dict[str, float] = {}
    for _, text in lines:
        if match := STATISTIC.match(text):
            name = match[1].removeprefix("measuring ").partition(" without")[0]
            seconds[name] = round(seconds.get(name, 0.0) + float(match[2]), 1)
    return seconds


def stages_of(lines: list[tuple[float, str]]) -> list[dict[str, Any]]:
    """When every stage of a call ended, in seconds since the start of the script."""
    return [{"stage": match[2], "ended": at} for at, text in lines if (match := STAGE.match(text))]


def lines_of(path: Path) -> list[tuple[float, str]]:
    text = path.read_text(encoding="utf-8")
    return [(float(match[1]), match[2]) for line in text.splitlines() if (match := LINE.match(line))]


def main(folder: Path, target: Path) -> None:
    lines = lines_of(folder / "summary.log")
    with tarfile.open(folder / "results.tar.gz") as archive:
        file = archive.extractfile("reproduction.json")
        assert file is not None
        record = json.loads(file.read())
    record["command"] = without_folders(record["command"])
    record["changes"] = [without_folders(text) for text in record["changes"]]
    for each in record["places"]:
        each["root"] = each["root"] and Path(each["root"]).name
    for each in record["rows"]:
        each["runs"] = []
    logged = [text.strip() for _, text in lines]
    kept = ("finished:", "OK: nothing", "REPEATED", "gram", "fisher", "peak GPU", "statistics:")
    written = {
        "log": {
            "machine": logged[0],
            "calls": calls_of(lines),
            "stages": stages_of(lines_of(folder / "reproduce.log")),
            "statistics": statistics_of(lines),
            "lines": [without_folders(text) for text in logged if text.startswith(kept) or "unchanged since" in text],
        },
        "reproduction": record,
    }
    target.write_text(json.dumps(written, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
