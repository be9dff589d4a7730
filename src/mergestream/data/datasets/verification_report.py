"""A copy of a data set in sentences, and as a report for an issue: counts and sizes, no file or patient names."""

import io
import platform
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from mergestream.data.datasets.index import CARDS, DatasetCard, Index
from mergestream.data.datasets.roots import Root
from mergestream.runtime.errors import DataError, some

if TYPE_CHECKING:
    from mergestream.data.datasets.dataset_sources import DataVerification

LIBRARIES = ("mergestream", "torch", "pillow", "numpy")
FOLDERS = 40  # of a refused copy
LOOKED_AT = 20  # images of each domain whose width and height are read


def file_facts(root: Root, index: Index) -> dict[str, Any]:
    """Kinds and sizes of the files that hold the images, and pixel sizes of some images of each domain."""
    files = sorted({sample.file for sample in index.samples})
    sizes = [root.stamp(file)[0] for file in files]
    pixels: Counter[str] = Counter()
    for domain in index.counts():
        own = [sample for sample in index.of(domain) if sample.array is None]
        pixels.update(_pixel_size(root, sample.file) for sample in own[:: max(1, len(own) // LOOKED_AT)][:LOOKED_AT])
    return {
        "files": len(files),
        "bytes": sum(sizes),
        "median_bytes": int(statistics.median(sizes)) if sizes else 0,
        "kinds": dict(Counter(PurePosixPath(file).suffix.lower() or "none" for file in files).most_common()),
        "pixels": dict(pixels.most_common(6)),
    }


def _pixel_size(root: Root, file: str) -> str:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(root.read(file))) as image:
            return f"{image.width}x{image.height} {image.mode}"
    except Exception:  # another format (DICOM), or damaged, which is counted elsewhere
        return "not read"


def describe_verification(verification: "DataVerification") -> list[str]:
    """Every domain's images by class, differences from the published counts, and the verdict last."""
    lines = [f"{verification.index.card.name} in {verification.location}"]
    for domain, counts in verification.index.counts().items():
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
    if verification.lacking and verification.index.card.licence == "yours":
        lines.append("If that is right for this site, train and compare with --allow-missing-classes.")
    if verification.index.total is not None and verification.index.total != verification.usable:
        lines.append(f"{verification.usable:,} usable images in all, published {verification.index.total:,}.")
    if verification.index.card.overlap:
        lines.append(verification.index.card.overlap)
    if not verification.complete:
        return [*lines, "NOT complete."]
    agree = ": every image can be read, and the counts are the published ones (pixels are not compared)"
    unknown = " as far as can be told: every image can be read; no counts are published to compare with"
    return [*lines, f"Complete{agree if verification.published or verification.index.total else unknown}."]


def report_lines(verification: "DataVerification") -> list[str]:
    """The report in Markdown. Domains of a user's own data are numbered: their names may be those of hospitals."""
    index, files, card = verification.index, verification.files, verification.index.card
    groups = {sample.group for sample in index.samples} - {None}
    lines = [
        *_heading(card, "complete" if verification.complete else "NOT complete"),
        f"- {verification.usable} usable of {index.images_found} images; published in all: {index.total or '?'}",
        f"- missing {len(index.missing)}, unreadable {len(verification.unreadable)}",
        f"- files: {files['files']}, {files['bytes'] / 1e6:.1f} MB, median {files['median_bytes']} bytes",
        f"- kinds: {_counts(files['kinds'])}; pixels of a sample: {_counts(files['pixels']) or 'not read'}",
        f"- groups ({card.group or 'none'}): {len(groups)}",
        "",
        f"| domain | published | images | {' | '.join(card.classes)} |",
        "|---" * (3 + len(card.classes)) + "|",
    ]
    own = _is_own(card)
    for number, (domain, counts) in enumerate(index.counts().items(), start=1):
        name = f"domain {number}" if own else domain
        row = [name, verification.published.get(domain, "?"), sum(counts.values()), *counts.values()]
        lines.append(f"| {' | '.join(map(str, row))} |")
    differences = [_anonymous(each.why) for each in index.left_out]
    differences += [f"unreadable: {_anonymous(text.partition(': ')[2])}" for text in verification.unreadable]
    if differences:
        lines += ["", "Left out, corrected or unreadable:", ""]
        lines += [f"- {count} x {why}" for why, count in Counter(differences).most_common(20)]
    return lines


def refusal_lines(card: DatasetCard, root: Root, refusal: DataError) -> list[str]:
    """The report on a copy that the loader refuses: why, and how many files lie where; of one's own data only kinds."""
    kinds = Counter(PurePosixPath(file).suffix.lower() or "none" for file in root.files)
    lines = [*_heading(card, "refused"), f"- kinds: {_counts(kinds) or 'no files'}"]
    if not _is_own(card):
        folders = Counter(str(PurePosixPath(file).parent) for file in root.files)
        lines.append(f"- {_anonymous(str(refusal))}")
        lines += [f"- {folder}: {count} files" for folder, count in sorted(folders.items())[:FOLDERS]]
    return lines


def _heading(card: DatasetCard, verdict: str) -> list[str]:
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in LIBRARIES)
    return [
        f"### `data verify {card.name}`: {verdict}",
        "",
        f"- {versions}, Python {platform.python_version()}, {platform.system()}",
        f"- loader checked against: {card.verified or 'nothing'}. {card.verified_note}".rstrip(),
    ]


def _is_own(card: DatasetCard) -> bool:
    return card.name not in CARDS or card.licence == "yours"


def _counts(values: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in values.items())


def _anonymous(text: str) -> str:
    """A reason without what may be the name of a file, patient or case: words with digits, slashes, dots inside."""
    words: Iterable[str] = text.split()
    return " ".join("…" if re.search(r"[\d/\\_@]|\.\w", word) else word for word in words)
