"""Hashes of objects that were answered, so that an object that is sent again is not answered again."""

import os
from collections.abc import Sequence
from pathlib import Path

from mergestream.runtime.errors import OutputError
from mergestream.runtime.files import error_text, write_text

REMEMBERED = 200_000  # the last ones


class AnsweredObjects:
    """One hash per line in a file; the last ones in memory. Only one thread adds."""

    def __init__(self, file: Path) -> None:
        self._file = file
        text = file.read_text(encoding="ascii", errors="replace") if file.exists() else ""
        last = [line for line in text.splitlines() if len(line) == 64][-REMEMBERED:]
        whole = "".join(f"{line}\n" for line in last)
        if whole != text:  # too long, or its last line was cut off by a kill
            write_text(file, whole)
        self._hashes = dict.fromkeys(last)

    def __contains__(self, digest: str) -> bool:
        return digest in self._hashes

    def add(self, digests: Sequence[str]) -> None:
        """Add hashes; they are on disk when this returns."""
        digests = [digest for digest in digests if digest not in self._hashes]
        try:
            with self._file.open("a", encoding="ascii") as file:
                file.write("".join(f"{digest}\n" for digest in digests))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OutputError(f"Cannot write {self._file}: {error_text(error)}.") from error
        self._hashes |= dict.fromkeys(digests)
        while len(self._hashes) > REMEMBERED:
            del self._hashes[next(iter(self._hashes))]
