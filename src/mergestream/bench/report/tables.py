"""Tables of results: one content, rendered for a terminal, for Markdown and for LaTeX."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.markup import escape as plain
from rich.table import Table as RichTable

from mergestream.bench.analysis.comparison import Duel, Estimate, Row


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column names the row. `best` marks cells (row, column) to stand out."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: frozenset[tuple[int, int]] = frozenset()
    note: str = ""


def results_table(
    rows: Sequence[Row], metric: str, title: str, bounds: Sequence[str] = (), compact: bool = False
) -> Table:
    """Methods by streams; the best method of each stream stands out, rows in `bounds` do not compete.

    `compact` fits a terminal: the mean with half the interval's width.
    """
    labels = list(dict.fromkeys(row.label for row in rows))
    streams = list(dict.fromkeys(row.stream for row in rows))
    values: dict[tuple[str, str], Estimate] = {(row.label, row.stream): getattr(row, metric) for row in rows}
    cells, best = [], set()
    parent = ""
    for label in labels:
        parent = label if "(" not in label else parent
        name = _indented(label, parent) if compact else label
        cells.append((name, *(percent(values.get((label, stream)), compact) for stream in streams)))
    for column, stream in enumerate(streams, start=1):
        competing = [label for label in labels if label not in bounds and (label, stream) in values]
        if competing:
            top = max(_printed(values[label, stream].mean) for label in competing)
            best |= {(labels.index(n), column) for n in competing if _printed(values[n, stream].mean) == top}
    shown = "± half the width of the" if compact else "with the"
    aside = " of the methods, expert rows aside" if bounds else ""
    note = f"Mean over targets in %, {shown} 95 % interval of a bootstrap over batches; bold: highest{aside}."
    return Table(title, ("method", *streams), tuple(cells), frozenset(best), note)


def duels_table(duels: Sequence[Duel], title: str) -> Table:
    """Rivals by streams: the paired difference to one method, with its interval; clear wins and losses stand out."""
    rivals = list(dict.fromkeys(each.theirs for each in duels))
    streams = list(dict.fromkeys(each.stream for each in duels))
    found = {(each.theirs, each.stream): each for each in duels}
    cells, clear = [], set()
    for r, rival in enumerate(rivals):
        row = [found.get((rival, stream)) for stream in streams]
        cells.append((rival, *("–" if each is None else each.points() for each in row)))
        clear |= {(r, c) for c, each in enumerate(row, start=1) if each and "clearly" not in each.outcome}
    note = (
        "Points of a per cent on the same batches, with the 95 % interval of a paired bootstrap; bold: it excludes 0."
    )
    return Table(title, ("against", *streams), tuple(cells), frozenset(clear), note)


def _indented(label: str, parent: str) -> str:
    """A variant right below its method: only the options that make the difference."""
    method, _, options = label.partition("(")
    return f"  {options.removesuffix(')')}" if options and method == parent else label


def _printed(share: float) -> str:
    """What a reader sees: two means that look equal are equal."""
    return f"{100 * share:05.1f}"


def percent(value: Estimate | None, compact: bool = False) -> str:
    if value is None:
        return "–"
    if compact:
        return f"{100 * value.mean:.1f} ±{50 * (value.high - value.low):.1f}"
    return f"{100 * value.mean:.1f} [{100 * value.low:.1f}, {100 * value.high:.1f}]"


def to_rich(table: Table) -> RichTable:
    result = RichTable(
        title=table.title,
        caption=table.note,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for number, column in enumerate(table.columns):
        if number == 0:
            result.add_column(column)
        else:  # a number is never cut; a heading such as dirichlet:0.05 takes two lines
            heading = column.replace(":", "\n:")
            width = max(map(len, [*heading.splitlines(), *(row[number] for row in table.rows)]))
            result.add_column(heading, justify="right", width=width)
    for r, row in enumerate(table.rows):
        cells = [plain(cell) for cell in row]
        result.add_row(*(f"[bold]{cell}[/bold]" if (r, c) in table.best else cell for c, cell in enumerate(cells)))
    return result


def to_markdown(table: Table) -> str:
    columns = [_in_markdown(column) for column in table.columns]
    lines = [" | ".join(columns), "|".join(["---"] + ["---:"] * (len(columns) - 1))]
    for r, row in enumerate(table.rows):
        cells = [_in_markdown(cell) for cell in row]
        lines.append(" | ".join(f"**{cell}**" if (r, c) in table.best else cell for c, cell in enumerate(cells)))
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def _in_markdown(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def to_latex(table: Table) -> str:
    """A booktabs table, its note as the caption's second sentence."""
    head = " & ".join(_tex(column) for column in table.columns)
    lines = []
    for r, row in enumerate(table.rows):
        cells = (f"\\textbf{{{_tex(cell)}}}" if (r, c) in table.best else _tex(cell) for c, cell in enumerate(row))
        lines.append(f"  {' & '.join(cells)} \\\\")
    body = "\n".join(lines)
    return (
        f"\\begin{{table}}[t]\n  \\centering\n  \\caption{{{_tex(table.title)}. {_tex(table.note)}}}\n"
        f"  \\label{{tab:{re.sub('[^a-z0-9]+', '-', table.title.lower())}}}\n"
        f"  \\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}\n  \\toprule\n  {head} \\\\\n  \\midrule\n"
        f"{body}\n  \\bottomrule\n  \\end{{tabular}}\n\\end{{table}}\n"
    )


def _tex(text: str) -> str:
    """Text in which nothing is a command of TeX."""
    special = {
        "\\": "\\textbackslash{}",
        "~": "\\textasciitilde{}",
        "^": "\\textasciicircum{}",
        "–": "--",
        "±": "$\\pm$",
    }
    special |= {character: f"\\{character}" for character in "&%$#_{}"}
    signed = re.sub(r"(?<![\w–])-(?=\d)", "−", text)
    return "".join({**special, "−": "$-$"}.get(character, character) for character in signed)
