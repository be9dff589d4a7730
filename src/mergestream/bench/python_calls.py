"""`mergestream.bench(...)` and `mergestream.report(...)`: the commands of these names in Python."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergestream.data.datasets import DataRequest
from mergestream.runtime.parallel import Track, quiet

if TYPE_CHECKING:
    from mergestream.bench.analysis.bench_findings import BenchFindings
    from mergestream.bench.report.report_findings import ReportFindings

Texts = str | Iterable[str | float]  # 'iid,dirichlet:0.05' or ["iid", "dirichlet:0.05"]


def bench(
    dataset: str,
    pool: str | Path | Sequence[str | Path],
    *,
    root: str | Path | None = None,
    out: str | Path = "runs",
    plan: str | None = None,
    methods: Texts | None = None,
    streams: Texts | None = None,
    targets: Texts = "all",
    seeds: Texts | int | None = None,
    batch_size: Texts | int | None = None,
    protocol: str = "lodo",
    data_option: Mapping[str, Any] | Sequence[str] | None = None,
    images: int | None = None,
    reference: str | None = None,
    skip_bad: int = 0,
    allow_missing_classes: bool = False,
    allow_seen: bool = False,
    loud_heads: Texts | float = "1",
    timed: bool = False,
    jobs: int = 1,
    engine: str = "local",
    device: str = "auto",
    dtype: str = "float32",
    track: Track = quiet,
    command: str = "mergestream.bench(...) in Python",
) -> "BenchFindings":
    """Compare methods: leave each domain out and stream it through every method, as `mergestream bench` does.

    Options are the command's; lists may be lists. `jobs` above 1 starts processes, for which a script needs
    `if __name__ == "__main__":`. Tables and records go to `out`; what is done already there is not done again.
    """
    from mergestream.bench.engine.benchmark import run_bench
    from mergestream.bench.engine.plan import plan_from
    from mergestream.runtime.devices import resolve_dtype

    limits = {"images": images, "skip_bad": skip_bad, "allow_missing_classes": allow_missing_classes}
    request = plan_from(
        data=DataRequest.parse(dataset, None if root is None else Path(root), data_option, **limits),
        pools=[str(each) for each in ([pool] if isinstance(pool, str | Path) else pool)],
        plan=plan,
        methods=_text(methods),
        streams=_text(streams),
        targets=_text(targets) or "all",
        seeds=_text(seeds),
        batch_sizes=_text(batch_size),
        protocol=protocol,
        reference=reference,
        allow_seen=allow_seen,
        loud_heads=_text(loud_heads) or "1",
        timed=timed,
        device=device,
        dtype=resolve_dtype(dtype, device),
    )
    return run_bench(request, Path(out), track, jobs=jobs, engine=engine, command=command)


def report(
    runs: str | Path,
    out: str | Path = "report.html",
    *,
    tables: str | Path | None = None,
    drift: str | Path | None = None,
    landscape: str | Path | None = None,
    track: Track = quiet,
    command: str = "mergestream.report(...) in Python",
) -> "ReportFindings":
    """Make one self-contained HTML page from a folder of runs, as `mergestream report` does; tables go beside it."""
    from mergestream.bench.report.report_page import make_report  # loads the figures' library

    records = {"tables": tables, "drift": drift, "landscape": landscape}
    paths = {name: None if path is None else Path(path) for name, path in records.items()}
    return make_report(Path(runs), Path(out), track, command=command, **paths)


def _text(items: Texts | float | None) -> str | None:
    """Items as the command line has them, with commas between."""
    if items is None or isinstance(items, str):
        return items
    return ",".join(map(str, items)) if isinstance(items, Iterable) else str(items)
