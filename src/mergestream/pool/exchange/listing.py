"""A pool at a glance: its experts in order, and what they share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergestream.pool.exchange.pool_folder import PoolFolder, read_any_card, read_pool
from mergestream.pool.exchange.versions import current_version, kept_versions
from mergestream.pool.expert_card import ExpertCard
from mergestream.runtime.errors import PoolError

COLUMNS = ("expert", "domain", "accuracy", "temperature", "version", "kept", "sha-256")


@dataclass(frozen=True)
class Listing:
    pool: PoolFolder
    versions: dict[str, dict[int, ExpertCard]]  # kept, by expert and number

    def to_json(self) -> dict[str, Any]:
        base = self.pool.base
        return {
            "experts": [self._expert(card) for card in self.pool.cards.values()],
            "classes": list(_first(self.pool).classes),
            "network": str(_first(self.pool).architecture),
            "base_sha256": base.weights_sha256 if base else None,
        }

    def _expert(self, card: ExpertCard) -> dict[str, Any]:
        kept = self.versions[card.name]
        return {
            "name": card.name,
            "domain": card.domain,
            "network": str(card.architecture),
            "classes": list(card.classes),
            "validation_accuracy": validation_accuracy(card),
            "temperature": card.temperature,
            "weights_sha256": card.weights_sha256,
            "base_sha256": card.base_sha256,
            "version": current_version(self.pool.root, card.name),
            "kept_versions": [{"version": n, "weights_sha256": old.weights_sha256} for n, old in kept.items()],
        }


def list_pool(pool: Path) -> Listing:
    present = read_pool(pool)
    if not present.cards and present.base is None:
        raise PoolError(f"{pool} holds no expert and no base. A pool is a folder of expert folders.")
    kept = {name: kept_versions(present.root, name) for name in present.cards}
    return Listing(present, {name: {n: read_any_card(path) for n, path in own.items()} for name, own in kept.items()})


def in_words(listing: Listing) -> list[str]:
    """What the experts share, then one aligned line for each."""
    value, base = listing.to_json(), listing.pool.base
    rows = [COLUMNS, *(_row(expert) for expert in value["experts"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [
        f"{len(value['experts'])} experts in {listing.pool.root}",
        f"network: {value['network']}; classes: {', '.join(value['classes'])}",
        f"base: {base.weights_sha256[:12]}, the shared start" if base else "base: none",
        "",
        *lines,
    ]


def validation_accuracy(card: ExpertCard) -> float | None:
    metrics: Any = card.metrics.get("validation")
    value = metrics.get("accuracy") if isinstance(metrics, dict) else None
    return float(value) if isinstance(value, int | float) else None


def _first(pool: PoolFolder) -> ExpertCard:
    card = next(iter(pool.cards.values()), pool.base)
    assert card is not None
    return card


def _row(expert: dict[str, Any]) -> tuple[str, ...]:
    accuracy = expert["validation_accuracy"]
    kept = ", ".join(str(old["version"]) for old in expert["kept_versions"])
    return (
        expert["name"],
        expert["domain"] or "–",
        "–" if accuracy is None else f"{100 * accuracy:.1f} %",
        f"{expert['temperature']:.3g}",
        str(expert["version"]),
        kept or "–",
        expert["weights_sha256"][:12],
    )
