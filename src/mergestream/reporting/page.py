"""One self-contained HTML page: no script, no file and no address outside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

NOTICE = "For research. Not a medical device."

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --line: #d0d7de; --soft: #59636e; --mark: #fff4d6; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #12161c; --line: #3a424c; --soft: #9aa7b4; --mark: #3a3013; } }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { line-height: 1.2; } h2 { margin-top: 2.2rem; border-bottom: 1px solid var(--line); }
.notice { background: var(--mark); padding: .6rem .9rem; border-radius: 6px; }
.note, figcaption, footer { color: var(--soft); font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .84rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .4rem 0; }
th, td { padding: .25rem .5rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child { text-align: left; font-weight: 400; white-space: normal; min-width: 11rem; }
thead th:first-child { font-weight: 600; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; background: #fff; border-radius: 6px; }
pre { overflow-x: auto; padding: .8rem; border: 1px solid var(--line); border-radius: 6px; font-size: .85rem; }
@media print { body { max-width: none; } h2 { break-after: avoid; } figure, tr { break-inside: avoid; } }
"""


@dataclass(frozen=True)
class Section:
    title: str
    html: str


def bullets(sentences: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def picture(source: str, alternative: str, caption: str) -> str:
    alt, under = escape(alternative, quote=True), escape(caption)
    return f'<figure><img src="{source}" alt="{alt}"><figcaption>{under}</figcaption></figure>'


def preformatted(text: str) -> str:
    return f'<pre tabindex="0">{escape(text)}</pre>'


def render(title: str, notice: str, sections: Sequence[Section]) -> str:
    body = "".join(f"<section><h2>{escape(section.title)}</h2>{section.html}</section>" for section in sections)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f'<body><main><h1>{escape(title)}</h1><p class="notice">{escape(notice)}</p>{body}</main>'
        f"<footer><p>{escape(NOTICE)}</p></footer></body></html>\n"
    )
