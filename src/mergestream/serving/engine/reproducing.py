"""Steps of the service computed again where they were computed: what `audit replay` calls for every step line."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mergestream.data.intake.limits import Limits
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError
from mergestream.serving.engine.recomputing import Remembered, recompute

# For files that a service has accepted once, whatever its limits were.
WIDE = Limits(file_bytes=2**33, frames=2**20, images=2**20, decoded_bytes=2**36, seconds=600)


class Reproducer:
    """A `Recompute` over the pool in a folder, moved to the device and the numbers that each line names."""

    def __init__(self, folder: Path) -> None:
        self._pool = ExpertPool.load(folder)
        self._remembered = Remembered()
        self._moved: dict[tuple[str, torch.dtype], ExpertPool] = {}

    def __call__(self, body: Mapping[str, Any], files: Mapping[str, bytes], /) -> dict[str, Any]:
        return recompute(body, files, pool=self._pool_for(body), limits=WIDE, remembered=self._remembered)

    def _pool_for(self, body: Mapping[str, Any]) -> ExpertPool:
        dtype = getattr(torch, str(body.get("dtype")), None)
        if not isinstance(dtype, torch.dtype):
            raise InputError("The line does not say in which numbers the step was computed.")
        # A step of a GPU is computed on the CPU where there is none: near, and told as not exact.
        device = "cuda" if str(body.get("device")).startswith("cuda") and torch.cuda.is_available() else "cpu"
        if (device, dtype) not in self._moved:
            self._moved[device, dtype] = self._pool.to(device, dtype)
        return self._moved[device, dtype]
