"""The experts in use: the pool without those that are switched off."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor

from mergestream.methods import Method, create_method
from mergestream.pool.class_concepts import joined_concepts
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError, PoolError
from mergestream.runtime.files import sha256_of_json

# Options that may hold one number per expert; the first are shares and stay on the simplex.
SHARES, PER_EXPERT = ("coefficients",), ("coefficients", "temperature", "lambda")


class Lineup:
    """A pool, a method with its options, and the experts switched off. It never changes: a switch makes another one.

    An expert that is off is left out of the bank, so every number is that of `pool.without` it, bit for bit.
    """

    def __init__(self, pool: ExpertPool, method: str, options: Mapping[str, Any], off: Sequence[str] = ()) -> None:
        self.pool, self.method, self.options = pool, method, dict(options)
        switched_off = {pool.names[pool.index(name)] for name in off}
        self.off = tuple(name for name in pool.names if name in switched_off)
        if len(self.off) == len(pool):
            raise PoolError("The last expert cannot be switched off: switch another one on first.")
        self.active = pool.without(*self.off) if self.off else pool

    def switched(self, expert: str, *, on: bool) -> "Lineup":
        """The line-up with one expert on or off."""
        self.pool.index(expert)
        return self._with_off([name for name in self.off if name != expert] + ([] if on else [expert]))

    def of(self, experts: Sequence[str]) -> "Lineup":
        """The line-up with exactly these experts on."""
        if tuple(experts) == self.active.names:
            return self
        return self._with_off([name for name in self.pool.names if name not in experts])

    def _with_off(self, off: Sequence[str]) -> "Lineup":
        lineup = Lineup(self.pool, self.method, self.options, off)
        lineup.identity = self.identity
        return lineup

    @cached_property
    def active_method(self) -> Method:
        """The method on the experts in use, for all streams; refused where it needs an expert that is off."""
        chosen = self.options.get("expert")
        if self.method == "single_expert" and chosen in self.off:
            raise InputError(f"The service answers with '{chosen}' alone, which therefore cannot be switched off.")
        options = options_without(self.options, self.pool.names, self.active.names)
        method = create_method(self.method, self.active, **options)
        if method.looks_ahead:
            raise InputError(f"'{method.label()}' wants all images of a target first: it cannot answer a live stream.")
        return method

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a stream's state belongs to, whichever experts are switched off."""
        method = create_method(self.method, self.pool, **self.options) if self.off else self.active_method
        described = {"method": self.method, "options": self.options, "pool_sha256": self.pool.fingerprint()}
        return {**described, "provenance": sha256_of_json(method.provenance)}

    @cached_property
    def cards_sha256(self) -> str:
        """Hash of the cards of the experts in use, whatever others the pool has; and of the base, if it is needed."""
        base = self.pool.base_fingerprint() if "base" in self.active_method.needs else None
        return sha256_of_json([base, *(card.to_json() for card in self.active.cards)])

    def describe(self, revoked: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Pool and method for people: of each expert's card what they need, without its training recipe.

        `revoked`: a sentence per revoked expert.
        """
        signers = self.pool.signed_by or {}
        experts = [
            {"name": card.name, "on": card.name not in self.off, "domain": card.domain, "metrics": card.metrics,
             "network": card.architecture.name, "temperature": card.temperature, "weights_hash": card.weights_sha256,
             "signed_by": signers.get(card.name), "revoked": (revoked or {}).get(card.name)}
            for card in self.pool.cards
        ]  # fmt: skip
        about = {"hash": self.identity["pool_sha256"], "classes": list(self.pool.classes), "experts": experts}
        concepts, _ = joined_concepts(self.pool.cards)
        return {**about, "method": self.method, "options": self.options, "class_concepts": concepts}

    def spread(self, values: Tensor | None, absent: float | None) -> list[float | None] | None:
        """Numbers of the experts in use as numbers of all [K], exactly; `absent` stands for those that are off."""
        if values is None:
            return None
        by_name = dict(zip(self.active.names, values.tolist(), strict=True))
        return [by_name.get(name, absent) for name in self.pool.names]


def options_without(options: Mapping[str, Any], experts: Sequence[str], active: Sequence[str]) -> dict[str, Any]:
    """Options of a method on some of the experts: those with one number per expert lose the others' numbers."""
    options = dict(options)
    for name in PER_EXPERT:
        value = options.get(name)
        if isinstance(value, list | tuple) and len(value) == len(experts):
            values = [value[list(experts).index(expert)] for expert in active]
            if name in SHARES and len(active) < len(experts):
                total = sum(values)
                values = [share / total if total > 0 else 1 / len(values) for share in values]
            options[name] = values
    return options


def reloaded(old: Lineup, new: Lineup) -> dict[str, Any]:
    """What a reload changed, for the audit log: which experts were added, removed and replaced by others."""
    before, after = ({card.name: card.weights_sha256 for card in lineup.pool.cards} for lineup in (old, new))
    signers = new.pool.signed_by
    return {
        "before": old.identity["pool_sha256"],
        "after": new.identity["pool_sha256"],
        "changed": old.identity["provenance"] != new.identity["provenance"],
        "experts": list(after),
        "added": [name for name in after if name not in before],
        "removed": [name for name in before if name not in after],
        "replaced": [name for name in after if name in before and before[name] != after[name]],
        "signed_by": None if signers is None else list(signers.values()),
        "switched_off": list(new.off),
    }


def ready(lineup: Lineup) -> Lineup:
    """Build the method and hash the pool now, not while streams wait; refuse a line-up that the method cannot use."""
    lineup.active_method  # noqa: B018
    lineup.identity  # noqa: B018
    return lineup
