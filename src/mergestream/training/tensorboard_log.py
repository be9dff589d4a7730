"""TensorBoard files of a fit."""

from pathlib import Path
from typing import Any

from mergestream.runtime.errors import InputError


class TensorboardLog:
    """Losses and accuracies over time, written from the first validation on; replaces an earlier fit's files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def add(self, line: dict[str, float]) -> None:
        if self._writer is None:
            for earlier in self._folder.glob("events.out.tfevents.*") if self._folder.exists() else ():
                earlier.unlink()
            self._writer = require_tensorboard()(str(self._folder))
        for key, value in line.items():
            if key != "step":
                split, _, kind = key.partition("_")
                self._writer.add_scalar(f"{kind}/{split}", value, int(line["step"]))

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def require_tensorboard() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError("TensorBoard files need TensorBoard: pip install 'mergestream[tensorboard]'.") from error
    return SummaryWriter
