"""The card of an expert, `expert.json`: everything about it but its weights, and what cards of one pool must share."""

import copy
import importlib.metadata
import math
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from mergestream.networks.architecture import Architecture, Network, from_architecture, from_module
from mergestream.networks.preprocessing import Preprocessing
from mergestream.runtime.errors import CheckpointError, MergestreamError, PoolError
from mergestream.runtime.files import read_json

SCHEMA_VERSION = 1
CARD, BASE = "expert.json", "base"
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._ -]{0,99}")


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

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise CheckpointError(f"The card of expert {self.name!r} is not valid: {problem}.")

    @classmethod
    def for_network(cls, name: str, network: Network, classes: tuple[str, ...], **details: Any) -> "ExpertCard":
        return cls(name, network.architecture, network.head, classes, network.preprocessing, **details)

    def network(self, module: nn.Module | None = None) -> Network:
        """Build the expert's network with random weights, or describe a copy of a given module."""
        if module is None:
            built = from_architecture(self.architecture)
        else:
            built = from_module(copy.deepcopy(module), self.head)
        return replace(built, architecture=self.architecture, head=self.head, preprocessing=self.preprocessing)

    def validation(self, metric: str) -> float | None:
        """A finite number of its validation metrics; None if there is none, since a card may hold anything there."""
        metrics: Any = self.metrics.get("validation")
        value = metrics.get(metric) if isinstance(metrics, dict) else None
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            return None
        return float(value)

    def to_json(self) -> dict[str, Any]:
        value = asdict(self)
        value["network"] = value.pop("architecture")
        return {"schema_version": SCHEMA_VERSION, **value}

    @classmethod
    def from_json(cls, value: Mapping[str, Any], where: Path) -> "ExpertCard":
        try:
            fields = {name: value[name] for name in cls.__dataclass_fields__ if name != "architecture"}
            fields["architecture"] = Architecture(**value["network"])
            preprocessing = value["preprocessing"]
            fields["preprocessing"] = Preprocessing.from_json(preprocessing) if preprocessing else None
            for name in ("classes", "head"):
                fields[name] = tuple(value[name]) if isinstance(value[name], list) else value[name]
            return cls(**fields)
        except (KeyError, TypeError, ValueError, AttributeError, MergestreamError) as error:
            raise CheckpointError(f"{where} is not an expert card: {error!r}.") from error


def require_name(name: Any) -> str:
    """Refuse a name that is not one plain path component: it names the expert's folder."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise CheckpointError(
            f"{name!r} cannot name an expert: use letters, digits, '.', '_', '-' and spaces, at most 100, "
            f"not starting with a dot or a space."
        )
    return name


def _problem(card: ExpertCard) -> str | None:
    """The first problem in a card's fields; None if there is none."""
    require_name(card.name)
    for what, values in {"classes": card.classes, "head": card.head}.items():
        listed = isinstance(values, tuple) and values and all(isinstance(value, str) for value in values)
        if not listed or len(set(values)) != len(values):
            return f"{what} must be a list of different names, got {values!r}"
    if not isinstance(card.temperature, int | float) or not 0 < card.temperature < math.inf:
        return f"temperature must be a number above 0, got {card.temperature!r}"
    counts = card.class_counts
    if not isinstance(counts, dict) or not all(type(n) is int and n >= 0 for n in counts.values()):
        return f"class_counts must be whole numbers by class, got {counts!r}"
    strangers = [name for name in counts if name not in card.classes]
    if strangers:
        return f"class_counts names '{strangers[0]}', which is not one of its classes {', '.join(card.classes)}"
    for what in ("metrics", "recipe", "library_versions"):
        if not isinstance(getattr(card, what), dict):
            return f"{what} must be an object"
    for what in ("domain", "base_sha256"):
        if not isinstance(getattr(card, what), str | None):
            return f"{what} must be text or null"
    return None


def read_card(folder: Path) -> ExpertCard:
    """Read the card of an expert folder; both must have the same name."""
    card = ExpertCard.from_json(read_json(folder / CARD, SCHEMA_VERSION), folder / CARD)
    if card.name != folder.name:
        raise CheckpointError(f"{folder / CARD} is the card of '{card.name}', but its folder is '{folder.name}'.")
    return card


def is_expert_folder(path: Path) -> bool:
    return path.is_dir() and (path / CARD).is_file()


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
                f"'{card.name}' has the classes of '{reference.name}' in another order ({', '.join(mine)}, not "
                f"{', '.join(theirs)}): its labels would silently mean other things. Reorder its head's rows at the "
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
