"""Measures a loss landscape on a pool and a data set, and writes its record and figures."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mergestream.bench.engine.plan import DEVICES
from mergestream.bench.engine.pool_at_target import load_pool, method_of, some_images, sources_for, trained_at
from mergestream.bench.evaluation import require_same_classes
from mergestream.bench.landscape.landscape_figures import landscape_figure
from mergestream.bench.landscape.landscape_measurement import StreamedMethod, measure_landscape
from mergestream.bench.landscape.landscape_record import Landscape
from mergestream.bench.report.figures import write_figure
from mergestream.data.datasets import DataRequest, Dataset, DomainData, open_data
from mergestream.data.streams import Stream, create_stream, parse_stream
from mergestream.methods.spelling import Variant, parse_variants
from mergestream.pool.expert_card import library_versions
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError, some
from mergestream.runtime.files import make_folder
from mergestream.runtime.option_checks import one_of, whole_number
from mergestream.runtime.parallel import Track

RECORD, FIGURES = "landscape.json", "figures"
PATH_BATCHES = 64  # at most


@dataclass(frozen=True)
class LandscapeRequest:
    """All arguments of a landscape. `data.images` is how many of the target's images the loss is measured on."""

    pool: str
    data: DataRequest
    target: str | None
    experts: tuple[str, ...] = ()  # three names; default: the first three that were not trained on the target
    resolution: int = 21
    batch_size: int = 128
    use_labels: bool = True
    recalibrate_bn: bool = False
    path: str | None = None  # 'method/stream', as in 'entropy_adaptive(head=shared)/dirichlet:0.05'
    stream_batch_size: int = 32
    device: str = "auto"

    def __post_init__(self) -> None:
        # Checked before any work: opening a data set may take minutes.
        if self.data.images is not None:
            whole_number("images", self.data.images, low=2)
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


def run_landscape(request: LandscapeRequest, out: Path, track: Track, *, command: str = "") -> Landscape:
    """Measure a landscape and write OUT/landscape.json and OUT/figures/landscape.png, .pdf and .svg."""
    make_folder(out)
    whole = load_pool(request.pool, request.device)
    dataset = open_data(request.data, whole.template.require_preprocessing(), out)
    if request.target is None:
        raise InputError(f"Name the target: --target and one of {some((*dataset.domains, *dataset.outside))}.")
    target = dataset[request.target]
    pool = _sources(whole, request, target)
    require_same_classes(target.classes, pool)
    shown = some_images(target, request.data.images)
    path = None if request.path is None else _streamed(request, request.path, pool, dataset, target)
    landscape = measure_landscape(
        pool,
        shown.images,
        shown.labels if request.use_labels else None,
        experts=request.experts or None,
        resolution=request.resolution,
        batch_size=request.batch_size,
        recalibrate_bn=request.recalibrate_bn,
        path=path,
        track=track,
        provenance=_provenance(request, pool, shown, path, command),
    )
    landscape.save(out / RECORD)
    write_figure(landscape_figure(landscape), out / FIGURES, "landscape", dpi=100)
    return landscape


def _sources(pool: ExpertPool, request: LandscapeRequest, target: DomainData) -> ExpertPool:
    """The pool without the target's own expert, unless it is named: a path that uses it would mean nothing."""
    for name in request.experts:
        pool.index(name)  # an unknown one is refused
    named = any(name in request.experts for name in trained_at(pool, (target.name,)))
    return sources_for(pool, Path(request.pool), (target.name,), (target,), leave_out=True, allow_seen=named)


def _streamed(
    request: LandscapeRequest, path: str, pool: ExpertPool, dataset: Dataset, target: DomainData
) -> StreamedMethod:
    variant, spec = parse_path(path)
    columns = {"acquired": target.acquired, "groups": target.groups, "classes": target.classes}
    stream = create_stream(spec, target.labels, batch_size=request.stream_batch_size, seed=0, **columns)
    first = Stream(stream.name, stream.batches[:PATH_BATCHES])
    return StreamedMethod(method_of(variant, pool, dataset), target, first)


def _provenance(
    request: LandscapeRequest, pool: ExpertPool, shown: DomainData, path: StreamedMethod | None, command: str
) -> dict[str, Any]:
    streamed = path and {
        "method": path.method.name,
        "options": path.method.options(),
        "stream": {"name": path.stream.name, "hash": path.stream.hash, "batches": len(path.stream)},
    }
    return {
        "command": command,
        "arguments": asdict(request),
        "pool": pool.fingerprint(),
        "data": {"dataset": shown.dataset, "domain": shown.name, "fingerprint": shown.fingerprint()},
        "path": streamed,
        "trained_on_target": trained_at(pool, (shown.name,)),
        "environment": library_versions(),
    }
