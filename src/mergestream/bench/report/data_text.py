"""Data sets and copies of them, in words."""

from collections.abc import Sequence

from mergestream.data.datasets import DatasetCard
from mergestream.data.datasets.data_verification import DataVerification
from mergestream.data.datasets.index import some


def card_in_words(card: DatasetCard) -> list[str]:
    """A data set's card: a title, then one line for each thing that is known."""
    known = {
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
    return [f"{card.name}: {card.title}", *(f"  {what}: {text}" for what, text in known.items() if text)]


def verification_in_words(found: DataVerification) -> list[str]:
    """Every domain's images by class, what is not as published, and the verdict last."""
    said = [f"{found.name} in {found.location}"]
    for domain, counts in found.counts.items():
        published = found.published.get(domain)
        beside = "" if published is None else f" (published: {published:,})"
        classes = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        said.append(f"  {domain}: {found.in_domain(domain):,} images{beside}: {classes}")
    said.append(f"{found.usable:,} usable of {found.images_found:,} images.")
    reasons: dict[str, list[str]] = {}
    for each in found.left_out:
        reasons.setdefault(each.why, []).append(each.what)
    said += [f"Left out or corrected: {some(what, 3)}: {why}." for why, what in reasons.items()]
    if found.missing:
        said.append(f"Missing, {len(found.missing):,}: {some(found.missing)}.")
    if found.unreadable:
        said.append(f"Unreadable, {len(found.unreadable):,}: {some(found.unreadable)}.")
    said += [f"{d}: {here:,} images, published {there:,}." for d, (here, there) in found.differing.items()]
    said += [f"{domain} has no image of {some(names)}." for domain, names in found.lacking.items()]
    if found.total is not None and found.total != found.usable:
        said.append(f"{found.usable:,} usable images in all, published {found.total:,}.")
    if found.overlap:
        said.append(found.overlap)
    if not found.complete:
        return [*said, "NOT complete."]
    agree = ": every image can be read, and the counts are the published ones (pixels are not compared)"
    unknown = " as far as can be told: every image can be read; no counts are published to compare with"
    return [*said, f"Complete{agree if found.published or found.total else unknown}."]


def _listed(names: Sequence[str], shown: int = 9) -> str:
    return ", ".join(names[:shown]) + (f", … ({len(names)} in all)" if len(names) > shown else "")


def _images(card: DatasetCard) -> str:
    inside = sum(count for domain, count in card.counts.items() if domain not in card.outside) or card.total or 0
    outside = sum(card.counts.get(domain, 0) for domain in card.outside)
    return (f"{inside:,}" if inside else "") + (f", and {outside:,} in the outside tests" if outside else "")
