"""One self-contained HTML page: sections of text, tables and figures, rendered by the templates beside this file."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from mergestream.bench.report.figures import Panel
from mergestream.bench.report.result_table import ResultTable, to_latex, to_markdown

NOTICE = "For research. Not a medical device."
# The browser itself refuses everything from outside the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


@dataclass(frozen=True)
class Paragraph:
    kind: ClassVar[str] = "paragraph"
    text: str


@dataclass(frozen=True)
class Bullets:
    kind: ClassVar[str] = "bullets"
    sentences: Sequence[str]


@dataclass(frozen=True)
class Preformatted:
    kind: ClassVar[str] = "preformatted"
    text: str


@dataclass(frozen=True)
class LegendKey:
    """One entry of a legend; a method's entry is hidden with the method."""

    name: str
    colour: str
    dashed: bool = False
    is_method: bool = False


@dataclass(frozen=True)
class PageFigure:
    """Panels side by side where there is room, with one caption and one legend."""

    kind: ClassVar[str] = "figure"
    panels: Sequence[Panel]
    caption: str
    keys: Sequence[LegendKey] = ()


@dataclass(frozen=True)
class PageImage:
    """A photograph as a data URI; line drawings are panels of a PageFigure."""

    kind: ClassVar[str] = "image"
    source: str
    alternative: str
    caption: str


@dataclass(frozen=True)
class InteractiveFigure:
    """HTML and script of a plotting library."""

    kind: ClassVar[str] = "interactive"
    html: str
    caption: str


@dataclass(frozen=True)
class PageFold:
    """Parts that a reader opens; they are open in print."""

    kind: ClassVar[str] = "fold"
    title: str
    parts: Sequence["Part"]
    is_open: bool = False


Part = Paragraph | Bullets | Preformatted | ResultTable | PageFigure | PageImage | InteractiveFigure | PageFold


@dataclass(frozen=True)
class PageSection:
    title: str
    parts: Sequence[Part]

    def tables(self) -> Iterator[ResultTable]:
        """All tables of the section, those in folds included."""
        return _tables(self.parts)


def _tables(parts: Sequence[Part]) -> Iterator[ResultTable]:
    for part in parts:
        if isinstance(part, ResultTable):
            yield part
        elif isinstance(part, PageFold):
            yield from _tables(part.parts)


def render(title: str, notice: str, sections: Sequence[PageSection], methods: Sequence[str] = ()) -> str:
    """Render the page. `methods` are the labels that readers may hide, everywhere at once."""
    template = _environment().get_template("page.html.j2")
    return template.render(title=title, notice=notice, sections=sections, methods=methods)


def slug(text: str) -> str:
    """A title as part of a URL or a file name."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("mergestream.bench.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"slug": slug, "breakable": _breakable, "text_columns": _text_columns}
    environment.globals |= {
        "policy": POLICY,
        "medical_notice": NOTICE,
        "style": _asset("report.css"),
        "script": _asset("report.js"),
        "exports": {"Markdown": to_markdown, "LaTeX": to_latex},
    }
    return environment


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
