"""PNG, JPEG, TIFF, BMP and WebP -> uint8 [3,H,W], with the same pixels as in the data sets."""

import io
import warnings
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from mergestream.data.intake.limits import Allowance
from mergestream.data.intake.refusals import IntakeError
from mergestream.data.intake.shades import image_pixels
from mergestream.runtime.errors import DataError

# Deflate's highest ratio: a PNG that claims more pixels than this allows does not contain them.
MOST_DEFLATED = 1032
# A camera writes about ten. libjpeg passes over the whole image for each, however short it is.
MOST_SCANS = 32
TILE_WIDTH, TILE_HEIGHT = 322, 323


def read_photograph(data: bytes, format_name: str, allowance: Allowance) -> np.ndarray:
    """Decode one image; `format_name` is Pillow's name of the format."""
    try:
        return _decoded(data, format_name, allowance)
    except Image.DecompressionBombError:
        raise IntakeError("too_large", "The image has more pixels than the service decodes.") from None
    except IntakeError:
        raise
    except MemoryError:
        raise IntakeError("too_large", "The image needs more memory than the service has.") from None
    except DataError:
        raise IntakeError("damaged", "The image holds numbers that are not finite.") from None
    except Exception:  # a decoder may raise anything on a damaged file, and quote it
        raise IntakeError("damaged", f"The {format_name} image is damaged or cut off.") from None


@cache
def _keep_pillow_silent() -> None:
    """Pillow warns of each strange number in a file; a client could fill the service's log."""
    warnings.filterwarnings("ignore", module=r"PIL(\.|$)")


def _decoded(data: bytes, format_name: str, allowance: Allowance) -> np.ndarray:
    _keep_pillow_silent()
    if format_name == "WEBP":  # Pillow takes memory for it on opening
        allowance.require_pixels(*_webp_size(data))
    if format_name == "JPEG" and data.count(b"\xff\xda") > MOST_SCANS:
        raise IntakeError("too_large", f"A JPEG image may have {MOST_SCANS} scans; this one has more.")
    with Image.open(io.BytesIO(data), formats=[format_name]) as image:
        _require_single(image, format_name)
        allowance.require_pixels(image.height, image.width)
        if format_name == "PNG" and image.width * image.height // 8 > MOST_DEFLATED * len(data):
            raise ValueError
        if format_name == "TIFF":
            _require_small_tiles(image, allowance)
        allowance.take(1, image.height, image.width)
        return image_pixels(image)


def _require_single(image: Image.Image, format_name: str) -> None:
    """Refuse a file of several images. A camera's JPEG may carry a preview, which does not count."""
    if format_name == "JPEG":
        return
    try:
        image.seek(1)
    except EOFError:
        return
    raise IntakeError("unsupported_format", "The file holds several images. Send each as a file of its own.")


def _require_small_tiles(image: Any, allowance: Allowance) -> None:
    """Check the tile size: libtiff takes memory for a whole tile, which may be larger than the image."""
    width, height = (image.tag_v2.get(tag, 1) for tag in (TILE_WIDTH, TILE_HEIGHT))
    allowance.require_pixels(int(height), int(width))


def _webp_size(data: bytes) -> tuple[int, int]:
    """Width and height from the first chunk: VP8X, VP8L or VP8."""
    kind, body = data[12:16], data[20:30]
    if len(body) < 10:
        raise ValueError
    if kind == b"VP8X":
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    raise ValueError
