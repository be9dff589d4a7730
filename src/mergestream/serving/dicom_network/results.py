"""Results of received DICOM objects, as they are handed to what sends reports."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mergestream.data.intake.pictures import Picture
from mergestream.serving.engine.answers import Answer


@dataclass(frozen=True)
class ImageResult:
    """The result of one picture: a frame of a received object."""

    file: Path  # the received object, a DICOM part-10 file in the inbox
    picture: Picture  # of a series or study: without its pixels, which may be large; the file has them
    answer: Answer  # of the whole batch
    row: int  # of this picture in it


@dataclass(frozen=True)
class UnitSummary:
    """One answer for a series or a study beside those of its images."""

    unit: str  # "series" or "study"
    how: str  # "mean" or "worst"
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]  # [C]
    prediction: str | None  # None where the service abstains


@dataclass(frozen=True)
class UnitResult:
    """What is delivered at once: the images of one object, or those of one complete series or study."""

    images: tuple[ImageResult, ...]
    summary: UnitSummary | None = None  # None for single images
    send_to: tuple[str, ...] | None = None  # names of destinations; None: all


# Returns once everything to send is safely on disk. OutputError: try again later. An object leaves the inbox only after
# that, so a result may be delivered twice after a kill: file names and UIDs of reports must follow from the result.
Delivery = Callable[[UnitResult], None]
