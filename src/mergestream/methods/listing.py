"""Methods in words, for people who choose one: what each does, what it costs, its options."""

import inspect
import sys
from dataclasses import dataclass
from typing import Any

from mergestream.methods import METHODS
from mergestream.methods.base import Method
from mergestream.methods.spelling import unknown_method
from mergestream.runtime.errors import MergestreamError
from mergestream.runtime.option_checks import plain

# Forwards per image of our own methods with K experts, at their defaults.
FORWARDS = {
    **dict.fromkeys(("mean", "task_arithmetic", "ties", "fisher", "regmean", "regmean_pp", "single_expert"), "1"),
    **dict.fromkeys(("lame", "t3a", "label_shift", "prior_roid"), "1"),
    **dict.fromkeys(("adamerging", "tent"), "2"),
    "sar": "3",
    **dict.fromkeys(("ensemble", "select_expert", "image_weights"), "K"),
    **dict.fromkeys(("dawin", "t3_js", "surgery"), "K+1"),
    "corrected": "2K",
    **dict.fromkeys(("entropy_adaptive", "merge_and_fit", "auto"), "2K+1"),
    "merge_once": "1 (at first 2K+1)",
}
# Where the file's first line is a formula, or is about two methods.
SENTENCES = {
    "task_arithmetic": "Task arithmetic (Ilharco et al. 2023): the start plus a multiple of what the experts learned.",
    "merge_once": "As merge_and_fit, but the experts answer only the first images, and again when the stream drifts.",
}


@dataclass(frozen=True)
class MethodSummary:
    """One method in words; `problem` says why it cannot be used."""

    name: str
    summary: str
    forwards: str  # per image, with K experts; empty for other packages' methods, whose runs count them
    options: dict[str, Any]
    plugin: str = ""  # the package or file it comes from
    problem: str = ""


def summary_of(name: str) -> MethodSummary:
    """One method in words."""
    if name not in METHODS:
        raise unknown_method(name)
    origin = METHODS.origin(name)
    try:
        kind = METHODS[name]
    except MergestreamError as error:
        return MethodSummary(name, "", "", {}, origin, str(error))
    sentence = SENTENCES.get(name) or sentence_of(kind)
    return MethodSummary(name, sentence, FORWARDS.get(name, ""), options_of(kind), origin)


def in_words(method: MethodSummary, *, with_options: bool) -> list[str]:
    """The lines that the command prints about a method."""
    origin = f" [plugin: {method.plugin}]" if method.plugin else ""
    if method.problem:
        return [f"{method.name}{origin}: {method.problem}"]
    cost = f" {method.forwards} forward{'' if method.forwards == '1' else 's'} per image." if method.forwards else ""
    lines = [f"{method.name}{origin}: {method.summary.rstrip('.')}.{cost}"]
    if with_options:
        lines += [f"    {name}={value}" for name, value in method.options.items()]
    return lines


def sentence_of(kind: type[Method[Any]]) -> str:
    """The first line of its file's docstring, for our own; of its class's or its file's for others."""
    of_file = getattr(sys.modules.get(kind.__module__), "__doc__", None) or ""
    of_class = "" if (kind.__doc__ or "").startswith(f"{kind.__name__}(") else inspect.cleandoc(kind.__doc__ or "")
    ours = kind.__module__.partition(".")[0] == "mergestream"
    text = (of_file or of_class) if ours else (of_class or of_file)
    return text.strip().partition("\n")[0]


def options_of(kind: type[Method[Any]]) -> dict[str, Any]:
    """Options and their defaults in a form JSON can hold; 'required' for one without."""
    defaults = {}
    for name, parameter in kind._parameters().items():
        required = parameter.default is inspect.Parameter.empty
        defaults[name.removesuffix("_")] = "required" if required else plain(parameter.default)
    return defaults
