"""A table of text cells, rendered for a terminal, for Markdown and for LaTeX."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rich import box
from rich.markup import escape
from rich.table import Table as RichTable

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


def format_number(value: float | None, digits: int, factor: float = 1) -> str:
    return "–" if value is None else f"{factor * value:.{digits}f}"


def best_cells(
    rows: Sequence[Sequence[str]],
    values: Sequence[Sequence[float | None]],
    lower_is_better: Sequence[bool | None],
    competing: Sequence[int],
) -> frozenset[tuple[int, int]]:
    """Cells whose number prints like the best one of its column, among the competing rows.

    `values` and `lower_is_better` leave out the first column; None there means that the column has no best value.
    """
    best = set()
    for column, lower in enumerate(lower_is_better):
        numbers = {r: value for r in competing if (value := values[r][column]) is not None}
        if numbers and lower is not None:
            top = (min if lower else max)(numbers, key=numbers.__getitem__)
            printed = {r: rows[r][column + 1].split()[0] for r in numbers}
            best |= {(r, column + 1) for r in numbers if printed[r] == printed[top]}
    return frozenset(best)


def to_rich(table: ResultTable) -> RichTable:
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
        cells = [escape(cell) for cell in row]
        result.add_row(*(f"[bold]{cell}[/bold]" if (r, c) in table.best else cell for c, cell in enumerate(cells)))
    return result


def to_markdown(table: ResultTable) -> str:
    columns = [_markdown_cell(column) for column in table.columns]
    lines = [" | ".join(columns), "|".join(["---"] + ["---:"] * (len(columns) - 1))]
    for r, row in enumerate(table.rows):
        cells = [_markdown_cell(cell) for cell in row]
        lines.append(" | ".join(f"**{cell}**" if (r, c) in table.best else cell for c, cell in enumerate(cells)))
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def _markdown_cell(cell: str) -> str:
    return cell.replace("|", "\\|").replace("\n", " ")


def to_latex(table: ResultTable) -> str:
    """A booktabs table with the note as the caption's second sentence."""
    head = " & ".join(_latex_text(column) for column in table.columns)
    lines = []
    for r, row in enumerate(table.rows):
        texts = [_latex_text(cell) for cell in row]
        cells = (f"\\textbf{{{text}}}" if (r, c) in table.best else text for c, text in enumerate(texts))
        lines.append(f"  {' & '.join(cells)} \\\\")
    body = "\n".join(lines)
    return (
        f"\\begin{{table}}[t]\n  \\centering\n  \\caption{{{_latex_text(table.title)}. {_latex_text(table.note)}}}\n"
        f"  \\label{{tab:{re.sub('[^a-z0-9]+', '-', table.title.lower())}}}\n"
        f"  \\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}\n  \\toprule\n  {head} \\\\\n  \\midrule\n"
        f"{body}\n  \\bottomrule\n  \\end{{tabular}}\n\\end{{table}}\n"
    )


def _latex_text(text: str) -> str:
    """Escape everything that is a command in TeX."""
    special = {
        "\\": "\\textbackslash{}",
        "~": "\\textasciitilde{}",
        "^": "\\textasciicircum{}",
        "–": "--",
        "±": "$\\pm$",
        "−": "$-$",
    }
    special |= {character: f"\\{character}" for character in "&%$#_{}"}
    signed = re.sub(r"(?<![\w–])-(?=\d)", "−", text)
    return "".join(special.get(character, character) for character in signed)
