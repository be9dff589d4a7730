"""Texts from Jinja templates that lie beside the code that fills them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined


def filled(template: Path, finalize: Callable[[Any], Any] | None = None, **values: Any) -> str:
    """The text of a template that is not a web page; `finalize` is applied to every value in it."""
    options: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    environment = Environment(**options, autoescape=False, finalize=finalize)  # noqa: S701
    return environment.from_string(template.read_text(encoding="utf-8")).render(values)
