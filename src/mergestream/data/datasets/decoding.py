"""Samples -> one uint8 array [N,3,H,W]: decoded in parallel, resized for the network, cached on disk."""

import io
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path, PurePosixPath
from threading import Lock

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from mergestream.data.datasets.index import Sample
from mergestream.data.datasets.roots import Root
from mergestream.data.datasets.table_files import needed_library, read_array
from mergestream.data.intake.input_files import read_upload
from mergestream.data.intake.limits import IntakeError, Limits
from mergestream.data.intake.shades import image_shades, three_channels
from mergestream.networks.preprocessing import resizer
from mergestream.runtime.errors import DataError
from mergestream.runtime.files import atomic_array, mapped_array, process_lock, sha256_of_json, write_json
from mergestream.runtime.seeding import cpu_threads

# Increase it whenever the same file would give other pixels: cached arrays are then decoded again.
REVISION = 2


@dataclass(frozen=True)
class Decoding:
    """How files become pixels: size (height, width), interpolation, and where to cache the result."""

    size: tuple[int, int] = (224, 224)
    interpolation: str = "bilinear"
    crop_border: bool = False
    cache: Path | None = None
    workers: int = 0  # threads; 0 for one per core

    def fit(self, pixels: Tensor) -> Tensor:
        """uint8 [3,h,w] -> [3,H,W]."""
        cropped = crop_border(pixels) if self.crop_border else pixels
        return resizer(self.size, self.interpolation)(cropped[None])[0]


def decode(
    root: Root, samples: Sequence[Sample], how: Decoding, on_image: Callable[[], None] = lambda: None
) -> tuple[Tensor, dict[int, str]]:
    """Decode samples to uint8 [N,3,H,W], or map the cached array of the same files into memory.

    Also return the unreadable ones: position -> reason. Those in the cache are tried again: a disk may be back, a
    library installed.
    """
    shape = (len(samples), 3, *how.size)
    if how.cache is None:
        images = np.zeros(shape, dtype=np.uint8)
        return torch.from_numpy(images), fill(images, root, samples, how, on_image)
    array, notes = (how.cache / f"{_key(root, samples, how)}{ending}" for ending in (".npy", ".json"))
    with process_lock(array):
        cached = _cached(array, notes, shape)
        if cached is None:
            with atomic_array(array, shape) as images:
                bad = fill(images, root, samples, how, on_image)
            write_json(notes, {"bad": bad})  # last: an array without its notes is decoded again
            cached = _cached(array, notes, shape)
        else:
            for _ in samples:
                on_image()
    assert cached is not None
    images, places = cached
    again = np.zeros((len(places), *shape[1:]), dtype=np.uint8)
    still = fill(again, root, [samples[place] for place in places], how, lambda: None)
    images[places] = again
    return torch.from_numpy(images), {places[position]: why for position, why in still.items()}


def _cached(array: Path, notes: Path, shape: tuple[int, ...]) -> tuple[np.ndarray, list[int]] | None:
    """The images of an earlier run, mapped, and the positions of the unreadable ones."""
    try:
        bad = [int(position) for position in json.loads(notes.read_text(encoding="utf-8"))["bad"]]
    except (OSError, ValueError, KeyError):
        return None
    images = mapped_array(array)
    return None if images is None or images.shape != shape or images.dtype != np.uint8 else (images, bad)


def _key(root: Root, samples: Sequence[Sample], how: Decoding) -> str:
    files = [(s.file, s.array, s.row, *root.stamp(s.file)) for s in samples]
    place = str(root.location.resolve())
    return sha256_of_json([REVISION, place, files, how.size, how.interpolation, how.crop_border])[:32]


def fill(
    images: np.ndarray | None, root: Root, samples: Sequence[Sample], how: Decoding, on_image: Callable[[], None]
) -> dict[int, str]:
    """Decode samples into the rows of `images`, or only to see if it works; return the unreadable: position -> reason.

    In threads, since decoders release Python's lock.
    """
    bad: dict[int, str] = {}
    lock, reading = Lock(), Lock()
    whole_array = cache(partial(read_array, root))

    def pixels_of(sample: Sample) -> Tensor:
        """uint8 [3,h,w]. An array in an .npy, .npz or .hdf5 file is read once."""
        if sample.array is None:
            return read_pixels(root.read(sample.file), sample.file)
        with reading:
            array = whole_array(sample.file, sample.array)
        return array_pixels(array[sample.row])

    def one(position: int) -> None:
        try:
            pixels = pixels_of(samples[position])
            if images is not None:
                images[position] = how.fit(pixels).numpy()
        except MemoryError:
            raise
        except Exception as error:  # a decoder may raise anything on a damaged file
            bad[position] = f"{type(error).__name__}: {error}".splitlines()[0]
        with lock:
            on_image()

    # New threads have one, too: else each of them starts one helper per core for each copy.
    with cpu_threads(1), ThreadPoolExecutor(how.workers or os.cpu_count() or 1, "mergestream-decoding") as threads:
        list(threads.map(one, range(len(samples))))
    return dict(sorted(bad.items()))


# The user's own files are trusted, so they may be large.
OWN = Limits(file_bytes=2**33, header_elements=2**24, pixels=2**28, decoded_bytes=2**33, seconds=600)
# A fundus photograph's frame is not quite black.
BLACK = 16


def read_pixels(content: bytes, name: str) -> Tensor:
    """Decode an image to uint8 [3,H,W]. Transparency is dropped; more than 8 bits are stretched over their range.

    DICOM is rescaled and windowed as in the service, so that an expert is trained on the pixels that it will see.
    """
    if PurePosixPath(name).suffix.lower() == ".dcm":
        return _dicom(content, name)
    try:
        opened = Image.open(io.BytesIO(content))
    except UnidentifiedImageError:
        raise DataError("not an image in a supported format") from None
    with opened as image:
        return torch.from_numpy(three_channels(image_shades(image)))


def array_pixels(image: np.ndarray) -> Tensor:
    """Convert a row of an array, [H,W] or [H,W,1 or 3], to uint8 [3,H,W]."""
    if image.dtype != np.uint8 or image.ndim not in (2, 3):
        raise DataError(f"An image in an array is uint8 [H,W] or [H,W,3], got {image.dtype} {image.shape}.")
    return torch.from_numpy(three_channels(image))


def crop_border(image: Tensor) -> Tensor:
    """Crop to the smallest rectangle [3,h,w] that holds everything that is not black."""
    bright = image.amax(dim=0) > BLACK
    rows, columns = bright.any(dim=1).nonzero()[:, 0], bright.any(dim=0).nonzero()[:, 0]
    if not len(rows):
        return image
    return image[:, int(rows[0]) : int(rows[-1]) + 1, int(columns[0]) : int(columns[-1]) + 1]


def _dicom(content: bytes, name: str) -> Tensor:
    needed_library("pydicom", f"{name} is DICOM, which")
    try:
        pictures = read_upload(content, OWN)
    except IntakeError as error:
        raise DataError(error.sentence) from error
    if len(pictures) > 1:
        raise DataError(f"the DICOM file holds {len(pictures)} frames; a data set has one image per file")
    return torch.from_numpy(pictures[0].pixels)
