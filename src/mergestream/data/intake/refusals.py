"""Why bytes from a client are refused: a table of stable codes, and the error."""

from typing import NamedTuple

from mergestream.runtime.errors import InputError


class Refusal(NamedTuple):
    """A kind of refusal: its HTTP status and its meaning."""

    status: int
    meaning: str


# Codes are part of the interface: clients compare them. docs/dicom.md has the same table; a test compares the two.
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
