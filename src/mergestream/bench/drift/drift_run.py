"""A pool's drift, from its folder to numbers, figures and a page."""

from functools import partial
from pathlib import Path

from mergestream.bench.drift.drift_figures import figures_of
from mergestream.bench.drift.drift_page import render_drift
from mergestream.bench.drift.weights import SCHEMA_VERSION, Drift, analyse_drift
from mergestream.runtime.files import make_folder, read_json, write_atomically, write_json, write_text
from mergestream.runtime.parallel import Track

RECORD, PAGE, FIGURES = "drift.json", "drift.html", "figures"
FORMATS = ("png", "pdf", "svg")


def run_drift(pool: Path, out: Path, track: Track, command: str) -> Drift:
    """Measure and write OUT/drift.json, OUT/figures and OUT/drift.html."""
    make_folder(out)
    drift = analyse_drift(pool, track=track)
    write_json(out / RECORD, drift.to_json())
    figures = figures_of(drift)
    with track("Drawing", len(figures) + 1) as advance:
        for name, figure in figures.items():
            for kind in FORMATS:
                save = partial(figure.savefig, format=kind, dpi=150, facecolor="white")
                write_atomically(out / FIGURES / f"{name}.{kind}", save)
            advance()
        write_text(out / PAGE, render_drift(drift, command))
        advance()
    return drift


def read_drift(out: Path) -> Drift:
    """What `run_drift` wrote."""
    return Drift.from_json(read_json(out / RECORD, SCHEMA_VERSION))
