"""A whole pool checked again: everything that is wrong, at once."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mergestream.pool.checkpoint import open_weights
from mergestream.pool.exchange.confidence_checks import confidence_warnings
from mergestream.pool.exchange.expert_checks import (
    base_problems,
    base_warnings,
    differences_between,
    require_statistics,
    said,
)
from mergestream.pool.exchange.noise_probe import NoiseProbe, ProbeResult
from mergestream.pool.exchange.pool_folder import pool_root, read_any_card
from mergestream.pool.exchange.versions import kept_versions, versions_folder
from mergestream.pool.expert_card import BASE, CARD, SCHEMA_VERSION, ExpertCard, is_expert_folder, read_card
from mergestream.pool.pool_files import ORDER, candidates_folder
from mergestream.runtime.errors import MergestreamError
from mergestream.runtime.files import read_json

T = TypeVar("T")


@dataclass(frozen=True)
class PoolVerification:
    experts: tuple[str, ...]
    problems: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def sound(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        lists = {"experts": self.experts, "problems": self.problems, "warnings": self.warnings}
        return {"sound": self.sound, **{key: list(values) for key, values in lists.items()}}


def verify_pool(pool: Path) -> PoolVerification:
    """The pool, the candidates and the kept versions beside it: hashes, cards, order, base, statistics, weights."""
    root = pool_root(pool)
    inspector = _Inspector(root)
    inspector.run()
    problems, warnings = list(inspector.problems), list(inspector.warnings)
    runs = candidates_folder(root)
    if runs.is_dir():
        problems += [f"Candidates: {sentence}" for sentence in _candidate_problems(runs, inspector.cards)]
    problems += list(_version_problems(root))
    return PoolVerification(tuple(inspector.cards), tuple(problems), tuple(warnings))


def in_words(found: PoolVerification) -> list[str]:
    """What is wrong, what stands out, and the verdict last."""
    count = len(found.problems)
    verdict = f"Sound: {len(found.experts)} experts." if found.sound else f"NOT sound: {count} problem(s)."
    return [*(f"Wrong: {s}" for s in found.problems), *(f"Warning: {s}" for s in found.warnings), verdict]


class _Inspector:
    """Collects sentences about one folder of experts; what cannot be read is told once and left out of the rest."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.problems: list[str] = []
        self.warnings: list[str] = []
        self.cards: dict[str, ExpertCard] = {}
        self.base: ExpertCard | None = None

    def run(self) -> None:
        folders = [p for p in sorted(self.root.glob("*")) if p.is_dir() and not p.name.startswith(".")]
        for folder in folders:
            if not is_expert_folder(folder):
                self.problems.append(
                    f"{folder} holds no {CARD}, so it is no expert. Ask the site for the whole folder."
                )
            elif (card := self._tried(read_card, folder)) is not None:
                if folder.name == BASE:
                    self.base = card
                else:
                    self.cards[card.name] = card
        self._order({folder.name for folder in folders if is_expert_folder(folder)} - {BASE})
        if not self.cards:
            self.problems.append(f"There is no whole expert in {self.root}.")
            return
        self._experts()

    def _order(self, present: set[str]) -> None:
        if not (self.root / ORDER).exists():
            return
        value = self._tried(read_json, self.root / ORDER, SCHEMA_VERSION)
        order = (value or {}).get("order", [])
        if value is None or not isinstance(order, list) or not all(isinstance(name, str) for name in order):
            self.problems += [] if value is None else [f"{self.root / ORDER}: 'order' must be a list of names."]
            return
        doubled = sorted({name for name in order if order.count(name) > 1})
        self.problems += [f"{self.root / ORDER} lists '{name}' more than once." for name in doubled]
        lost = [name for name in dict.fromkeys(order) if name not in present]
        self.problems += [
            f"{self.root / ORDER} lists the expert '{name}', but its folder is not there." for name in lost
        ]
        late = sorted(present - set(order))
        self.warnings += [f"{self.root / ORDER} does not list '{name}'; it comes last." for name in late]
        self.cards = {n: self.cards[n] for n in dict.fromkeys([*order, *sorted(self.cards)]) if n in self.cards}

    def _experts(self) -> None:
        """Each expert and the base, held to the first expert and to one another."""
        reference = next(iter(self.cards.values()))
        gauge = self._tried(NoiseProbe, reference, self.root / reference.name)
        readings: dict[str, ProbeResult] = {}
        for card in (*self.cards.values(), *([self.base] if self.base else [])):
            folder = self.root / card.name
            differences = differences_between(card, reference)
            self.problems += [*differences, *base_problems(card, self.base)]
            if differences or gauge is None:
                self.problems += said(open_weights, folder, card)
            elif (reading := self._tried(gauge.read, folder, card)) is not None:
                readings[card.name] = reading
            self.problems += said(require_statistics, folder, card)
        self._doubts(readings)

    def _doubts(self, readings: dict[str, ProbeResult]) -> None:
        for card in self.cards.values():
            others = [other for other in self.cards.values() if other is not card]
            self.warnings += base_warnings(card, others, self.base)
            if card.name in readings:
                theirs = [readings[other.name] for other in others if other.name in readings]
                self.warnings += confidence_warnings(card, readings[card.name], theirs)

    def _tried(self, read: Callable[..., T], *arguments: object) -> T | None:
        try:
            return read(*arguments)
        except MergestreamError as error:
            self.problems.append(str(error))
            return None


def _candidate_problems(folder: Path, experts: dict[str, ExpertCard]) -> Iterator[str]:
    inspector = _Inspector(folder)
    inspector.run()
    yield from inspector.problems
    if not experts:
        return
    reference = next(iter(experts.values()))
    domains = {card.domain or card.name for card in experts.values()}
    for card in inspector.cards.values():
        yield from differences_between(card, reference)
        if card.domain not in domains:
            yield f"'{card.name}' is of domain {card.domain!r}, which is no expert's: {', '.join(sorted(domains))}."


def _version_problems(root: Path) -> Iterator[str]:
    """Kept versions must still be what they were; they need not fit the pool of today."""
    experts: Iterable[Path] = sorted(path for path in versions_folder(root).glob("*") if path.is_dir())
    for expert in experts:
        for number, folder in kept_versions(root, expert.name).items():
            sentences = said(_require_whole, folder)
            yield from (f"Version {number} of '{expert.name}': {sentence}" for sentence in sentences)


def _require_whole(folder: Path) -> None:
    card = read_any_card(folder)
    open_weights(folder, card)
    require_statistics(folder, card)
