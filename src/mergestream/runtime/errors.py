"""Errors that a user can fix: each message says what is wrong, where, and what to do next."""

from collections.abc import Iterable
from difflib import get_close_matches


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


class PoolError(MergestreamError):
    """Experts that do not belong in one pool."""


class DataError(MergestreamError, ValueError):
    """A data set on disk that is incomplete or malformed."""


class TrainingError(MergestreamError):
    """A fit that failed."""


class WorkerError(MergestreamError):
    """A process or a cluster that stopped working."""


class OutputError(MergestreamError, OSError):
    """A file or folder that cannot be written."""


MOST_LISTED = 60


def unknown_name(kind: str, name: object, valid: Iterable[str]) -> UnknownNameError:
    """Build the error for a misspelt name; it suggests the nearest valid one."""
    names = sorted(valid)
    close = get_close_matches(str(name), names, n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return UnknownNameError(f"There is no {kind} called '{name}'.{hint} {_listed(str(name), names)}")


def _listed(name: str, names: list[str]) -> str:
    """List all names, or only similar ones where there are hundreds."""
    if len(names) <= MOST_LISTED:
        return f"Known: {', '.join(names) or 'none'}."
    alike = get_close_matches(name, names, n=8, cutoff=0.3)
    return f"There are {len(names)}" + (f", among them {', '.join(alike)}." if alike else ".")
