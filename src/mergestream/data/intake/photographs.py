"""PNG, JPEG, TIFF, BMP and WebP files of untrusted clients -> uint8 pixels. Runs in the child process."""

import io
import re

import numpy as np
from PIL import BmpImagePlugin, Image, JpegImagePlugin, MpoImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin

from mergestream.data.intake.limits import Allowance, IntakeError
from mergestream.data.intake.shades import image_shades

# Imported here: the child process can open no file later.
PLUGINS = (BmpImagePlugin, JpegImagePlugin, MpoImagePlugin, PngImagePlugin, TiffImagePlugin, WebPImagePlugin)
Image.MAX_IMAGE_PIXELS = None  # an allowance limits them
# A camera writes about ten. libjpeg passes over the whole image for each, however short it is.
MOST_SCANS = 32
# Pillow handles each JPEG segment, each byte between segments and each PNG chunk in Python.
MOST_PARTS = 1 << 16
FILL = re.compile(rb"\xff+")


def read_photograph(data: bytes, format_name: str, allowance: Allowance) -> np.ndarray:
    """Decode one image to [H,W] or [H,W,3]; `format_name` is Pillow's name of the format."""
    if format_name == "JPEG" and data.count(b"\xff\xda") > MOST_SCANS:
        raise IntakeError("too_large", f"A JPEG image may have {MOST_SCANS} scans; this one has more.")
    if _parts(data, format_name) > MOST_PARTS:
        raise IntakeError("too_large", f"An image file may have {MOST_PARTS:,} segments; this one has more.")
    with Image.open(io.BytesIO(data), formats=[format_name]) as image:
        _require_single(image, format_name)
        allowance.take(1, image.height, image.width)
        return image_shades(image)


def _parts(data: bytes, format_name: str) -> int:
    """How many steps Pillow would take through the file's structure; it stops counting after the highest number."""
    steps = {"JPEG": _after_jpeg_segment, "PNG": _after_png_chunk}
    if format_name not in steps:
        return 0
    position, parts = 2 if format_name == "JPEG" else 8, 0
    while position < len(data) and parts <= MOST_PARTS:
        position, more = steps[format_name](data, position)
        parts += more
    return parts


def _after_png_chunk(data: bytes, position: int) -> tuple[int, int]:
    return position + 12 + int.from_bytes(data[position : position + 4]), 1


def _after_jpeg_segment(data: bytes, position: int) -> tuple[int, int]:
    """The end of the next segment, and the steps to it: one per byte before its marker."""
    start = FILL.search(data, position)
    if start is None or start.end() == len(data):
        return len(data), len(data) - position
    marker, end = 0xFF00 | data[start.end()], start.end() + 1
    _, _, read_segment = JpegImagePlugin.MARKER.get(marker, ("", "", None))
    if marker == 0xFFDA:  # the pixels follow
        return len(data), end - position
    length = max(int.from_bytes(data[end : end + 2]), 2) if read_segment else 0
    return end + length, end - position


def _require_single(image: Image.Image, format_name: str) -> None:
    """Refuse a file of several images. A camera's JPEG may carry a preview, which does not count."""
    if format_name == "JPEG":
        return
    try:
        image.seek(1)
    except EOFError:
        return
    raise IntakeError("unsupported_format", "The file holds several images. Send each as a file of its own.")
