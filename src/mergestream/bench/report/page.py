"""One self-contained HTML page: sections of text, tables, figures; nothing outside it is asked for."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from mergestream.bench.report.svg import Panel
from mergestream.bench.report.table_markup import slug, table_to_html
from mergestream.bench.report.tables import Table

NOTICE = "For research. Not a medical device."
# The browser itself refuses whatever would leave the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


@dataclass(frozen=True)
class Key:
    """A line of a legend; one that names a method is hidden with it."""

    name: str
    colour: str
    dashed: bool = False
    is_method: bool = False


@dataclass(frozen=True)
class Picture:
    """Panels side by side where there is room, with one caption and one legend."""

    panels: Sequence[Panel]
    caption: str
    keys: Sequence[Key] = ()


@dataclass(frozen=True)
class Fold:
    """Parts that a reader opens; on paper they are open."""

    title: str
    parts: Sequence["Part"]
    is_open: bool = False


Part = str | Table | Picture | Fold


@dataclass(frozen=True)
class Section:
    """Parts in order: text (HTML), tables, figures, folds."""

    title: str
    parts: Sequence[Part]

    def tables(self) -> Iterator[Table]:
        return _tables(self.parts)


def _tables(parts: Sequence[Part]) -> Iterator[Table]:
    for part in parts:
        if isinstance(part, Table):
            yield part
        elif isinstance(part, Fold):
            yield from _tables(part.parts)


def bullets(sentences: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def preformatted(text: str) -> str:
    return f'<pre tabindex="0">{escape(text)}</pre>'


def image(source: str, alternative: str, caption: str) -> str:
    """A photograph; what is drawn by lines is a Picture."""
    alt, under = escape(alternative, quote=True), escape(caption)
    return f'<figure><img src="{source}" alt="{alt}"><figcaption>{under}</figcaption></figure>'


def render(title: str, notice: str, sections: Sequence[Section], methods: Sequence[str] = ()) -> str:
    """The page. `methods` are the labels that readers may hide, everywhere at once."""
    links = "".join(f'<li><a href="#{slug(each.title)}">{escape(each.title)}</a></li>' for each in sections)
    body = "".join(_section(each, methods) for each in sections)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><style>{_asset("report.css")}</style></head>'
        f'<body><a class="skip" href="#content">Skip to the content</a>{_tools(methods)}<main id="content">'
        f'<h1>{escape(title)}</h1><p class="notice">{escape(notice)}</p>'
        f'<nav aria-label="Contents"><ul>{links}</ul></nav>{body}</main><footer><p>{escape(NOTICE)}</p></footer>'
        f"<script>{_asset('report.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return files("mergestream.bench.report").joinpath("assets", name).read_text(encoding="utf-8")


def _tools(methods: Sequence[str]) -> str:
    boxes = "".join(
        f'<label><input type="checkbox" value="{escape(name, quote=True)}" checked> {escape(name)}</label>'
        for name in methods
    )
    choices = "".join(
        f'<button type="button" data-choose="{key}">{told}</button>'
        for key, told in (("all", "All"), ("none", "None"), ("plain", "Without variants"))
    )
    chooser = (
        f'<details id="methods"><summary>Methods: <span id="shown" role="status">all {len(methods)} shown</span>'
        f"</summary>"
        f'<fieldset><legend>Shown in tables and figures</legend><div class="choices">{choices}</div>'
        f'<div class="boxes">{boxes}</div></fieldset></details>'
    )
    return (
        f'<div class="tools" role="region" aria-label="Tools">{chooser if methods else ""}'
        f'<button type="button" id="print">Print</button>'
        f'<button type="button" id="theme" aria-pressed="false">Dark</button></div>'
    )


def _section(section: Section, methods: Collection[str]) -> str:
    name = slug(section.title)
    body = "".join(_part(part, methods) for part in section.parts)
    title = f'<h2 id="{name}-title">{escape(section.title)}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{title}{body}</section>'


def _part(part: Part, methods: Collection[str]) -> str:
    if isinstance(part, Table):
        return table_to_html(part, methods)
    if isinstance(part, Picture):
        return _picture(part)
    if isinstance(part, Fold):
        inside = "".join(_part(each, methods) for each in part.parts)
        return (
            f'<details class="fold"{" open" * part.is_open}><summary>{escape(part.title)}</summary>{inside}</details>'
        )
    return part


def _picture(picture: Picture) -> str:
    panels = "".join(panel.to_html() for panel in picture.panels)
    size = picture.panels[0].size if picture.panels else ""
    keys = "".join(_key(key) for key in picture.keys)
    legend = f'<ul class="legend">{keys}</ul>' if keys else ""
    caption = f"<figcaption>{escape(picture.caption)}</figcaption>"
    return f'<figure><div class="panels {size}">{panels}</div>{legend}{caption}</figure>'


def _key(key: Key) -> str:
    of = f' data-method="{escape(key.name, quote=True)}"' if key.is_method else ""
    line = "dashed" if key.dashed else "solid"
    return f'<li{of}><i style="border-top: 3px {line} {key.colour}"></i>{escape(key.name)}</li>'
