"""Answers of shadow mode against the site's own readings, week by week. Everything stays on this machine."""

import csv
import math
import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mergestream.runtime.errors import InputError
from mergestream.runtime.files import error_text

KEYS = {"sop_instance_uid": 0, "accession": 1}  # columns of readings, and their places in an answer
UNDECIDED = "undecided"
Row = tuple[str, str, str, str]  # UID, accession number, week, predicted class


def shadow_report(state: Path, readings: Path | None) -> dict[str, Any]:
    """Per week: answers per class; with readings also agreement, confusion, sensitivity and specificity."""
    answers = _answers(state / "dicom" / "outbox" / "outbox.sqlite")
    read, place = ({}, 0) if readings is None else _readings(readings)
    classes = sorted({row[3] for row in answers} | set(read.values()) - {UNDECIDED})
    weeks = {week: [row for row in answers if row[2] == week] for week in sorted({row[2] for row in answers})}
    listed = [{"week": week, **_week(rows, read, place, classes)} for week, rows in weeks.items()]
    unmatched = len(set(read) - {row[place] for row in answers})
    return {"weeks": listed, "readings": len(read), "readings_without_answer": unmatched}


def in_words(report: Mapping[str, Any]) -> list[str]:
    lines = []
    for week in report["weeks"]:
        counts = ", ".join(f"{name} {count}" for name, count in week["answers"].items())
        lines.append(f"{week['week']}: {week['images']} images ({counts}), undecided {week['undecided']:.1%}")
        if week["compared"]:
            lines.append(f"  {week['compared']} with a reading: agreement {_share(week['agreement'])}")
            lines += [
                f"  {name}: sensitivity {_share(each['sensitivity'])}, specificity {_share(each['specificity'])}"
                for name, each in week["classes"].items()
            ]
    if report["readings"]:
        lines.append(f"{report['readings_without_answer']} of {report['readings']} readings have no answer.")
    return lines or ["Shadow mode has recorded no answer yet."]


def interval(hits: int, total: int) -> list[float] | None:
    """A share with its 95 % interval (Wilson); None without a case."""
    if not total:
        return None
    z, share = 1.959964, hits / total
    centre, spread = share + z * z / (2 * total), z * math.sqrt(share * (1 - share) / total + (z / (2 * total)) ** 2)
    return [share, max(0.0, (centre - spread) / (1 + z * z / total)), min(1.0, (centre + spread) / (1 + z * z / total))]


def _week(rows: Sequence[Row], read: Mapping[str, str], place: int, classes: Sequence[str]) -> dict[str, Any]:
    """Undecided answers count in the confusion, as neither right nor wrong elsewhere."""
    counts = Counter(row[3] for row in rows)
    pairs = Counter((read[row[place]], row[3]) for row in rows if row[place] in read)
    decided = {pair: count for pair, count in pairs.items() if pair[1] != UNDECIDED}

    def rate(name: str, positive: bool) -> list[float] | None:
        cases = {pair: count for pair, count in decided.items() if (pair[0] == name) is positive}
        return interval(sum(n for (_, a), n in cases.items() if (a == name) is positive), sum(cases.values()))

    return {
        "images": len(rows),
        "answers": dict(sorted(counts.items())),
        "undecided": counts[UNDECIDED] / len(rows),
        "compared": sum(decided.values()),
        "agreement": interval(sum(n for (r, a), n in decided.items() if r == a), sum(decided.values())),
        "confusion": {r: {a: n for (other, a), n in sorted(pairs.items()) if other == r} for r, _ in sorted(pairs)},
        "classes": {name: {"sensitivity": rate(name, True), "specificity": rate(name, False)}
                    for name in classes if name != UNDECIDED} if decided else {},
    }  # fmt: skip


def _answers(file: Path) -> list[Row]:
    if not file.is_file():
        raise InputError(f"{file} is missing. Give the --state folder of a service that ran with --shadow.")
    try:
        base = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)
        rows = base.execute("SELECT uid, accession, time, prediction FROM answers ORDER BY time").fetchall()
    except sqlite3.Error as error:
        raise InputError(f"{file} cannot be read: {error}.") from error
    return [
        (uid, number, f"{datetime.fromtimestamp(t, UTC):%G-W%V}", name or UNDECIDED) for uid, number, t, name in rows
    ]


def _readings(file: Path) -> tuple[dict[str, str], int]:
    """The class per image or examination, and the place of its key in an answer."""
    try:
        rows = [*csv.DictReader(file.read_text(encoding="utf-8-sig").splitlines())]
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"{file} cannot be read: {error_text(error)}.") from error
    key = next((name for name in KEYS if rows and name in rows[0]), None)
    if key is None or "class" not in rows[0]:
        raise InputError(f"{file} needs the columns 'class' and one of {', '.join(KEYS)}, and at least one row.")
    return {str(row[key]).strip(): str(row["class"]).strip() for row in rows if row[key]}, KEYS[key]


def _share(value: Sequence[float] | None) -> str:
    return "–" if value is None else f"{value[0]:.1%} [{value[1]:.1%}, {value[2]:.1%}]"
