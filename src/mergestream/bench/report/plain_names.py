"""Plain names of methods and streams, for readers who do not know the identifiers."""

import re
from collections.abc import Iterable

from markupsafe import Markup, escape

METHODS = {
    "entropy_adaptive": "the paper's rule",
    "merge_and_fit": "the recommended rule",
    "merge_once": "the recommended rule at the price of one model",
    "mean": "the plain average of the experts",
    "ensemble": "the ensemble of all experts",
    "auto": "the method chosen for the pool",
    "corrected": "answers corrected for the mix of classes",
}
# What each part of a stream's name means; values follow a colon.
STREAMS = {
    "iid": "images in random order",
    "dirichlet": "the mix of classes differs from batch to batch; the smaller the number, the more",
    "note": "a few classes dominate each stretch of the stream, as in NOTE",
    "sorted": "one class after the other",
    "temporal": "in the order of acquisition",
    "mixture": "several sites in one stream",
    "prevalence": "the finding is as frequent as the number says",
    "missing": "some classes never arrive",
    "slides": "one slide or patient after the other",
    "recurrence": "sites come back in turns",
    "lone": "one positive image alone in its batch",
    "long": "repeated to a long stream",
}


def plain_method(label: str) -> str:
    """A method in words, with its identifier; the identifier alone where there are none."""
    words = METHODS.get(label)
    return label if words is None else f"{words} ({label})"


def stream_meaning(name: str) -> str:
    """What a stream's name means, part by part."""
    meanings = [STREAMS.get(part.partition(":")[0], part) for part in name.split("+")]
    return "; ".join(meanings)


def explained(text: object, streams: Iterable[str]) -> Markup:
    """Escape a text, keep '%' at its number, and give every stream's name in it its meaning on hover."""
    result = str(escape(text)).replace(" %", "\N{NO-BREAK SPACE}%")
    names = sorted((str(escape(name)) for name in streams), key=len, reverse=True)
    if not names:
        return Markup(result)  # noqa: S704  (escaped just before)
    pattern = rf"(?<![\w:+])({'|'.join(map(re.escape, names))})(?![\w:+])"
    shown = re.sub(pattern, lambda m: f'<abbr title="{escape(stream_meaning(m[1]))}">{m[1]}</abbr>', result)
    return Markup(shown)  # noqa: S704  (escaped above)
