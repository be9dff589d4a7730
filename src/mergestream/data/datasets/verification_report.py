"""A copy of a data set in sentences, and as a report for an issue: counts and sizes, no file or patient names."""

import io
import platform
import re
import statistics
from collections import Counter
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from mergestream.data.datasets.index import CARDS, Index
from mergestream.data.datasets.roots import Root
from mergestream.runtime.errors import some
from mergestream.runtime.text_template import filled

if TYPE_CHECKING:
    from mergestream.data.datasets.dataset_sources import DataVerification

LIBRARIES = ("mergestream", "torch", "pillow", "numpy")
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
    reasons: dict[str, list[str]] = {}
    for each in verification.index.left_out:
        reasons.setdefault(each.why, []).append(each.what)
    return _lines("verification.txt.j2", verification, reasons=reasons, some=some, number="{:,}".format)


def report_lines(verification: "DataVerification") -> list[str]:
    """The report in Markdown. Domains of a user's own data are numbered: their names may be those of hospitals."""
    index, card = verification.index, verification.index.card
    differences = Counter(_anonymous(each.why) for each in index.left_out)
    differences.update(f"unreadable: {_anonymous(text.partition(': ')[2])}" for text in verification.unreadable)
    return _lines(
        "verification_report.md.j2",
        verification,
        versions=_versions(),
        files=verification.files,
        counted=_counts,
        groups=len({sample.group for sample in index.samples} - {None}),
        is_own=card.name not in CARDS or card.licence == "yours",
        differences=differences.most_common(20),
    )


def _lines(template: str, verification: "DataVerification", **values: Any) -> list[str]:
    about: dict[str, Any] = {"verification": verification, "index": verification.index, "card": verification.index.card}
    return filled(Path(__file__).with_name(template), **about, **values).splitlines()


def _versions() -> str:
    names = [f"{name} {metadata.version(name)}" for name in LIBRARIES]
    return f"{', '.join(names)}, Python {platform.python_version()}, {platform.system()}"


def _counts(values: dict[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in values.items())


def _anonymous(text: str) -> str:
    """A reason without what may be the name of a file, patient or case: words with digits, slashes, dots inside."""
    words: Iterable[str] = text.split()
    return " ".join("…" if re.search(r"[\d/\\_@]|\.\w", word) else word for word in words)
