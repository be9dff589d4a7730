"""A table as a page shows it: sorted by its headings, rows hidden with their method, copied as Markdown or LaTeX."""

import re
from collections.abc import Collection
from html import escape

from mergestream.bench.report.tables import Table, to_latex, to_markdown

TEXT = ' class="text"'


def slug(text: str) -> str:
    """A title as part of an address or of a file's name."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


def table_to_html(table: Table, methods: Collection[str] = ()) -> str:
    """`methods` are the labels that readers may hide; other rows stay."""
    told = _columns_of_words(table)
    head = "".join(
        f'<th scope="col" aria-sort="none"{TEXT * (place in told)}><button type="button">{escape(column)}</button></th>'
        for place, column in enumerate(table.columns)
    )
    body = "".join(_row(table, number, methods, told) for number in range(len(table.rows)))
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<div class="table" id="table-{slug(table.title)}"><div class="scroll"><table class="sortable">'
        f"<caption>{escape(table.title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        f"{note}{_exports(table)}</div>"
    )


def _columns_of_words(table: Table) -> set[int]:
    """Columns whose cells are read, not compared: none of them begins with a number."""
    return {
        place
        for place in range(1, len(table.columns))
        if not any(re.match(r"[-+−]?\d", row[place]) for row in table.rows)
        and any(" " in row[place] for row in table.rows)
    }


def _row(table: Table, number: int, methods: Collection[str], told: Collection[int]) -> str:
    name, *values = table.rows[number]
    cells = "".join(
        f"<td{TEXT * (place in told)}>{_strong(escape(value), (number, place) in table.best)}</td>"
        for place, value in enumerate(values, start=1)
    )
    of = f' data-method="{escape(name, quote=True)}"' if name in methods else ""
    return f'<tr{of}><th scope="row">{_breakable(name)}</th>{cells}</tr>'


def _strong(text: str, is_best: bool) -> str:
    return f"<strong>{text}</strong>" if is_best else text


def _breakable(name: str) -> str:
    """A long label may go on in the next line after an opening bracket or an underscore."""
    return re.sub(r"([_(])", r"\1<wbr>", escape(name))


def _exports(table: Table) -> str:
    return "".join(
        f'<details class="export"><summary>{kind}<span class="hidden"> of {escape(table.title)}</span></summary>'
        f'<button type="button" class="copy">Copy</button><pre tabindex="0">{escape(write(table))}</pre></details>'
        for kind, write in (("Markdown", to_markdown), ("LaTeX", to_latex))
    )
