"""Limits of one request, what is left of them while its files are read, and why input is refused."""

from dataclasses import dataclass, fields
from typing import NamedTuple

from mergestream.runtime.errors import InputError


class Refusal(NamedTuple):
    """A kind of refusal: its HTTP status and its meaning."""

    status: int
    meaning: str


# Codes are part of the interface: clients compare them. docs/dicom.md lists them; a test compares the two.
REFUSALS = {
    "empty": Refusal(400, "There are no bytes, or no image among them."),
    "unsupported_format": Refusal(415, "The format, or a feature of it that the pixels need, is not supported."),
    "not_an_image": Refusal(422, "A DICOM object without pixels, such as a report or a plan."),
    "damaged": Refusal(422, "Truncated, changed on the way, or contradicting itself."),
    "wrong_type": Refusal(422, "A NumPy array of another type than uint8."),
    "wrong_shape": Refusal(422, "A NumPy array whose shape is not that of images."),
    "too_large": Refusal(413, "More bytes, pixels or header than the service's limits allow."),
    "too_many": Refusal(413, "More images or frames than the service's limits allow."),
    "too_slow": Refusal(422, "Decoding took longer than the service's limits allow."),
    "decoder_missing": Refusal(501, "The service lacks the package that decodes this compression; it says which."),
}


class IntakeError(InputError):
    """Refused input: a stable code and a sentence that quotes nothing of what the client sent."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code, self.sentence = code, sentence
        self.status = REFUSALS[code].status
        self.position: int | None = None  # of the file in its request, from 0

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return IntakeError, (self.code, self.sentence)


def damaged_dicom() -> IntakeError:
    return IntakeError("damaged", "The DICOM file is damaged or cut off: its elements do not fit together.")


def damaged_file(kind: str) -> IntakeError:
    """`kind`: 'DICOM', or Pillow's name of the format."""
    return damaged_dicom() if kind == "DICOM" else IntakeError("damaged", f"The {kind} image is damaged or cut off.")


MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Limits on input. All are checked before memory is taken for what a header claims."""

    file_bytes: int = 64 * MEBIBYTE  # of a file as received, and of a deflated DICOM data set once inflated
    header_elements: int = 50_000  # elements of a DICOM file, and items of its sequences
    pixels: int = 1 << 25  # of an image: 33.5 million, more than a full-field mammogram
    frames: int = 256  # of a DICOM file
    images: int = 256  # of a request
    decoded_bytes: int = 512 * MEBIBYTE  # of a request, three per pixel
    seconds: float = 20.0  # to decode a file

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise InputError(f"The limit {field.name} is above 0, got {getattr(self, field.name)}.")


@dataclass
class Allowance:
    """What is left of a request's limits. One per request, used by one thread."""

    limits: Limits
    images: int
    decoded_bytes: int

    @classmethod
    def of(cls, limits: Limits) -> "Allowance":
        return cls(limits, limits.images, limits.decoded_bytes)

    def take(self, images: int, height: int, width: int) -> None:
        """Reserve room for images of one size before they are decoded."""
        if height * width > self.limits.pixels:
            raise IntakeError("too_large", f"An image may have {self.limits.pixels:,} pixels; this one has more.")
        if images > self.images:
            raise IntakeError("too_many", f"A request may hold {self.limits.images:,} images; this one has more.")
        if images * height * width * 3 > self.decoded_bytes:
            mebibytes = self.limits.decoded_bytes / MEBIBYTE
            raise IntakeError("too_large", f"All images of a request may take {mebibytes:,.0f} MiB; these take more.")
        self.images -= images
        self.decoded_bytes -= images * height * width * 3
