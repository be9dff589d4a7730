"""The subfolders of a watched folder: incoming files, `answers`, `done` and `refused`. A kill loses nothing."""

import hashlib
import json
import os
from collections.abc import Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

from mergestream.data.intake.limits import IntakeError
from mergestream.runtime.files import make_folder, sha256_of_file, write_atomically, write_json

SCHEMA_VERSION = 1
PARTIAL = (".part", ".tmp", ".crdownload", ".filepart")
# A file system allows 255 bytes, and endings are added.
MOST_NAME_BYTES = 200


class ImageAnswer(NamedTuple):
    """Answer to one image: a JSON document, and the DICOM report to store beside it, if any."""

    document: dict[str, Any]
    report: bytes | None = None


class Dropbox:
    """Lists complete files and moves them, with their answers, to their subfolders. Names stay on this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._answers, self._done, self._refused = (
            make_folder(folder / name) for name in ("answers", "done", "refused")
        )
        self._last_listing: dict[str, tuple[int, int]] = {}

    def complete_names(self) -> list[str]:
        """Plain files whose size and time have not changed since the last listing, oldest first."""
        now = {}
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.startswith(".") or entry.name.lower().endswith(PARTIAL):
                    continue
                if entry.is_file(follow_symlinks=False):
                    about = entry.stat(follow_symlinks=False)
                    now[entry.name] = (about.st_size, about.st_mtime_ns)
        complete = [name for name, about in now.items() if self._last_listing.get(name) == about]
        self._last_listing = now
        return sorted(complete, key=lambda name: (now[name][1], name))

    def content(self, name: str, most: int) -> bytes | None:
        """A file's bytes; None if it is gone. One that is too large is refused."""
        try:
            handle = os.open(self._folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        with os.fdopen(handle, "rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise IntakeError("too_large", f"A file may have at most {most:,} bytes.")
        return data

    def move_if_answered(self, name: str, data: bytes) -> bool:
        """Move a file that already has an answer, from a process that was killed before it moved the file."""
        sha256 = hashlib.sha256(data).hexdigest()
        if _document(self._answer_path(name, sha256)).get("sha256") != sha256:
            return False
        self._move_to_done(name, sha256)
        return True

    def store_answer(self, name: str, sha256: str, answers: Sequence[ImageAnswer]) -> None:
        """Write the reports, then the answer, then move the file, so that an answer on disk is complete."""
        path = self._answer_path(name, sha256)
        reports = [answer.report for answer in answers if answer.report is not None]
        for number, report in enumerate(reports, start=1):
            ending = ".sr.dcm" if len(reports) == 1 else f".{number}.sr.dcm"
            write_atomically(path.with_suffix(ending), partial(Path.write_bytes, data=report))
        documents = [answer.document for answer in answers]
        write_json(path, {"schema_version": SCHEMA_VERSION, "sha256": sha256, "answers": documents})
        self._move_to_done(name, sha256)

    def refuse(self, name: str, code: str, sentence: str) -> None:
        """Write the reason, then move the file. Neither overwrites anything of an earlier refused file."""
        label, reason = _short(name, hashlib.sha256(os.fsencode(name)).hexdigest()), {"code": code, "reason": sentence}
        for free in chain([label], (f"{label}.{number}" for number in count(2))):
            file, beside = self._refused / free, self._refused / f"{free}.reason.json"
            # The same reason without a file: this process or an earlier one was killed before it moved the file.
            if not file.exists() and (not beside.exists() or _document(beside) == reason):
                break
        write_json(beside, reason)
        (self._folder / name).replace(file)

    def _answer_path(self, name: str, sha256: str) -> Path:
        """Where the answer goes. Different files of the same name get different answers."""
        path = self._answers / f"{_short(name, sha256)}.json"
        if _document(path).get("sha256") in (None, sha256):
            return path
        return self._answers / f"{_short(name, sha256)}.{sha256[:12]}.json"

    def _move_to_done(self, name: str, sha256: str) -> None:
        label = _short(name, sha256)
        target = self._done / label
        if target.exists() and sha256_of_file(target) != sha256:
            target = self._done / f"{sha256[:12]}.{label}"
        (self._folder / name).replace(target)


def _document(path: Path) -> dict[str, Any]:
    """A JSON document; {} if there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _short(name: str, sha256: str) -> str:
    return name if len(os.fsencode(name)) <= MOST_NAME_BYTES else sha256
