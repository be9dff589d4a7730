"""Which experts may answer at a target: never one that was trained there, unless that is asked for."""

import logging
from collections.abc import Collection

from mergestream.datasets import DomainData
from mergestream.errors import PoolError
from mergestream.pool import ExpertPool

log = logging.getLogger(__name__)


def sources_for(
    pool: ExpertPool, targets: Collection[str], data: Collection[DomainData], *, leave_out: bool, allow_seen: bool
) -> ExpertPool:
    """The pool without the targets' own experts (`leave_out`); an expert that has seen a target in another way is
    refused. With `allow_seen` all experts stay.
    """
    if allow_seen:
        return pool
    own = [card.name for card in pool.cards if (card.domain or card.name) in targets] if leave_out else []
    if len(own) == len(pool):
        raise PoolError(f"Without the experts of {'+'.join(targets)} nothing is left of the pool {list(pool.names)}.")
    rest = pool.without(*own) if own else pool
    fingerprints = {part.fingerprint() for part in data}
    for card in rest.cards:
        trained = set((card.domain or card.name).split("+")) & set(targets)
        if trained or card.recipe.get("data") in fingerprints:
            raise PoolError(
                f"Leakage: the expert '{card.name}' was trained on the target {'+'.join(targets)}, so its answers say "
                f"nothing about an unseen site. Take it out of the pool, or allow it with --allow-seen."
            )
    return rest


def names_no_domain_of(pool: ExpertPool, domains: Collection[str]) -> bool:
    """Whether no expert says that it comes from one of these domains: then nobody can be left out by name."""
    return not any(set((card.domain or card.name).split("+")) & set(domains) for card in pool.cards)
