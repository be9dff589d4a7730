"""A table of text cells, rendered for a terminal, for Markdown and for LaTeX."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rich import box
from rich.markup import escape
from rich.table import Table as RichTable

from mergestream.runtime.messages import printable

T = TypeVar("T")


@dataclass(frozen=True)
class ResultTable:
    """Cells as text; the first column names the row. `best` lists the cells (row, column) shown in bold."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    best: frozenset[tuple[int, int]] = frozenset()
    note: str = ""


def grid_table(
    title: str,
    corner: str,
    entries: Mapping[tuple[str, str], T],
    cell: Callable[[T], str],
    bold: Callable[[T], bool] = lambda _: False,
    note: str = "",
) -> ResultTable:
    """Lay out entries keyed by (row, column), both in order of first appearance; a missing one is a dash."""
    names = list(dict.fromkeys(row for row, _ in entries))
    columns = list(dict.fromkeys(column for _, column in entries))
    places = {(r, c): (row, column) for r, row in enumerate(names) for c, column in enumerate(columns, start=1)}
    cells = {place: cell(entries[key]) if key in entries else "–" for place, key in places.items()}
    rows = tuple((row, *(cells[r, c] for c in range(1, len(columns) + 1))) for r, row in enumerate(names))
    best = frozenset(place for place, key in places.items() if key in entries and bold(entries[key]))
    return ResultTable(title, (corner, *columns), rows, best, note)


def record_table(
    title: str, records: Iterable[T], columns: Mapping[str, Callable[[T], str]], note: str = ""
) -> ResultTable:
    """One row per record; `columns` are headings with what each cell shows."""
    rows = tuple(tuple(cell(each) for cell in columns.values()) for each in records)
    return ResultTable(title, tuple(columns), rows, note=note)


def format_number(value: float | None, digits: int, factor: float = 1) -> str:
    return "–" if value is None else f"{factor * value:.{digits}f}"


def mark_best(
    table: ResultTable,
    bounds: Collection[str] = (),
    lower_is_better: Collection[str] = (),
    uncompared: Collection[str] = (),
) -> ResultTable:
    """Show the best first number of each column in bold; rows in `bounds`, columns in `uncompared` do not compete."""
    best = set()
    for c, column in enumerate(table.columns[1:], start=1):
        cells = {r: row[c] for r, row in enumerate(table.rows) if row[0] not in bounds and column not in uncompared}
        numbers = {r: float(cell.split()[0]) for r, cell in cells.items() if cell[0].isdigit()}
        top = (min if column in lower_is_better else max)(numbers.values(), default=None)
        best |= {(r, c) for r, number in numbers.items() if number == top}
    return replace(table, best=frozenset(best))


def in_parts(table: ResultTable, width: int) -> list[ResultTable]:
    """The table itself, or parts with as many of its columns as fit into `width` characters."""
    widths = [max(len(row[c]) for row in (table.columns, *table.rows)) + 3 for c in range(len(table.columns))]
    parts: list[list[int]] = [[]]
    for c in range(1, len(widths)):
        if parts[-1] and widths[0] + sum(widths[each] for each in (*parts[-1], c)) > width:
            parts.append([])
        parts[-1].append(c)
    if len(parts) == 1:
        return [table]
    return [_part(table, (0, *own), f"part {n} of {len(parts)}") for n, own in enumerate(parts, start=1)]


def _part(table: ResultTable, columns: Sequence[int], name: str) -> ResultTable:
    best = frozenset((r, columns.index(c)) for r, c in table.best if c in columns)
    rows = tuple(tuple(row[c] for c in columns) for row in table.rows)
    return ResultTable(f"{table.title}, {name}", tuple(table.columns[c] for c in columns), rows, best, table.note)


def to_rich(table: ResultTable) -> RichTable:
    result = RichTable(
        title=printable(table.title),
        caption=printable(table.note),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    result.add_column(printable(table.columns[0]))
    for number, column in enumerate(table.columns[1:], start=1):
        # A number is never cut; a heading such as dirichlet:0.05 takes two lines.
        heading = printable(column).replace(":", "\n:")
        width = max(map(len, [*heading.splitlines(), *(row[number] for row in table.rows)]))
        result.add_column(heading, justify="right", width=width)
    for cells in _body(table, lambda cell: escape(printable(cell)), "[bold]{}[/bold]"):
        result.add_row(*cells)
    return result


def _body(table: ResultTable, escape_text: Callable[[str], str], bold: str) -> Iterator[list[str]]:
    """The rows with every cell escaped, the best ones in bold."""
    for r, row in enumerate(table.rows):
        cells = [escape_text(cell) for cell in row]
        yield [bold.format(cell) if (r, c) in table.best else cell for c, cell in enumerate(cells)]


def to_markdown(table: ResultTable) -> str:
    columns = [_markdown_cell(column) for column in table.columns]
    lines = [" | ".join(columns), "|".join(["---"] + ["---:"] * (len(columns) - 1))]
    lines += [" | ".join(cells) for cells in _body(table, _markdown_cell, "**{}**")]
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def _markdown_cell(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def to_latex(table: ResultTable) -> str:
    """A booktabs table with the note as the caption's second sentence."""
    head = " & ".join(_latex_text(column) for column in table.columns)
    body = "\n".join(f"  {' & '.join(cells)} \\\\" for cells in _body(table, _latex_text, "\\textbf{{{}}}"))
    return (
        f"\\begin{{table}}[t]\n  \\centering\n  \\caption{{{_latex_text(table.title)}. {_latex_text(table.note)}}}\n"
        f"  \\label{{tab:{re.sub('[^a-z0-9]+', '-', table.title.lower())}}}\n"
        f"  \\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}\n  \\toprule\n  {head} \\\\\n  \\midrule\n"
        f"{body}\n  \\bottomrule\n  \\end{{tabular}}\n\\end{{table}}\n"
    )


def _latex_text(text: str) -> str:
    """Escape everything that is a command in TeX."""
    special: dict[str, str | int | None] = {
        "\\": "\\textbackslash{}",
        "~": "\\textasciitilde{}",
        "^": "\\textasciicircum{}",
    }
    special |= {"–": "--", "±": "$\\pm$", "−": "$-$", "✓": "$\\surd$", "✗": "$\\times$", "≥": "$\\geq$"} | {
        each: f"\\{each}" for each in "&%$#_{}"
    }
    signed = re.sub(r"(?<![\w–])-(?=\d)", "−", text)
    return signed.translate(str.maketrans(special))
