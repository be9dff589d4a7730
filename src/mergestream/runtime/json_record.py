"""Dataclasses that are saved as JSON and read back by their type hints."""

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from mergestream.runtime.errors import CheckpointError
from mergestream.runtime.files import read_json, write_json


class JsonRecord:
    """Base of a dataclass with its own file: numbers, texts, lists, dictionaries and other dataclasses."""

    kind: ClassVar[str]  # for the error message
    schema_version: ClassVar[int] = 1

    def to_json(self) -> dict[str, Any]:
        return {"schema_version": self.schema_version, **asdict(self)}  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`."""
        try:
            record: Self = parsed(cls, value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"This is not a {cls.kind} record ({error!r}). Measure it again.") from error
        return record

    def save(self, path: Path) -> None:
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Self:
        return cls.from_json(read_json(path, cls.schema_version))


def parsed(hint: Any, value: Any) -> Any:
    """A JSON value as its type hint says; None only where the hint allows it, or for a plain value."""
    if value is None and NoneType in get_args(hint):
        return None
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{each.name: parsed(hints[each.name], value[each.name]) for each in fields(hint)})  # type: ignore[operator]
    origin, arguments = get_origin(hint), [each for each in get_args(hint) if each is not NoneType]
    if origin in (list, tuple):
        return origin(parsed(arguments[0], each) for each in value)
    if origin is dict:
        return {key: parsed(arguments[1], each) for key, each in value.items()}
    return parsed(arguments[0], value) if arguments else value
