"""What to measure in a loss landscape."""

from dataclasses import dataclass

from mergestream.bench.engine.plan import DEVICES
from mergestream.bench.engine.variants import Variant, parse_variants
from mergestream.data.datasets.data_request import DataRequest
from mergestream.data.streams import parse_stream
from mergestream.runtime.errors import InputError
from mergestream.runtime.option_checks import one_of, whole_number


@dataclass(frozen=True)
class LandscapeRequest:
    """All arguments of a landscape. `data.images` is how many of the target's images the loss is measured on."""

    pool: str
    data: DataRequest
    target: str | None
    experts: tuple[str, ...] = ()  # three names; default: the first three that were not trained on the target
    resolution: int = 21
    margin: float = 0.2
    batch_size: int = 128
    use_labels: bool = True
    recalibrate_bn: bool = False
    path: str | None = None  # 'method/stream', as in 'entropy_adaptive(head=shared)/dirichlet:0.05'
    path_batches: int = 64
    stream_batch_size: int = 32
    seed: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        # Checked before any work: opening a data set may take minutes.
        if self.data.images is not None:
            whole_number("images", self.data.images, low=2)
        whole_number("path_batches", self.path_batches, low=1)
        whole_number("stream_batch_size", self.stream_batch_size, low=1)
        whole_number("resolution", self.resolution, low=2)
        whole_number("batch_size", self.batch_size, low=1)
        one_of("device", self.device, DEVICES)
        if self.path is not None:
            parse_path(self.path)


def parse_path(text: str) -> tuple[Variant, str]:
    """Parse 'method/stream' into one method variant and one stream."""
    method, slash, stream = text.rpartition("/")
    if not slash:
        raise InputError(f"A path is method/stream, as in 'entropy_adaptive/dirichlet:0.05'; got '{text}'.")
    variants = parse_variants(method)
    if len(variants) != 1:
        raise InputError(f"A path needs one method, got {len(variants)} in '{method}'.")
    parse_stream(stream)
    return variants[0], stream
