"""A data set's card as lines of text."""

from collections.abc import Sequence

from mergestream.data.datasets import DatasetCard


def describe_card(card: DatasetCard) -> list[str]:
    """A title, then one line per fact."""
    facts = {
        "domains": _listed(card.domains),
        "outside tests": _listed(card.outside),
        "classes": _listed(card.classes, 12),
        "images": _images(card),
        "never split": card.group,
        "subgroups": _listed(card.subgroups),
        "parts": _listed(card.parts),
        "views": _listed(card.views),
        "overlap": card.overlap,
        "layout": card.layout,
        "licence": card.licence,
        "where": card.source,
        "notes": card.notes,
    }
    return [f"{card.name}: {card.title}", *(f"  {what}: {text}" for what, text in facts.items() if text)]


def _listed(names: Sequence[str], shown: int = 9) -> str:
    return ", ".join(names[:shown]) + (f", … ({len(names)} in all)" if len(names) > shown else "")


def _images(card: DatasetCard) -> str:
    inside = sum(count for domain, count in card.counts.items() if domain not in card.outside) or card.total or 0
    outside = sum(card.counts.get(domain, 0) for domain in card.outside)
    return (f"{inside:,}" if inside else "") + (f", and {outside:,} in the outside tests" if outside else "")
