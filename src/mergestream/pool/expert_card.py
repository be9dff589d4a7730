"""The card of an expert, `expert.json`: everything about it but its weights, and what cards of one pool must share."""

import copy
import importlib.metadata
import json
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from mergestream.networks.architecture import Architecture, Network, find_head
from mergestream.networks.preprocessing import Preprocessing
from mergestream.runtime.errors import CheckpointError, MergestreamError, PoolError, some
from mergestream.runtime.files import read_json
from mergestream.runtime.json_record import parsed

SCHEMA_VERSION = 1
OPTIONAL = ("class_concepts", "about")
CARD, BASE = "expert.json", "base"
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._ -]{0,99}")
# No control characters, no marks that turn the direction of writing, no halves of a character.
TEXT = re.compile("[^\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]{0,2000}")
MOST_BYTES, DEEPEST, LARGEST = 16 << 20, 16, 1 << 53


@dataclass(frozen=True)
class ExpertCard:
    """Everything about an expert except its weights. It holds no file or patient names."""

    name: str
    architecture: Architecture
    head: tuple[str, ...]
    classes: tuple[str, ...]
    preprocessing: Preprocessing | None
    domain: str | None = None
    class_counts: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    weights_sha256: str = ""
    base_sha256: str | None = None
    library_versions: dict[str, str] = field(default_factory=dict)
    class_concepts: dict[str, dict[str, str]] = field(default_factory=dict)  # codes for reports, as of SNOMED CT
    about: dict[str, str] = field(default_factory=dict)  # for people: contact, licence, intended_use, limits

    def __post_init__(self) -> None:
        where = f"The card of expert {require_name(self.name)!r}"
        try:
            value = json.loads(json.dumps(self.to_json()))
        except (TypeError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{where} cannot be written as JSON: {error}.") from error
        require_schema("expert", value, where)
        for field_name in ("class_counts", "class_concepts"):
            strangers = [name for name in getattr(self, field_name) if name not in self.classes]
            if strangers:
                classes = some(self.classes)
                raise CheckpointError(
                    f"{where}: {field_name} names '{strangers[0]}', which is not one of its classes {classes}."
                )

    @classmethod
    def for_network(cls, name: str, network: Network, classes: tuple[str, ...], **details: Any) -> "ExpertCard":
        return cls(name, network.architecture, network.head, classes, network.preprocessing, **details)

    def network(self, module: nn.Module | None = None, most: int | None = None) -> Network:
        """Build the expert's network with random weights, or describe a copy of a given module.

        most: how many numbers its weights hold, which bounds the network's size.
        """
        built = self.architecture.build(most).eval() if module is None else copy.deepcopy(module)
        return Network(built, self.architecture, find_head(built, self.head), self.preprocessing)

    def validation(self, metric: str) -> float | None:
        """A number of its validation metrics; None if there is none."""
        value = (self.metrics.get("validation") or {}).get(metric)
        return None if value is None else float(value)

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        value["network"] = value.pop("architecture")
        for name in OPTIONAL:  # cards without them stay as they were
            if not value[name]:
                del value[name]
        return {"schema_version": SCHEMA_VERSION, **value}

    @classmethod
    def read(cls, folder: Path, sha256: str | None = None) -> "ExpertCard":
        """Read the card in a folder of any name; whatever is wrong with it is a CheckpointError.

        `sha256`: what its bytes must hash to, where they are signed.
        """
        value = read_checked(folder / CARD, "expert", sha256)
        try:
            card: ExpertCard = parsed(cls, {**{key: {} for key in OPTIONAL}, **value, "architecture": value["network"]})
        except MergestreamError as error:
            raise CheckpointError(f"{folder / CARD} is not an expert card: {error}") from error
        return card


def require_name(name: Any) -> str:
    """Refuse a name that is not one plain path component: it names the expert's folder."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise CheckpointError(
            f"{name!r:.200} cannot name an expert: use letters, digits, '.', '_', '-' and spaces, at most 100, "
            f"not starting with a dot or a space."
        )
    return name


def read_checked(path: Path, schema: str, sha256: str | None = None) -> dict[str, Any]:
    """Read a JSON file of a pool and compare it with its schema."""
    if path.is_file() and path.stat().st_size > MOST_BYTES:
        raise CheckpointError(f"{path} is larger than {MOST_BYTES >> 20} MiB. Restore it from its source.")
    value = read_json(path, SCHEMA_VERSION, sha256=sha256)
    require_schema(schema, value, str(path))
    return value


def require_schema(schema: str, value: dict[str, Any], where: str) -> None:
    """Refuse JSON that is not as its schema says, or that holds what no file of a pool may hold."""
    problem = _oddity(value)
    if problem is None:
        validator = _validator(schema)
        errors = sorted(validator.iter_errors(value), key=lambda error: len(error.path))
        if not errors:
            return
        fields, message = [str(part) for part in errors[0].path], f"{errors[0].message:.300}"
        problem = message
        if fields:
            requirement = validator.schema["properties"][fields[0]]["description"]
            problem = f"{fields[0]} must be {requirement}, but {'.'.join(fields)} is not: {message}"
    raise CheckpointError(f"{where} is not valid: {problem}.")


@lru_cache(maxsize=4)
def _validator(schema: str) -> Any:
    from jsonschema import Draft202012Validator

    text = (Path(__file__).parent / "schemas" / f"{schema}.schema.json").read_text(encoding="utf-8")
    return Draft202012Validator(json.loads(text))


def _oddity(value: Any, depth: int = 0) -> str | None:
    """What no file of a pool may hold anywhere: odd characters, numbers beyond all use, deep nesting; None if plain."""
    if isinstance(value, str):
        return None if TEXT.fullmatch(value) else f"the text {value[:60]!r} is too long or has control characters"
    if isinstance(value, int | float):
        return None if abs(value) <= LARGEST else f"the number {value!r:.60} is not finite or too large"
    if depth > DEEPEST:
        return f"it is nested deeper than {DEEPEST} levels"
    inside = [*value, *value.values()] if isinstance(value, dict) else value or ()
    return next((problem for each in inside if (problem := _oddity(each, depth + 1))), None)


def read_card(folder: Path, sha256: str | None = None) -> ExpertCard:
    """Read the card of an expert folder; both must have the same name."""
    card = ExpertCard.read(folder, sha256)
    if card.name != folder.name:
        raise CheckpointError(f"{folder / CARD} is the card of '{card.name}', but its folder is '{folder.name}'.")
    return card


def library_versions() -> dict[str, str]:
    names = ("mergestream", "torch", "torchvision", "timm", "safetensors")
    return {"python": platform.python_version(), **{name: version_of(name) for name in names}}


def version_of(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# Card fields that must be equal for a merge, and their names in messages.
COMPARED = {"architecture": "network", "head": "head", "classes": "classes", "preprocessing": "preprocessing"}


def require_alike(cards: Sequence[ExpertCard], base: ExpertCard | None) -> None:
    """Refuse experts that differ in anything a merge depends on."""
    problems = [p for card in (*cards[1:], *([base] if base else [])) for p in differences(card, cards[0])]
    problems += [problem for card in cards for problem in base_problems(card, base)]
    if problems:
        raise PoolError(problems[0])


def differences(card: ExpertCard, reference: ExpertCard) -> list[str]:
    """One sentence per field in which an expert differs from another of its pool."""
    sentences = []
    for key, word in COMPARED.items():
        mine, theirs = getattr(card, key), getattr(reference, key)
        if mine == theirs:
            continue
        if key == "classes" and sorted(mine) == sorted(theirs):
            sentences.append(
                f"'{card.name}' has the classes of '{reference.name}' in another order ({some(mine)}, not "
                f"{some(theirs)}): its labels would silently mean other things. Reorder its head's rows at the "
                f"site, and its card with them."
            )
        else:
            sentences.append(
                f"'{card.name}' and '{reference.name}' differ in {word}: {_text(mine)} against {_text(theirs)}."
            )
    return sentences


def _text(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else repr(value)


def base_problems(card: ExpertCard, base: ExpertCard | None) -> list[str]:
    """Refusal of an expert that was trained from another base than the pool's."""
    if base is None or card.base_sha256 in (None, base.weights_sha256):
        return []
    return [
        f"'{card.name}' was not trained from this pool's base: its card names {str(card.base_sha256)[:12]}…, the "
        f"base is {base.weights_sha256[:12]}…. "
        f"Train it from the pool's base folder, or accept it with 'mergestream pool add --allow-other-base'."
    ]


def base_warnings(card: ExpertCard, others: Sequence[ExpertCard], base: ExpertCard | None) -> list[str]:
    """Warnings of an unknown start, or of different starts where the pool has no base."""
    if base is not None and card.base_sha256 is None:
        return [
            f"Expert '{card.name}' does not say that it started from this pool's base: task_arithmetic, ties and drift "
            f"measure it from there all the same."
        ]
    starts = {other.base_sha256 for other in others} - {None}
    if base is None and card.base_sha256 and starts and card.base_sha256 not in starts:
        return [f"Expert '{card.name}' started from other weights than the pool's experts; their mean may be poor."]
    return []
