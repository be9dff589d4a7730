"""Step records as lines of JSON: small in memory, and in the files of finished and of partial runs."""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

StepRecord = dict[str, Any]


class StepLines(Sequence[StepRecord]):
    """Records that are parsed whenever they are read: a line takes less than half the memory of its record."""

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self.lines = list(lines)

    @classmethod
    def checked(cls, lines: Iterable[str]) -> "StepLines":
        """Lines of a file; ValueError if one is not JSON."""
        steps = cls(lines)
        for _ in steps:
            pass
        return steps

    def append(self, record: StepRecord) -> None:
        self.lines.append(json.dumps(record))

    def __len__(self) -> int:
        return len(self.lines)

    def __iter__(self) -> Iterator[StepRecord]:
        return map(json.loads, self.lines)

    def __getitem__(self, position: Any) -> Any:
        chosen = self.lines[position]
        return json.loads(chosen) if isinstance(chosen, str) else [json.loads(line) for line in chosen]

    def to_tensor(self) -> Tensor:
        """All lines as bytes: a state file holds tensors of any size, but only 100 MB of text."""
        return torch.from_numpy(np.frombuffer("\n".join(self.lines).encode(), dtype=np.uint8).copy())

    @classmethod
    def from_tensor(cls, stored: Tensor) -> "StepLines":
        return cls(stored.numpy().tobytes().decode().splitlines())
