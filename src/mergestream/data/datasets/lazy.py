"""Domains whose images stay files: a batch is decoded when it is asked for, by as many threads as there are cores."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergestream.data.datasets.base import DomainData
from mergestream.data.datasets.decoding import Decoding, SamplePixels, what_failed
from mergestream.data.datasets.index import Sample
from mergestream.data.datasets.jpeg import can_decode_on_gpu, decode_on_gpu, is_plain_jpeg
from mergestream.data.datasets.roots import Root
from mergestream.data.datasets.threads import decoder_threads
from mergestream.runtime.errors import DataError

# Images decoded at once where all of them pass by, as for a fingerprint.
CHUNK = 256
# Images that one thread decodes in one go, at most.
PIECE = 8


def decoding_threads(asked: int = 0) -> int:
    """As many as asked for, or one a core that this process may use; one where torch is held to one thread."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return asked or max(1, min(cores, torch.get_num_threads()))


class FileImages:
    """Images uint8 [N,3,H,W] that are decoded one by one, by any thread."""

    def __init__(self, root: Root, samples: Sequence[Sample], how: Decoding) -> None:
        self._root, self._samples, self.how = root, samples, how
        self._pixels_of = SamplePixels(root)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self._samples), 3, *self.how.size

    def pick(self, positions: Sequence[int]) -> "FileImages":
        return FileImages(self._root, [self._samples[position] for position in positions], self.how)

    def read(self, positions: Sequence[int], out: Tensor) -> None:
        """Write images to `out` [n,3,H,W]: neighbours of one size are resized together, in fewer calls of torch."""
        decoded, done = [self._usable(position, self._cropped) for position in positions], 0
        for _, alike in groupby(decoded, lambda pixels: (pixels.shape, pixels.stride())):
            together = stacked(list(alike))
            rows = out[done : done + len(together)]
            # NumPy, as the operator's pixels lie channel by channel in turn: torch takes three times as long for one.
            np.copyto(rows.numpy(), self.how.resized(together).numpy())
            done += len(together)

    def for_gpu(self, position: int) -> bytes | Tensor:
        """What a GPU is given of one image: the bytes of a plain JPEG, or the pixels [3,H,W] of any other file."""
        # Finding the border of a picture would make the host wait for the GPU.
        if self._samples[position].array is None and not self.how.crop_border:
            content: bytes = self._usable(position, self._pixels_of.content)
            if is_plain_jpeg(content):
                return content
        return self._usable(position, self._read)

    def on_gpu(self, positions: Sequence[int], given: Sequence[bytes | Tensor], device: torch.device) -> Tensor:
        """A batch [B,3,H,W] on a GPU from what `for_gpu` gave, in the order of the calling thread's stream."""
        jpegs = [content for content in given if isinstance(content, bytes)]
        decoded = iter(decode_on_gpu(jpegs, device))

        def one(position: int, each: bytes | Tensor) -> Tensor:
            there = next(decoded) if isinstance(each, bytes) else None
            if there is not None:
                return self.how.fitted(there)
            pixels = self._usable(position, self._read) if isinstance(each, bytes) else each
            return pixels.pin_memory().to(device, non_blocking=True)

        return torch.stack([one(position, each) for position, each in zip(positions, given, strict=True)])

    def _read(self, sample: Sample) -> Tensor:
        return self.how.fitted(self._pixels_of(sample))

    def _cropped(self, sample: Sample) -> Tensor:
        return self.how.cropped(self._pixels_of(sample))

    def _usable(self, position: int, read: Callable[[Sample], Any]) -> Any:
        sample = self._samples[position]
        try:
            return read(sample)
        except MemoryError:
            raise
        except Exception as error:  # a decoder may raise anything on a damaged file
            raise DataError(
                f"{sample.file} cannot be read: {what_failed(error)}. Restore it, or load without lazy=True: only then "
                f"can skip_bad leave it out."
            ) from error


class FileDomain(DomainData):
    """A domain whose images stay files until a batch asks for them; `images` decodes them all and keeps them.

    Its fingerprint is that of the decoded domain, so it takes a pass over all files. With `gpu` JPEGs are decoded on a
    GPU, and the fingerprint says so.
    """

    files: FileImages | None
    gpu: bool

    def __init__(
        self,
        dataset: str,
        name: str,
        classes: tuple[str, ...],
        images: Tensor | FileImages,
        labels: Tensor,
        *known: Any,
        gpu: bool = False,
        **more: Any,
    ) -> None:
        files = None if isinstance(images, Tensor) else images
        shown = images if isinstance(images, Tensor) else torch.empty(images.shape, dtype=torch.uint8, device="meta")
        super().__init__(dataset, name, classes, shown, labels, *known, **more)
        vars(self).update(files=files, gpu=gpu and files is not None and can_decode_on_gpu())
        if files is not None:
            del vars(self)["images"]  # its shape was checked; the property below gives the pixels

    @cached_property
    def images(self) -> Tensor:  # type: ignore[override]
        return torch.cat(list(self._chunks()))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.files.shape if self.files else super().shape

    @property
    def in_memory(self) -> bool:
        return self.files is None or ("images" in vars(self) and not self.gpu)

    @property
    def decoders(self) -> int:
        return decoding_threads(self.files.how.workers) if self.files else 1

    def batch(self, indices: Tensor) -> Tensor:
        if self.in_memory or self.files is None:
            return super().batch(indices)
        positions = as_positions(indices)
        if not self.gpu:
            return self._decoded(positions)
        return self.files.on_gpu(positions, [self.files.for_gpu(p) for p in positions], torch.device("cuda")).cpu()

    def pieces(self, positions: Sequence[int], out: Tensor) -> list[Callable[[], Any]]:
        if self.in_memory or self.files is None:
            return super().pieces(positions, out)
        size = piece_size(len(positions), self.decoders)
        starts = range(0, len(positions), size)
        return [partial(self.files.read, positions[at : at + size], out[at : at + size]) for at in starts]

    def subset(self, indices: Tensor) -> DomainData:
        if self.files is None:
            return super().subset(indices)
        picked, told = self.files.pick(as_positions(indices)), self._told_of(indices)
        return FileDomain(self.dataset, self.name, self.classes, picked, gpu=self.gpu, **told)

    def _decoded(self, positions: Sequence[int]) -> Tensor:
        out = torch.empty((len(positions), *self.shape[1:]), dtype=torch.uint8)
        with decoder_threads(self.decoders) as threads:
            for _ in threads.map(lambda piece: piece(), self.pieces(positions, out)):
                pass
        return out

    def _chunks(self) -> Iterator[Tensor]:
        for start in range(0, len(self), CHUNK):
            yield self._decoded(range(start, min(start + CHUNK, len(self))))

    def _content(self) -> Iterator[bytes | memoryview]:
        if self.gpu:
            yield b"JPEG by nvJPEG"  # other pixels than those below, by a little
        for chunk in [self.images] if self.in_memory else self._chunks():
            yield chunk.contiguous().numpy().data


def piece_size(images: int, threads: int) -> int:
    """How many images of a batch a thread decodes in one go: every call of torch hands Python's lock around, which many
    threads wait for. Half the threads get a piece; the others have the next batch's."""
    return max(1, min(PIECE, 2 * images // threads))


def stacked(images: list[Tensor]) -> Tensor:
    """[n,3,h,w] of images that lie in memory alike, and as they lie: resizing gives each the same bits as alone."""
    if images[0].stride(0) == 1:
        return torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
    return torch.stack(images)


def as_positions(indices: Tensor) -> list[int]:
    """Whole numbers from an index tensor, or from a mask."""
    return (indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices).tolist()
