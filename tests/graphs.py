"""A GPU's way of stepping without one: a 'graph' is the recorded function, run again; messages arrive when told to."""

from collections.abc import Callable

from torch import Tensor

RECORDED: list[Callable[[], None]] = []


def rerun(function: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph's stand-in: what it computes differs by rounding from the eager step. Noted in `RECORDED`."""
    RECORDED.append(function)
    function()
    return function


class Late:
    """A message that has not arrived until somebody waits for it, or so many have asked."""

    patience = 0

    def __init__(self, values: Tensor) -> None:
        self._values, self._asked = values.clone(), 0

    def arrived(self) -> bool:
        self._asked += 1
        return self._asked > self.patience

    def wait(self) -> Tensor:
        return self._values
