"""Comparison of expert cards: do these experts belong in one pool?"""

from collections.abc import Sequence

from mergestream.pool.expert_card import ExpertCard
from mergestream.runtime.errors import PoolError

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
    for field, word in COMPARED.items():
        mine, theirs = getattr(card, field), getattr(reference, field)
        if mine == theirs:
            continue
        if field == "classes" and sorted(mine) == sorted(theirs):
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
