"""Which experts may answer at a target: never one that was trained there, unless that is asked for."""

from collections.abc import Collection, Iterable
from pathlib import Path

from mergestream.data.datasets import DomainData
from mergestream.data.datasets.image_trees import plain_name
from mergestream.pool.expert_card import BASE, CARD, ExpertCard, read_card
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import PoolError


def sources_for(
    pool: ExpertPool,
    folder: Path,
    targets: Collection[str],
    data: Collection[DomainData],
    *,
    leave_out: bool,
    allow_seen: bool,
) -> ExpertPool:
    """The pool without the targets' own experts (`leave_out`); whatever else has seen a target is refused.

    Looked at are the domains in the cards, however they are spelt, and the hash of the images each was trained on: of
    the experts, of the runs they were chosen from, and of the base they started from. With `allow_seen` all stay.
    """
    if allow_seen:
        return pool
    own = [card.name for card in pool.cards if plain_name(_domain(card)) in _plain(targets)] if leave_out else []
    if len(own) == len(pool):
        raise PoolError(f"Without the experts of {'+'.join(targets)} nothing is left of the pool {list(pool.names)}.")
    rest = pool.without(*own) if own else pool
    runs = rest.candidates.cards if rest.candidates is not None else ()
    base = [read_card(folder / BASE)] if (folder / BASE / CARD).exists() else []
    _require_unseen("expert", rest.cards, targets, data)
    _require_unseen("candidate", runs, targets, data)
    _require_unseen("base", base, targets, data)
    return rest


def strangers(pool: ExpertPool, domains: Collection[str]) -> list[str]:
    """Experts whose domain is none of these: by name alone nobody can tell what they have seen."""
    return [card.name for card in pool.cards if not _plain(_domain(card).split("+")) & _plain(domains)]


def _require_unseen(
    kind: str, cards: Iterable[ExpertCard], targets: Collection[str], data: Collection[DomainData]
) -> None:
    fingerprints = {part.fingerprint() for part in data}
    for card in cards:
        trained = _plain(_domain(card).split("+")) & _plain(targets)
        if trained or card.recipe.get("data") in fingerprints:
            raise PoolError(
                f"Leakage: the {kind} '{card.name}' was trained on the target {'+'.join(targets)}, so its answers say "
                f"nothing about an unseen site. Take it out of the pool, or allow it with --allow-seen."
            )


def _domain(card: ExpertCard) -> str:
    return card.domain or card.name


def _plain(names: Iterable[str]) -> set[str]:
    return {plain_name(name) for name in names}
