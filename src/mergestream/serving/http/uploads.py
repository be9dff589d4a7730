"""Files of a multipart body, in memory only. Their names and headers are ignored."""

from collections.abc import AsyncIterator, Callable

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from mergestream.data.intake.limits import Limits
from mergestream.serving.http.problems import Problem

FIELD, DICOM = b"images", b"application/dicom"
FORM = "multipart/form-data with the files in the field 'images'"
RELATED = 'multipart/related; type="application/dicom"'


class _Files:
    """Collects files from the parser's callbacks."""

    def __init__(self, limits: Limits, take: Callable[[int], None]) -> None:
        self.files: list[bytes] = []
        self._file = bytearray()
        self.complete = False
        self._most_files, self._most_bytes, self._take = limits.images, limits.file_bytes, take
        self._header, self._value, self._disposition = b"", b"", b""

    def on_part_begin(self) -> None:
        if len(self.files) >= self._most_files:
            raise Problem("body_too_large", f"A request may hold at most {self._most_files:,} files.")
        self._disposition = b""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header, self._value = b"", b""

    def on_headers_finished(self) -> None:
        kind, options = parse_options_header(self._disposition)
        if kind != b"form-data" or options.get(b"name") != FIELD:
            raise Problem("invalid_request", "Every part of the form must be a file in the field 'images'.")
        self._file = bytearray()

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if len(self._file) + end - start > self._most_bytes:
            raise Problem("too_large", f"A file may have at most {self._most_bytes:,} bytes.")
        self._take(end - start)
        self._file += data[start:end]

    def on_part_end(self) -> None:
        self.files.append(bytes(self._file))
        self._file.clear()

    def on_end(self) -> None:
        self.complete = True


CALLBACKS = [name for name in vars(_Files) if name.startswith("on_")]


class _Related(_Files):
    """Collects the parts of a multipart/related body, which are all DICOM files."""

    def on_headers_finished(self) -> None:
        self._file = bytearray()


async def files_of(
    content_type: str, body: AsyncIterator[bytes], take: Callable[[int], None], limits: Limits, *, dicom: bool = False
) -> list[bytes]:
    """The files in the field 'images', or those of a STOW-RS request (`dicom`; PS3.18 8.7.1), in order.

    `take` is called with the bytes of each part.
    """
    kind, options = parse_options_header(content_type.encode("latin-1", "replace"))
    of_dicom = kind == b"multipart/related" and options.get(b"type", DICOM).lower() == DICOM
    if not (of_dicom if dicom else kind == b"multipart/form-data"):
        raise Problem("unsupported_media_type", f"Send {RELATED if dicom else FORM}.")
    collected = (_Related if dicom else _Files)(limits, take)
    if not options.get(b"boundary"):
        raise _malformed()
    try:
        parser = MultipartParser(options[b"boundary"], {name: getattr(collected, name) for name in CALLBACKS})  # type: ignore[arg-type]
        async for chunk in body:
            parser.write(chunk)
        parser.finalize()
    except FormParserError:
        raise _malformed() from None
    if not collected.complete:
        raise _malformed()
    if not collected.files:
        raise Problem("empty", "The body holds no file.")
    return collected.files


def _malformed() -> Problem:
    return Problem(
        "malformed_multipart", "The body is cut off, or its parts are not separated by the announced boundary."
    )
