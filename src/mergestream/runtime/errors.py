"""Errors that a user can fix: each message says what is wrong, where, and what to do next."""

from collections.abc import Collection, Iterable, Sequence
from difflib import SequenceMatcher


class MergestreamError(Exception):
    """Base of all errors about the user's input, as opposed to bugs."""


class InputError(MergestreamError, ValueError):
    """A batch, a label array or an option that cannot be used."""


class UnknownNameError(MergestreamError, LookupError):
    """A name that is not in the table."""


class NetworkError(MergestreamError):
    """A network that cannot be built, split or run."""


class CheckpointError(MergestreamError):
    """An expert on disk that is damaged, of another kind or unsafe."""


class SignatureError(CheckpointError):
    """A signature that is missing, not valid or of an unknown signer, or an expert that was revoked."""


class PoolError(MergestreamError):
    """Experts that do not belong in one pool."""


class MissingStatisticsError(PoolError):
    """Statistics that a method needs and the experts' folders lack; `kind` as in `measure_statistics`."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[type, tuple[str, str]]:  # it may come from a worker process
        return type(self), (str(self), self.kind)


class DataError(MergestreamError, ValueError):
    """A data set on disk that is incomplete or malformed."""


class TrainingError(MergestreamError):
    """A fit that failed."""


class WorkerError(MergestreamError):
    """A process or a cluster that stopped working."""


class OutputError(MergestreamError, OSError):
    """A file or folder that cannot be written."""


class MissingPathError(InputError, PoolError, CheckpointError, DataError):
    """A path in the command or call that does not exist, or is something else."""


class TakenPathError(InputError, OutputError):
    """An output path in the command or call that is something else already."""


# Errors by which a command ends with exit code 2.
USAGE_ERRORS = (InputError, UnknownNameError)
MOST_LISTED = 12


def some(names: Sequence[str], shown: int = 10) -> str:
    """Text of the first names of a list, and how many more there are."""
    rest = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(f"'{name}'" for name in names[:shown]) + rest


def unknown_name(kind: str, name: object, valid: Iterable[str]) -> UnknownNameError:
    """Build the error for a misspelt name; it suggests the nearest valid one."""
    return UnknownNameError(f"There is no {kind} called '{name}'. {suggestion(str(name), valid)}")


def require_known(kind: str, name: object, valid: Collection[str]) -> None:
    """Refuse a name that is not among the valid ones."""
    if name not in valid:
        raise unknown_name(kind, name, valid)


def suggestion(name: str, valid: Iterable[str]) -> str:
    """The nearest valid name, by all of it or its beginning; then every name, or the nearest and how many more."""
    names, start = sorted(valid), max(len(name), 3)
    parts = {each: (each.casefold(), each[:start].casefold()) for each in names}
    ratios = {each: [SequenceMatcher(None, name.casefold(), part).ratio() for part in parts[each]] for each in names}
    near = sorted(names, key=lambda each: (max(ratios[each]), ratios[each]), reverse=True)
    hint = f"Did you mean '{near[0]}'? " if near and max(ratios[near[0]]) >= 0.6 else ""
    if len(names) <= MOST_LISTED:
        return f"{hint}Known: {', '.join(names) or 'none'}."
    return f"{hint}Known: {', '.join(near[:6])} and {len(names) - 6} more."
