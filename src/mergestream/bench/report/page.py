"""One self-contained HTML page, rendered by the templates beside this file."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import mean
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template, select_autoescape
from markupsafe import Markup, escape

from mergestream.bench.report.figures import Panel
from mergestream.bench.report.plain_names import explained
from mergestream.bench.report.result_table import ResultTable, to_latex, to_markdown
from mergestream.runtime.files import write_text

NOTICE = "For research. Not a medical device."
SYNTHETIC = "The data are synthetic: generated images, no patients."
# The browser itself refuses everything from outside the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


@dataclass(frozen=True)
class LegendKey:
    """One entry of a legend; a method's entry is hidden with the method."""

    name: str
    colour: str
    dashed: bool = False
    is_method: bool = False


@dataclass(frozen=True)
class PageSection:
    """A command's own section: a text, then a photograph as a data URI, panels with their legend, and a table."""

    title: str
    text: str
    image: str = ""
    alternative: str = ""
    panels: Sequence[Panel] = ()
    keys: Sequence[LegendKey] = ()
    caption: str = ""
    table: ResultTable | None = None


def render(
    template: str | Template, title: str, notice: str, methods: Sequence[str] = (), **values: Any
) -> tuple[str, list[ResultTable]]:
    """Render a page around the template's sections, and list all tables that it shows.

    `methods` are the labels that readers may hide, everywhere at once.
    """
    contents: list[str] = []  # the sections' macro adds its title, the tables' macro its table
    tables: list[ResultTable] = []
    values = {"streams": (), **values, "contents": contents, "tables": tables, "methods": methods}
    sections = environment().get_template(template).render(values)
    page = environment().get_template("page.html.j2")
    return page.render(title=title, notice=notice, methods=methods, contents=contents, sections=sections), tables


def page_notice(synthetic: bool) -> str:
    return f"{SYNTHETIC} {NOTICE}" if synthetic else NOTICE


def write_tables(tables: Sequence[ResultTable], folder: Path) -> None:
    """Write every table as FOLDER/title.md and .tex."""
    for table in tables:
        name = slug(table.title)
        write_text(folder / f"{name}.md", f"{to_markdown(table)}\n{table.note}\n".rstrip("\n") + "\n")
        write_text(folder / f"{name}.tex", to_latex(table))


def render_text(template: str, **values: Any) -> str:
    """Render a template that is not a page."""
    return environment().get_template(template).render(values)


def slug(text: str) -> str:
    """A title as part of a URL or a file name."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


@cache
def environment() -> Environment:
    """The templates with their filters and constants; HTML is escaped."""
    result = Environment(
        loader=PackageLoader("mergestream.bench.report"),
        autoescape=select_autoescape(["html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    result.filters |= {"slug": slug, "breakable": _breakable, "text_columns": _text_columns, "explained": explained}
    result.globals |= {
        "policy": POLICY,
        "medical_notice": NOTICE,
        "synthetic_notice": SYNTHETIC,
        "style": _asset("report.css"),
        "script": _asset("report.js"),
        "exports": {"Markdown": to_markdown, "LaTeX": to_latex},
        **{function.__name__: function for function in (min, max, mean)},
    }
    return result


def _asset(name: str) -> Markup:
    text = files("mergestream.bench.report").joinpath("assets", name).read_text(encoding="utf-8")
    return Markup(text)  # noqa: S704  (our own file)


def _breakable(name: str) -> Markup:
    """Allow a line break in a long label after an opening bracket or an underscore."""
    return Markup(re.sub(r"([_(])", r"\1<wbr>", str(escape(name))))  # noqa: S704  (escaped just before)


def _text_columns(table: ResultTable) -> set[int]:
    """Columns of sentences rather than numbers: no cell begins with a number."""
    return {
        place
        for place in range(1, len(table.columns))
        if not any(re.match(r"[-+−]?\d", row[place]) for row in table.rows)
        and any(" " in row[place] for row in table.rows)
    }
