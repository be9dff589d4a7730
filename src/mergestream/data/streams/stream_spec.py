"""Streams as text: subsets, an order, repetition, joined by '+', as in 'prevalence:0.05+dirichlet:0.1+long:1000'."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from mergestream.data.streams.class_orders import LEAST, dirichlet, iid, lone, note, sorted_by_label
from mergestream.data.streams.column_orders import CHANGES, mixture, recurrence, slides, temporal
from mergestream.data.streams.stream import Labels, Stream, read_labels, seeded_random
from mergestream.data.streams.subsets import missing, prevalence
from mergestream.runtime.errors import InputError, unknown_name
from mergestream.runtime.option_checks import number, one_of, whole_number

MOST_STEPS = 10_000_000
Classes = Sequence[str] | None  # the names of the classes, where they are known
Options = dict[str, Any]
Reader = Callable[[list[str], Classes], tuple[Options, str]]  # values and classes -> options, and the values as named


@dataclass(frozen=True)
class StreamCard:
    """A part of a stream: its function, how its values are read, and the column of the data that it needs."""

    kind: str  # subset, order or repetition
    make: Callable[..., Any]
    read: Reader
    example: str
    most: int = 1  # values
    column: str | None = None


@dataclass(frozen=True)
class StreamPart:
    """One part of a stream with its options, and as tables name it."""

    name: str
    options: Options
    label: str

    @property
    def card(self) -> StreamCard:
        return STREAMS[self.name]


@dataclass(frozen=True)
class StreamSpec:
    """A parsed stream."""

    subsets: tuple[StreamPart, ...]
    order: StreamPart
    steps: StreamPart | None

    @property
    def name(self) -> str:
        """The stream as tables name it: a plain shuffle is not mentioned where there is another part."""
        ends = [] if self.steps is None else [self.steps]
        parts = [part.label for part in (*self.subsets, self.order, *ends) if part.label != "iid"]
        return "+".join(parts) or "iid"

    @property
    def needs_domains(self) -> bool:
        """Whether it takes several target domains."""
        return self.order.card.column == "domains"


def _nothing(values: list[str], classes: Classes) -> tuple[Options, str]:  # noqa: ARG001
    return {}, ""


def _number(option: str, default: float | None, values: list[str], classes: Classes) -> tuple[Options, str]:  # noqa: ARG001
    value = number(option, _float(values[0]) if values else default or 0.0, low=LEAST)
    return {option: value}, f"{value:g}"


def _change(values: list[str], classes: Classes) -> tuple[Options, str]:  # noqa: ARG001
    change = one_of("mixture", values[0] if values else "smooth", tuple(CHANGES))
    return {"change": change}, change


def _domain(values: list[str], classes: Classes) -> tuple[Options, str]:  # noqa: ARG001
    return {"back": values[0] if values else None}, "".join(values)


def _rare_class(values: list[str], classes: Classes) -> tuple[Options, str]:
    if not values:
        return {}, ""
    return {"positive": class_number(values[0], classes)}, class_name(values[0], classes)


def _share(values: list[str], classes: Classes) -> tuple[Options, str]:
    share = number("share", _float(values[0]), above=0, below=1)
    last = None if classes is None else len(classes) - 1
    positive = class_number(values[1], classes) if values[1:] else last
    suffix = f":{class_name(values[1], classes)}" if values[1:] and positive != last else ""
    return {"share": share, "positive": positive}, f"{share:g}{suffix}"


def _absent(values: list[str], classes: Classes) -> tuple[Options, str]:
    if len(values) == 1 and values[0].isdecimal():
        return {"count": whole_number("missing", int(values[0]), low=1)}, str(int(values[0]))
    numbers = [class_number(text, classes) for text in values]
    names = [class_name(text, classes) for text in values]
    if len(set(names)) != len(names):
        raise InputError(f"The stream 'missing' names a class twice: {', '.join(names)}.")
    return {"classes": numbers}, ":".join(names)


def _steps(values: list[str], classes: Classes) -> tuple[Options, str]:  # noqa: ARG001
    steps = whole_number("long", int(values[0]) if values[0].isdecimal() else values[0], low=1)
    if steps > MOST_STEPS:
        raise InputError(f"A long stream has at most {MOST_STEPS} batches; got {steps}.")
    return {"steps": steps}, str(steps)


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"'{text}' in a stream is not a number.") from None


def class_number(text: str, classes: Classes) -> int | str:
    """A class by its name or its number; without names, a name stays text."""
    if classes is not None and text in classes:
        return list(classes).index(text)
    if text.isdecimal() and (classes is None or int(text) < len(classes)):
        return int(text)
    if classes is None:
        return text
    raise unknown_name("class", text, classes)


def class_name(text: str, classes: Classes) -> str:
    place = class_number(text, classes)
    return str(place) if classes is None or isinstance(place, str) else classes[place]


def repeated(order: Callable[..., Stream], *, steps: int, seed: int = 0) -> Stream:
    """Exactly `steps` batches: the order again and again, every epoch with a seed of its own, the first with `seed`."""
    batches: list[np.ndarray] = []
    first = order(seed=seed)
    epoch, chunk = 0, first
    while len(batches) + len(chunk) < steps:
        batches += chunk.batches
        epoch += 1
        chunk = order(seed=int(seeded_random(seed, epoch).randint(2**31)))
    return replace(first, batches=(*batches, *chunk.batches[: steps - len(batches)]), repeats=True)


STREAMS: dict[str, StreamCard] = {
    "iid": StreamCard("order", iid, _nothing, "iid", most=0),
    "dirichlet": StreamCard("order", dirichlet, partial(_number, "alpha", None), "dirichlet:0.05"),
    "note": StreamCard("order", note, partial(_number, "delta", 0.1), "note"),
    "sorted": StreamCard("order", sorted_by_label, _nothing, "sorted", most=0),
    "temporal": StreamCard("order", temporal, _nothing, "temporal", most=0, column="acquired"),
    "slides": StreamCard("order", slides, _nothing, "slides", most=0, column="groups"),
    "mixture": StreamCard("order", mixture, _change, "mixture", column="domains"),
    "recurrence": StreamCard("order", recurrence, _domain, "recurrence", column="domains"),
    "lone": StreamCard("order", lone, _rare_class, "lone"),
    "prevalence": StreamCard("subset", prevalence, _share, "prevalence:0.05", most=2),
    "missing": StreamCard("subset", missing, _absent, "missing:2", most=1000),
    "long": StreamCard("repetition", repeated, _steps, "long:100000"),
}


def parse_stream(spec: str, classes: Classes = None) -> StreamSpec:
    """Parse 'subset+...+order+long'; subsets and long may be absent, and an absent order is a plain shuffle.

    Every part is 'name' or 'name:value:value'. Classes are named, or numbered from 0; without `classes` their names are
    not checked.
    """
    parts = [_parse_part(text, spec, classes) for text in spec.split("+")]
    kinds = "".join(part.card.kind[0] for part in parts)  # as in 'sor': subset, order, repetition
    if kinds != "s" * kinds.count("s") + "o" * ("o" in kinds) + "r" * ("r" in kinds):
        raise InputError(
            f"A stream is written subsets, then one order, then long, as in "
            f"'prevalence:0.05+dirichlet:0.05+long:1000'; got '{spec}'."
        )
    orders = [part for part in parts if part.card.kind == "order"] or [_parse_part("iid", spec, classes)]
    steps = parts[-1] if "r" in kinds else None
    return StreamSpec(tuple(part for part in parts if part.card.kind == "subset"), orders[0], steps)


def _parse_part(text: str, spec: str, classes: Classes) -> StreamPart:
    name, *values = text.split(":")
    if name not in STREAMS:
        raise unknown_name("stream", name, STREAMS)
    card = STREAMS[name]
    values = [] if values == [""] else values
    if len(values) > card.most:
        most = f"at most {card.most} values" if card.most > 1 else "one value" if card.most else "no value"
        raise InputError(f"The stream '{name}' takes {most}; got '{spec}'.")
    if "" in values or (not values and ":" in card.example):
        raise InputError(f"Write the stream '{name}' with its number, for example '{card.example}'; got '{spec}'.")
    options, label = card.read(values, classes)
    return StreamPart(name, options, f"{name}:{label}" if label else name)


def create_stream(
    spec: str, labels: Labels, *, batch_size: int = 32, seed: int = 0, classes: Classes = None, **columns: Any
) -> Stream:
    """Create a stream from its text; `columns` may hold `acquired`, `groups` and `domains` of every sample."""
    parsed, values = parse_stream(spec, classes), read_labels(labels)
    picked = np.arange(len(values))
    for part in parsed.subsets:
        picked = picked[part.card.make(values[picked], seed=seed, **_resolved(part))]
    options = _resolved(parsed.order)
    if column := parsed.order.card.column:
        options[column] = _picked(column, columns.get(column), picked, len(values))
    order = partial(parsed.order.card.make, values[picked], batch_size=batch_size, **options)
    stream = order(seed=seed) if parsed.steps is None else repeated(order, seed=seed, **parsed.steps.options)
    batches = stream.batches if len(picked) == len(values) else tuple(picked[batch] for batch in stream.batches)
    return replace(stream, name=parsed.name, batches=batches)


def _resolved(part: StreamPart) -> Options:
    """Options of a part; a class by name is refused where the names are not known."""
    for value in (part.options.get("positive"), *part.options.get("classes", ())):
        if isinstance(value, str):
            raise InputError(f"The class '{value}' in '{part.label}' needs the names of the classes: give its number.")
    return dict(part.options)


def _picked(column: str, values: Sequence[Any] | None, picked: np.ndarray, count: int) -> Sequence[Any] | None:
    if values is None or len(picked) == count:
        return values
    if len(values) != count:
        raise InputError(f"{count} labels but {len(values)} values of '{column}'.")
    return [values[i] for i in picked]
