"""The page of a reproduction, and its tables as Markdown and LaTeX."""

from pathlib import Path

from mergestream.bench.drift.drift_report import describe_drift
from mergestream.bench.drift.pool_drift import Drift
from mergestream.bench.landscape.landscape_record import Landscape, describe_landscape
from mergestream.bench.report import expert_sections
from mergestream.bench.report.page import NOTICE, render, slug, write_tables
from mergestream.bench.report.result_table import ResultTable
from mergestream.bench.reproduction import reproduction_figures, reproduction_tables
from mergestream.bench.reproduction.dataset_search import describe_places
from mergestream.bench.reproduction.paper_values import ROWS
from mergestream.bench.reproduction.reproduction_record import ReproductionRecord
from mergestream.runtime.files import make_folder, write_text

TITLE = "The Mean is the Mirage, reproduced"
INVENTED = "A rehearsal: invented pictures and networks in miniature. None of these numbers means anything."
DOCUMENT = "tables.tex"  # all tables as one LaTeX document
MANY_ROWS, MOST_ROWS, MANY_COLUMNS = 40, 80, 9  # of a page in small and in tiny print


def write_page(
    record: ReproductionRecord, drift: Drift | None, landscape: Landscape | None, out: Path, tables: Path
) -> None:
    """Write the page to `out`, and every table to the folder `tables`."""
    notice = f"{INVENTED} {NOTICE}" if record.smoke else NOTICE
    page, shown = render(
        "reproduction.html.j2",
        TITLE,
        notice,
        ROWS,
        record=record,
        drift=drift,
        landscape=landscape,
        streams=tuple(dict.fromkeys(row.stream for row in record.rows)),
        reproduction_tables=reproduction_tables,
        reproduction_figures=reproduction_figures,
        expert_sections=expert_sections,
        describe_drift=describe_drift,
        describe_landscape=describe_landscape,
        places=describe_places(list(record.places), whole_paths=False),
    )
    write_text(out, page)
    write_tables(shown, make_folder(tables))
    write_text(tables / DOCUMENT, _document(shown))


def _document(tables: list[ResultTable]) -> str:
    """One LaTeX document with all tables that fit on a page each."""
    size = {t: "tiny" if len(t.rows) > MANY_ROWS or len(t.columns) > MANY_COLUMNS else "scriptsize" for t in tables}
    fitting = [t for t in tables if len(t.rows) <= MOST_ROWS]
    inputs = "\n".join(f"\\let\\size\\{size[t]}\n\\input{{{slug(t.title)}}}\n\\clearpage" for t in fitting)
    head = "\\documentclass[landscape]{article}\n\\usepackage[utf8]{inputenc}\n\\usepackage{booktabs}\n"
    head += "\\usepackage[margin=1cm]{geometry}\n\\tabcolsep=2pt\n"
    head += "\\let\\plaintabular\\tabular\n\\def\\tabular{\\size\\plaintabular}\n"  # a float begins in its usual size
    # Without LaTeX's own number: "Table 12: Table 3: ablation" would name two.
    head += "\\makeatletter\\long\\def\\@makecaption#1#2{\\centering#2\\par\\vskip6pt}\\makeatother\n"
    return f"{head}\\begin{{document}}\n{inputs}\n\\end{{document}}\n"
