"""Errors a user can mend: each message says what was wrong, where, and what to do next."""

from collections.abc import Iterable
from difflib import get_close_matches


class MergestreamError(Exception):
    """The root of all errors that are about the user's input, not about a bug of ours."""


class InputError(MergestreamError, ValueError):
    """A batch, a label array or an option that cannot be used."""


class UnknownNameError(MergestreamError, LookupError):
    """A name that no table holds."""


class NetworkError(MergestreamError):
    """A network that cannot be built, split or run."""


class CheckpointError(MergestreamError):
    """An expert on disk that is damaged, foreign or unsafe."""


class PoolError(MergestreamError):
    """Experts that do not belong in one pool."""


class DataError(MergestreamError, ValueError):
    """A data set on disk that is not what it should be."""


class TrainingError(MergestreamError):
    """A fit that did not work out."""


class WorkerError(MergestreamError):
    """A process or a cluster that was lost on the way."""


class OutputError(MergestreamError, OSError):
    """A place that cannot be written."""


MOST_LISTED = 60


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """The error for a misspelt name, with the nearest known one suggested."""
    names = sorted(known)
    close = get_close_matches(str(name), names, n=1)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    return UnknownNameError(f"There is no {kind} called '{name}'.{hint} {_listed(str(name), names)}")


def _listed(name: str, names: list[str]) -> str:
    """All names, or of a library's hundreds those most like the one asked for."""
    if len(names) <= MOST_LISTED:
        return f"Known: {', '.join(names) or 'none'}."
    alike = get_close_matches(name, names, n=8, cutoff=0.3)
    return f"There are {len(names)}" + (f", among them {', '.join(alike)}." if alike else ".")
