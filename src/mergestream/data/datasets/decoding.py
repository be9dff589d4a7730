"""Samples -> one uint8 array [N,3,H,W]: decoded in parallel, resized for the network, cached on disk."""

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
        return resize(cropped[None], self.size, self.interpolation)[0]


@dataclass(frozen=True)
class Decoded:
    """Pixels uint8 [N,3,H,W] in the order of the samples, and the unreadable ones: position -> reason."""

    images: Tensor
    bad: dict[int, str]


def decode(
    root: Root, samples: Sequence[Sample], how: Decoding, on_image: Callable[[], None] = lambda: None
) -> Decoded:
    """Decode samples, or map the cached array of the same files into memory."""
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
    decoded = _cached(array, notes, shape)
    assert decoded is not None
    return _retry_bad(decoded, root, samples, how)


def _retry_bad(decoded: Decoded, root: Root, samples: Sequence[Sample], how: Decoding) -> Decoded:
    """Decode unreadable samples again: a disk may be back, a library installed. The cache file stays as it is."""
    if not decoded.bad:
        return decoded
    places = list(decoded.bad)
    images = np.zeros((len(places), *decoded.images.shape[1:]), dtype=np.uint8)
    still = _fill(images, root, [samples[place] for place in places], how, lambda: None)
    for position, place in enumerate(places):
        decoded.images[place] = torch.from_numpy(images[position])
    return Decoded(decoded.images, {places[position]: why for position, why in still.items()})


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
    """Samples that cannot be decoded: position -> reason. No pixels are kept."""
    return _each(root, samples, 0, lambda position, pixels: None, on_image)  # noqa: ARG005


def _fill(
    images: np.ndarray, root: Root, samples: Sequence[Sample], how: Decoding, on_image: Callable[[], None]
) -> dict[int, str]:
    """Write each sample's pixels to its row; return the unreadable ones."""

    def keep(position: int, pixels: Tensor) -> None:
        images[position] = how.fit(pixels).numpy()

    return _each(root, samples, how.workers, keep, on_image)


def _each(
    root: Root,
    samples: Sequence[Sample],
    workers: int,
    use: Callable[[int, Tensor], None],
    on_image: Callable[[], None],
) -> dict[int, str]:
    """Decode and use every sample, in threads since decoders release Python's lock. Return what failed."""
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
    """Reads a sample's pixels uint8 [3,h,w], in any thread. Arrays in .npy, .npz and .hdf5 files are read once."""

    def __init__(self, root: Root) -> None:
        self._root, self._arrays, self._lock = root, dict[tuple[str, str], np.ndarray](), Lock()

    def __call__(self, sample: Sample) -> Tensor:
        return self._row(sample) if sample.array else read_pixels(self._root.read(sample.file), sample.file)

    def _row(self, sample: Sample) -> Tensor:
        assert sample.array is not None
        key = sample.file, sample.array
        with self._lock:
            if key not in self._arrays:
                self._arrays[key] = read_array(self._root, *key)
        return array_pixels(self._arrays[key][sample.row])
