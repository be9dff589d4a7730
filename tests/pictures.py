"""Picture files that tests write themselves."""

from pathlib import Path

import numpy as np

from mergestream.data.datasets.standins.drawing import write_files


def write_picture(path: Path, pixels: np.ndarray) -> None:
    write_files(path.parent, {path.name: pixels})
