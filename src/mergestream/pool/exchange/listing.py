"""Overview of a pool on disk: its experts in order, and what they share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergestream.pool.exchange.pool_folder import (
    PoolFolder,
    current_version,
    previous_versions,
    read_any_card,
    read_pool,
)
from mergestream.pool.expert_card import ExpertCard
from mergestream.runtime.errors import PoolError

COLUMNS = ("expert", "domain", "accuracy", "temperature", "version", "kept", "sha-256")


@dataclass(frozen=True)
class Listing:
    """Cards of the experts in use, and of their previous versions by expert and number."""

    pool: PoolFolder
    versions: dict[str, dict[int, ExpertCard]]

    def to_json(self) -> dict[str, Any]:
        first = next(iter(self.pool.cards.values()), self.pool.base)
        assert first is not None
        return {
            "experts": [self._expert(card) for card in self.pool.cards.values()],
            "classes": list(first.classes),
            "network": str(first.architecture),
            "base_sha256": self.pool.base.weights_sha256 if self.pool.base else None,
        }

    def _expert(self, card: ExpertCard) -> dict[str, Any]:
        previous = self.versions[card.name].items()
        return {
            "name": card.name,
            "domain": card.domain,
            "network": str(card.architecture),
            "classes": list(card.classes),
            "validation_accuracy": card.validation("accuracy"),
            "temperature": card.temperature,
            "weights_sha256": card.weights_sha256,
            "base_sha256": card.base_sha256,
            "version": current_version(self.pool.root, card.name),
            "kept_versions": [{"version": n, "weights_sha256": old.weights_sha256} for n, old in previous],
        }

    def lines(self) -> list[str]:
        """What the experts share, then one aligned line per expert."""
        value, base = self.to_json(), self.pool.base
        rows = [COLUMNS, *(_row(expert) for expert in value["experts"])]
        widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return [
            f"{len(value['experts'])} experts in {self.pool.root}",
            f"network: {value['network']}; classes: {', '.join(value['classes'])}",
            f"base: {base.weights_sha256[:12]}, the shared start" if base else "base: none",
            "",
            *lines,
        ]


def list_pool(pool: Path) -> Listing:
    """Read the cards of a pool and of its previous versions."""
    present = read_pool(pool)
    if not present.cards and present.base is None:
        raise PoolError(f"{pool} holds no expert and no base. A pool is a folder of expert folders.")
    versions = {name: previous_versions(present.root, name) for name in present.cards}
    return Listing(present, {name: {n: read_any_card(p) for n, p in own.items()} for name, own in versions.items()})


def _row(expert: dict[str, Any]) -> tuple[str, ...]:
    accuracy = expert["validation_accuracy"]
    return (
        expert["name"],
        expert["domain"] or "–",
        "–" if accuracy is None else f"{100 * accuracy:.1f} %",
        f"{expert['temperature']:.3g}",
        str(expert["version"]),
        ", ".join(str(old["version"]) for old in expert["kept_versions"]) or "–",
        expert["weights_sha256"][:12],
    )
