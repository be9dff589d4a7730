"""A decoded image with the hashes for the audit log, and pictures of any size as one batch."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from mergestream.networks.preprocessing import Preprocessing, resizer
from mergestream.runtime.errors import InputError


@dataclass(frozen=True, repr=False)
class DicomSource:
    """The DICOM object that a picture came from. It identifies a patient, so it is never logged."""

    sop_class_uid: str
    sop_instance_uid: str
    study_uid: str
    series_uid: str

    def __repr__(self) -> str:
        return "DicomSource(withheld)"


@dataclass(frozen=True, eq=False)
class Picture:
    """uint8 pixels [3,H,W], the sha-256 of the bytes as received, and that of the pixels and their shape."""

    pixels: np.ndarray = field(repr=False)
    sha256: str
    pixels_sha256: str
    frame: int | None = None  # from 1, if the file holds several images
    source: DicomSource | None = field(default=None, repr=False)


def sha256_of_pixels(pixels: np.ndarray) -> str:
    """sha-256 of 'uint8 3,H,W', a zero byte, and the pixels row by row."""
    shape = ",".join(map(str, pixels.shape))
    digest = hashlib.sha256(f"{pixels.dtype} {shape}\0".encode())
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.hexdigest()


def stack(
    pictures: Sequence[Picture], preprocessing: Preprocessing | None, device: str | torch.device = "cpu"
) -> Tensor:
    """Stack pictures of any size to uint8 [B,3,S,S], each resized as `pool.prepare` would resize it alone.

    `device` is the pool's: a GPU rounds resized pixels differently, and answers must equal those of the Python API.
    """
    if not pictures:
        raise InputError("The batch is empty; skip it, or wait for images.")
    if preprocessing is None:
        raise InputError(
            "This pool has no preprocessing, so images cannot be served. "
            "Save it with preprocessing=mergestream.Preprocessing(size=…)."
        )
    images = [torch.from_numpy(picture.pixels).to(device)[None] for picture in pictures]
    return torch.cat([*map(resizer(preprocessing.size, preprocessing.interpolation), images)])
