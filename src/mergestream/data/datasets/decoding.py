"""Samples -> one uint8 array [N,3,H,W]: decoded in parallel, resized as the network will want it, kept on disk."""

import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread

import numpy as np
import torch
from torch import Tensor

from mergestream.data.datasets.arrays import read_array
from mergestream.data.datasets.image_files import array_pixels, crop_border, read_pixels
from mergestream.data.datasets.index import Sample
from mergestream.data.datasets.roots import Root
from mergestream.networks.preprocessing import resize
from mergestream.runtime.files import atomic_array, mapped_array, process_lock, sha256_of_json, write_json

# Raised whenever the same file would give other pixels: what is cached is then decoded again.
REVISION = 2


@dataclass(frozen=True)
class Decoding:
    """How files become pixels: the size (height, width) and interpolation of the network, and where to keep them."""

    size: tuple[int, int] = (224, 224)
    interpolation: str = "bilinear"
    crop_border: bool = False
    cache: Path | None = None
    workers: int = 0  # threads; 0 for one a core

    def fitted(self, pixels: Tensor) -> Tensor:
        """uint8 [3,h,w] -> [3,H,W]."""
        return self.resized(self.cropped(pixels)[None])[0]

    def cropped(self, pixels: Tensor) -> Tensor:
        return crop_border(pixels) if self.crop_border else pixels

    def resized(self, images: Tensor) -> Tensor:
        """uint8 [n,3,h,w] -> [n,3,H,W]."""
        return resize(images, self.size, self.interpolation)


@dataclass(frozen=True)
class Decoded:
    """Pixels uint8 [N,3,H,W] in the order of the samples, and what could not be read: position -> why."""

    images: Tensor
    bad: dict[int, str]


def decode(
    root: Root, samples: Sequence[Sample], how: Decoding, on_image: Callable[[], None] = lambda: None
) -> Decoded:
    """Decode samples, or map what was decoded before from the same files into memory."""
    shape = (len(samples), 3, *how.size)
    if how.cache is None:
        images = np.zeros(shape, dtype=np.uint8)
        return Decoded(torch.from_numpy(images), _fill(images, root, samples, how, on_image))
    array, notes = (how.cache / f"{_key(root, samples, how)}{ending}" for ending in (".npy", ".json"))
    with process_lock(array):
        if _cached(array, notes, shape) is None:
            with atomic_array(array, shape) as images:
                bad = _fill(images, root, samples, how, on_image)
            write_json(notes, {"bad": bad})  # last: an array without its notes is decoded again
        else:
            for _ in samples:
                on_image()
    found = _cached(array, notes, shape)
    assert found is not None
    return _tried_again(found, root, samples, how)


def _tried_again(found: Decoded, root: Root, samples: Sequence[Sample], how: Decoding) -> Decoded:
    """What could not be read may be readable now: a disk was away, a library is there. Only memory is mended."""
    if not found.bad:
        return found
    places = list(found.bad)
    images = np.zeros((len(places), *found.images.shape[1:]), dtype=np.uint8)
    still = _fill(images, root, [samples[place] for place in places], how, lambda: None)
    for position, place in enumerate(places):
        found.images[place] = torch.from_numpy(images[position])
    return Decoded(found.images, {places[position]: why for position, why in still.items()})


def _cached(array: Path, notes: Path, shape: tuple[int, ...]) -> Decoded | None:
    try:
        bad = {int(position): why for position, why in json.loads(notes.read_text(encoding="utf-8"))["bad"].items()}
    except (OSError, ValueError, KeyError):
        return None
    images = mapped_array(array)
    if images is None or images.shape != shape or images.dtype != np.uint8:
        return None
    return Decoded(torch.from_numpy(images), bad)


def _key(root: Root, samples: Sequence[Sample], how: Decoding) -> str:
    files = [(s.file, s.array, s.row, *root.stamp(s.file)) for s in samples]
    place = str(root.location.resolve())
    return sha256_of_json([REVISION, place, files, how.size, how.interpolation, how.crop_border])[:32]


def unreadable(root: Root, samples: Sequence[Sample], on_image: Callable[[], None] = lambda: None) -> dict[int, str]:
    """What cannot be decoded: position -> why. No pixels are kept."""
    return _each(root, samples, 0, lambda position, pixels: None, on_image)  # noqa: ARG005


def _fill(
    images: np.ndarray, root: Root, samples: Sequence[Sample], how: Decoding, on_image: Callable[[], None]
) -> dict[int, str]:
    """Write every sample's pixels to its row."""

    def keep(position: int, pixels: Tensor) -> None:
        images[position] = how.fitted(pixels).numpy()

    return _each(root, samples, how.workers, keep, on_image)


def _each(
    root: Root,
    samples: Sequence[Sample],
    workers: int,
    use: Callable[[int, Tensor], None],
    on_image: Callable[[], None],
) -> dict[int, str]:
    """Decode and use every sample; threads do, since decoders release Python's lock. What fails is told."""
    bad: dict[int, str] = {}
    pixels_of, lock = SamplePixels(root), Lock()

    def one(position: int) -> None:
        try:
            use(position, pixels_of(samples[position]))
        except MemoryError:
            raise
        except Exception as error:  # a decoder may raise anything on a damaged file
            bad[position] = f"{type(error).__name__}: {error}".splitlines()[0]
        with lock:
            on_image()

    with ThreadPoolExecutor(workers or os.cpu_count() or 1, "mergestream-decoding", _use_one_core) as threads:
        for _ in threads.map(one, range(len(samples))):
            pass
    return dict(sorted(bad.items()))


def _use_one_core() -> None:
    """Limit torch to one core in this thread; else each decoding thread starts one helper per core for each copy."""
    with _changing_threads:
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # of this thread, and of threads to come
        restoring = Thread(target=torch.set_num_threads, args=(before,))
        restoring.start()
        restoring.join()


_changing_threads = Lock()


class SamplePixels:
    """A sample's pixels uint8 [3,h,w], asked for by any thread. Arrays inside .npy, .npz and .hdf5 are read once."""

    def __init__(self, root: Root) -> None:
        self._root, self._known, self._lock = root, dict[tuple[str, str], np.ndarray](), Lock()

    def __call__(self, sample: Sample) -> Tensor:
        return self._row(sample) if sample.array else read_pixels(self.content(sample), sample.file)

    def content(self, sample: Sample) -> bytes:
        return self._root.read(sample.file)

    def _row(self, sample: Sample) -> Tensor:
        assert sample.array is not None
        key = sample.file, sample.array
        with self._lock:
            if key not in self._known:
                self._known[key] = read_array(self._root, *key)
        return array_pixels(self._known[key][sample.row])
