"""YAML files that a user writes: read as a whole, or refused with one sentence."""

from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from mergestream.runtime.errors import InputError
from mergestream.runtime.files import error_text


def read_yaml(file: Path, what: str, most_bytes: int) -> Any:
    """Read a file of limited size. `what` begins the sentence of a refusal, as in 'The rules file'."""
    try:
        with file.open("rb") as opened:
            data = opened.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise InputError(f"it has more than {most_bytes:,} bytes")
        return yaml.safe_load(data.decode())
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(error_text(error).split())
        raise InputError(f"{what} {file} cannot be read: {reason}.") from error
