"""A pool's drift as files: numbers, static figures, and one interactive page."""

from functools import partial
from pathlib import Path

from mergestream.bench.drift.drift_drawing import static_figure
from mergestream.bench.drift.drift_figures import figures_of
from mergestream.bench.drift.drift_plotly import interactive_figures
from mergestream.bench.drift.drift_summary import describe_drift
from mergestream.bench.drift.pool_drift import Drift, analyse_drift
from mergestream.bench.report.page import NOTICE, Bullets, PageSection, Paragraph, Part, Preformatted, render
from mergestream.runtime.files import make_folder, write_atomically, write_text
from mergestream.runtime.parallel import Track

RECORD, PAGE, FIGURES = "drift.json", "drift.html", "figures"
FORMATS = ("png", "pdf", "svg")
HELP = "Point at a value to read it; click a name in the legend to hide it, twice to see it alone; drag to zoom."


def run_drift(pool: Path, out: Path, track: Track, command: str) -> Drift:
    """Measure the drift of `pool` and write OUT/drift.json, OUT/figures and OUT/drift.html."""
    make_folder(out)
    drift = analyse_drift(pool, track=track)
    drift.save(out / RECORD)
    figures = figures_of(drift)
    with track("Drawing", len(figures) + 1) as advance:
        for figure in figures:
            drawing = static_figure(figure)
            for kind in FORMATS:
                save = partial(drawing.savefig, format=kind, dpi=150, facecolor="white")
                write_atomically(out / FIGURES / f"{figure.name}.{kind}", save)
            advance()
        write_text(out / PAGE, render_drift(drift, command))
        advance()
    return drift


def render_drift(drift: Drift, command: str) -> str:
    """The page as text: summary, interactive figures, provenance."""
    figures: list[Part] = [*interactive_figures(figures_of(drift))]
    hashes = "\n".join(f"{name}: sha-256 {digest}" for name, digest in drift.weights_sha256.items())
    sections = [
        PageSection("Summary", [Bullets(describe_drift(drift))]),
        PageSection("Figures", [Paragraph(HELP), *figures] if figures else [Paragraph("There is nothing to draw.")]),
        PageSection("Provenance", [Preformatted(command), Preformatted(hashes)]),
    ]
    return render(f"Drift of {len(drift.experts)} experts: {drift.network}", NOTICE, sections)
