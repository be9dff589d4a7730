"""The result of 'data verify' as lines of text."""

from mergestream.data.datasets.data_verification import DataVerification
from mergestream.data.datasets.index import some


def describe_verification(verification: DataVerification) -> list[str]:
    """Every domain's images by class, differences from the published counts, and the verdict last."""
    lines = [f"{verification.index.card.name} in {verification.location}"]
    for domain, counts in verification.counts.items():
        published = verification.published.get(domain)
        beside = "" if published is None else f" (published: {published:,})"
        classes = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        lines.append(f"  {domain}: {sum(counts.values()):,} images{beside}: {classes}")
    lines.append(f"{verification.usable:,} usable of {verification.index.images_found:,} images.")
    reasons: dict[str, list[str]] = {}
    for each in verification.index.left_out:
        reasons.setdefault(each.why, []).append(each.what)
    lines += [f"Left out or corrected: {some(what, 3)}: {why}." for why, what in reasons.items()]
    if verification.index.missing:
        lines.append(f"Missing, {len(verification.index.missing):,}: {some(verification.index.missing)}.")
    if verification.unreadable:
        lines.append(f"Unreadable, {len(verification.unreadable):,}: {some(verification.unreadable)}.")
    lines += [f"{d}: {here:,} images, published {there:,}." for d, (here, there) in verification.differing.items()]
    lines += [f"{domain} has no image of {some(names)}." for domain, names in verification.lacking.items()]
    if verification.index.total is not None and verification.index.total != verification.usable:
        lines.append(f"{verification.usable:,} usable images in all, published {verification.index.total:,}.")
    if verification.index.card.overlap:
        lines.append(verification.index.card.overlap)
    if not verification.complete:
        return [*lines, "NOT complete."]
    agree = ": every image can be read, and the counts are the published ones (pixels are not compared)"
    unknown = " as far as can be told: every image can be read; no counts are published to compare with"
    return [*lines, f"Complete{agree if verification.published or verification.index.total else unknown}."]
