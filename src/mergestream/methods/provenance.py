"""Everything that a method's answers depend on, beside the images and the state: collected here and nowhere else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mergestream.methods.base import Method


def provenance_of(method: Method[Any]) -> dict[str, Any]:
    """What run hashes, state checks, audit lines and reloads go by. Values that are absent are left out.

    pool    hash of the experts' weights, order and classes, the network, its preprocessing and its type of numbers
    cards   values that the method resolved from the experts' cards: another card is another value, or changes nothing
    """
    pool, needs = method.pool, method.needs
    described = {
        "method": method.name,
        "revision": method.revision,
        "options": method.options(),
        "pool": pool.fingerprint(),
        "base": pool.base_fingerprint() if "base" in needs else None,
        **method.source_hashes(),
        "cards": method.card_values() or None,
    }
    return {name: value for name, value in described.items() if value is not None}
