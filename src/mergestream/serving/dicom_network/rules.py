"""The rules file of the DICOM node: who may send, which stream answers an object and when, limits, other systems."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mergestream.runtime.errors import InputError, MergestreamError, unknown_name
from mergestream.runtime.option_checks import is_http_url, number, one_of, whole_number
from mergestream.runtime.yaml_file import read_yaml
from mergestream.serving.dicom_network.routing_header import RoutingHeader
from mergestream.serving.engine.registry import require_name
from mergestream.serving.http.tokens import require_private

SECTIONS = ("callers", "rules", "sources", "limits", "flush")
CONDITIONS = ("calling", "modality", "body_part", "view")
IMAGE, SERIES, STUDY = "image", "series", "study"
MEAN, WORST = "mean", "worst"
EACH_OBJECT, EACH_ASSOCIATION = "object", "association"
DEFAULT_STREAM = "dicom"
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Rule:
    """Conditions on an object, and what happens to one that meets them. An empty condition: any value."""

    stream: str
    calling: tuple[str, ...] = ()
    modality: tuple[str, ...] = ()
    body_part: tuple[str, ...] = ()
    view: tuple[str, ...] = ()
    answer: str = IMAGE  # one object at a time, or a series or study when no more of it arrives
    series: str = MEAN  # the answer for a series
    study: str = MEAN  # the answer for a study
    worst_class: str | None = None  # with 'worst': the image with the highest probability of this class counts
    idle_seconds: float = 10.0  # without a new object a series or study is complete
    send_to: tuple[str, ...] | None = None  # names of destinations; None: all

    @property
    def how(self) -> str:
        """How the images of a series or study become one answer."""
        return self.study if self.answer == STUDY else self.series

    def fits(self, header: RoutingHeader) -> bool:
        values = (header.calling, header.modality.upper(), header.body_part.upper(), header.view.upper())
        conditions = (self.calling, self.modality, self.body_part, self.view)
        return all(not allowed or value in allowed for value, allowed in zip(values, conditions, strict=True))


@dataclass(frozen=True)
class NodeLimits:
    """Limits of the node; the file's section 'limits' may change each."""

    associations: int = 32  # at a time; the one that is idle longest gives way to a new one
    pdu_kib: int = 128
    object_mib: int = 64
    inbox_mib: int = 10_240
    inbox_objects: int = 100_000
    idle_seconds: float = 60.0  # of an association between two messages, and to receive one PDU


@dataclass(frozen=True)
class Source:
    """A DICOMweb server that studies may be pulled from."""

    name: str
    url: str
    token_file: Path | None = None  # holds a bearer token, or 'user:password'


@dataclass(frozen=True)
class Rules:
    """A rules file, checked."""

    rules: tuple[Rule, ...] = (Rule(DEFAULT_STREAM),)
    callers: frozenset[str] = frozenset()  # empty: anyone who can reach the node
    sources: Mapping[str, Source] = field(default_factory=dict)
    limits: NodeLimits = field(default_factory=NodeLimits)
    # To disk: before the status of each object; or within a second, and before an association is released.
    flush: str = EACH_OBJECT

    def rule_for(self, header: RoutingHeader) -> Rule | None:
        """The first rule that fits."""
        return next((rule for rule in self.rules if rule.fits(header)), None)


def read_rules(file: Path) -> Rules:
    """Read and check a rules file. InputError names the entry that is wrong."""
    document = read_yaml(file, "The rules file", MOST_BYTES)
    try:
        return parse_rules(document, file.parent)
    except MergestreamError as error:
        raise InputError(f"The rules file {file} cannot be used. {error}") from error


def parse_rules(document: Any, folder: Path) -> Rules:
    """Check the content of a rules file; paths in it are relative to `folder`."""
    _require_mapping("the file", document, SECTIONS)
    listed = document.get("rules")
    if not isinstance(listed, list) or not listed:
        raise InputError("'rules' is a list with at least one rule.")
    rules = tuple(_rule(f"rule {place}", entry) for place, entry in enumerate(listed, start=1))
    sources = document.get("sources") or {}
    if not isinstance(sources, dict) or not all(isinstance(name, str) for name in sources):
        raise InputError("'sources' holds one entry per name.")
    callers = frozenset(map(ae_title, _texts("callers", document.get("callers", []))))
    flush = one_of("flush", document.get("flush", EACH_OBJECT), (EACH_OBJECT, EACH_ASSOCIATION))
    checked = {name: _source(name, entry, folder) for name, entry in sources.items()}
    return Rules(rules, callers, checked, _limits(document.get("limits") or {}), flush)


def ae_title(text: str) -> str:
    """Check an application entity title: 1 to 16 printable ASCII characters, without backslash."""
    title = text.strip()
    if not 1 <= len(title) <= 16 or not title.isascii() or not title.isprintable() or "\\" in title:
        raise InputError(f"An AE title has 1 to 16 printable ASCII characters and no backslash; got {text!r:.40}.")
    return title


def _rule(place: str, entry: Any) -> Rule:
    try:
        _require_mapping("a rule", entry, [each.name for each in fields(Rule)])
        if "stream" not in entry:
            raise InputError("'stream' is missing.")
        values = dict(entry)
        values |= {name: _condition(name, values[name]) for name in CONDITIONS if name in values}
        if values.get("send_to") is not None:
            values["send_to"] = _texts("send_to", values["send_to"])
        rule = Rule(**values)
        require_name(rule.stream)
        one_of("answer", rule.answer, (IMAGE, SERIES, STUDY))
        _require_sensible(rule, entry)
        one_of(rule.answer, rule.how, (MEAN, WORST))
        number("idle_seconds", rule.idle_seconds, above=0, high=3600)
    except MergestreamError as error:
        raise InputError(f"In {place}: {error}") from error
    return rule


def _require_sensible(rule: Rule, entry: Mapping[str, Any]) -> None:
    """Refuse settings that would have no effect, and a 'worst' image without the class it is measured by."""
    needed_by = {SERIES: (SERIES,), STUDY: (STUDY,), "worst_class": (SERIES, STUDY), "idle_seconds": (SERIES, STUDY)}
    for name, answers in needed_by.items():
        if name in entry and rule.answer not in answers:
            needed = "' or 'answer: ".join(answers)
            raise InputError(f"'{name}' needs 'answer: {needed}'.")
    if (rule.how == WORST) != (rule.worst_class is not None):
        raise InputError(f"'{rule.answer}: worst' and 'worst_class' (a class of the pool) go together.")
    if rule.worst_class is not None and not isinstance(rule.worst_class, str):
        raise InputError("'worst_class' is the name of a class.")


def _condition(name: str, value: Any) -> tuple[str, ...]:
    texts = _texts(name, value)
    return tuple(map(ae_title, texts)) if name == "calling" else tuple(text.strip().upper() for text in texts)


def _source(name: str, entry: Any, folder: Path) -> Source:
    try:
        _require_mapping("a source", entry, ("url", "token_file"))
        if not is_http_url(entry.get("url")):
            raise InputError("'url' begins with https:// or http:// and names no user.")
        token = entry.get("token_file")
        if token is not None and not isinstance(token, str):
            raise InputError("'token_file' is the path of a file.")
        if token is not None:
            require_private(folder / token, 0o027, "Others may read 'token_file'.")
        ae_title(name)
    except MergestreamError as error:
        raise InputError(f"In the source '{name}': {error}") from error
    return Source(name, entry["url"], None if token is None else folder / token)


def _limits(entry: Any) -> NodeLimits:
    _require_mapping("'limits'", entry, [each.name for each in fields(NodeLimits)])
    for name, value in entry.items():
        if name == "idle_seconds":
            number(name, value, low=1, high=3600)
        else:
            whole_number(name, value, low=16 if name == "pdu_kib" else 1)
    limits = NodeLimits(**entry)
    if limits.pdu_kib > 1024:
        raise InputError("The limit 'pdu_kib' is at most 1024.")
    return limits


def _require_mapping(what: str, value: Any, names: Any) -> None:
    if not isinstance(value, dict):
        raise InputError(f"{what} has entries 'name: value'; the names are {', '.join(names)}.")
    for name in value:
        if name not in names:
            raise InputError(str(unknown_name(f"entry of {what}", name, names)))


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """One text or a list of them. YAML reads NO and 12 as other kinds: they must be quoted."""
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(each, str) and each for each in listed):
        raise InputError(f"'{name}' is a text or a list of texts; put numbers and words such as NO in quotes.")
    return tuple(listed)
