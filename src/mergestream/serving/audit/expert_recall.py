"""Recall: every answer in a set of logs that an expert contributed to, with its coefficient."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

from mergestream.runtime.errors import InputError
from mergestream.serving.audit.chain import sound_lines
from mergestream.serving.audit.line_kinds import STARTED, STEP

if TYPE_CHECKING:
    from mergestream.serving.audit.keys import PublicKey

ROTATED = re.compile(r"\.\d{6,}$")
SHORTEST_HASH = 8
VOTERS = re.compile(r"\bensemble\b")  # a method, or the base of one, in which all experts vote alike
ANCHORED = re.compile(r"\banchor\W+experts\b")  # the experts' answers correct whatever model answered
ALL = "all experts contributed"


@dataclass(frozen=True)
class Contribution:
    """What an expert gave to one answer. A coefficient is null where no merged encoder or head answered."""

    encoder: float | None
    head: float | None
    task_vector: float | None  # multiplier of its task vector, where the method has one
    share: float | None  # of the vote, where the experts vote alike
    note: str | None  # set where all experts contributed in a way that no coefficient tells

    def __str__(self) -> str:
        named = {"encoder": self.encoder, "head": self.head, "task vector": self.task_vector, "share": self.share}
        numbers = [f"{name} {value:.4g}" for name, value in named.items() if value is not None]
        return ", ".join([*numbers, *([self.note] if self.note else [])])


def contribution(body: Mapping[str, Any], expert: str) -> Contribution | None:
    """What an expert gave to a step, by its line; None if nothing: absent, switched off, or with coefficients of 0."""
    if expert not in body["experts"] or expert in body["switched_off"]:
        return None
    place, fallback = body["experts"].index(expert), body.get("fallback")
    encoder, head, task_vector = (
        None if body.get(name) is None else body[name][place]
        for name in ("encoder_coefficients", "head_coefficients", "lambdas")
    )
    rule = f"{body['method']} {body['options']}"
    if fallback is not None:
        rule, task_vector = fallback, None
    if not ANCHORED.search(rule) and encoder is not None and head is not None:
        return Contribution(encoder, head, None, None, None) if encoder or head else None
    if not ANCHORED.search(rule) and task_vector is not None:
        return Contribution(encoder, head, task_vector, None, None) if task_vector else None
    voters = len(body["experts"]) - len(body["switched_off"])
    share = 1 / voters if encoder is None and VOTERS.search(rule) else None
    return Contribution(encoder, head, task_vector, share, ALL)


@dataclass
class StreamTotal:
    """Answers and images of one stream that the expert contributed to."""

    answers: int = 0
    images: int = 0
    first: str = ""
    last: str = ""


@dataclass
class Recall:
    """The answers that an expert contributed to. They wait in a file, so that a long log does not fill the memory."""

    expert: str
    logs: list[str]
    spool: IO[str]
    since: str = ""
    lines: int = 0
    streams: dict[str, StreamTotal] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)  # answers by the hash of the expert's weights
    notes: list[str] = field(default_factory=list)

    def answers(self) -> Iterator[dict[str, Any]]:
        self.spool.seek(0)
        return map(json.loads, self.spool)

    def summary(self) -> dict[str, Any]:
        """Everything but the answers."""
        totals = {name: asdict(total) for name, total in sorted(self.streams.items())}
        about = {"expert": self.expert, "logs": self.logs, "since": self.since or None, "lines": self.lines}
        return {**about, "weights": self.weights, "streams": totals, "notes": self.notes}


def touched(
    paths: Sequence[Path], expert: str, *, since: str = "", sha256: str = "", key: "PublicKey | None" = None
) -> Recall:
    """Verify the logs and list the answers that an expert contributed to.

    since: the earliest time, as lines write it. sha256: only the expert with these weights, by the first digits of
    their hash.
    """
    if sha256 and not re.fullmatch(rf"[0-9a-f]{{{SHORTEST_HASH},64}}", sha256):
        raise InputError(f"A weights hash is given by its first {SHORTEST_HASH} to 64 hex digits.")
    logs = list(dict.fromkeys(path.with_name(ROTATED.sub("", path.name)).absolute() for path in paths))
    # Deleted when it is closed, and by the system after a kill.
    recall = Recall(expert, [str(log) for log in logs], TemporaryFile("w+", encoding="utf-8"), since)  # noqa: SIM115
    names: set[str] = set()
    for path in logs:
        _search(path, recall, names, sha256, key)
    if expert not in names:
        contents = f"they name {', '.join(sorted(names))}" if names else "they hold no step"
        raise InputError(f"No step in these logs had an expert '{expert:.100}': {contents}.")
    _add_notes(recall)
    return recall


def _search(path: Path, recall: Recall, names: set[str], sha256: str, key: "PublicKey | None") -> None:
    """Add what one log holds."""
    classes: Sequence[str] = ()
    for count, line in enumerate(sound_lines(path, key)):
        recall.lines += 1
        if count == 0 and line["sequence"]:
            missing = f"begins with line {line['sequence']}: answers in its older files are not listed"
            recall.notes.append(f"{_short(path)} {missing}.")
        if line["kind"] == STARTED:
            classes = line["body"]["classes"]
        if line["kind"] == STEP:
            try:
                _take(path, line, classes, recall, names, sha256)
            except (KeyError, TypeError, IndexError) as error:
                where = f"{_short(path)}, sequence number {line['sequence']}"
                raise InputError(f"{where} is not a step of a version that can be read: {error!r}.") from error


def _take(
    path: Path, line: Mapping[str, Any], classes: Sequence[str], recall: Recall, names: set[str], sha256: str
) -> None:
    """Add one step if the expert contributed to it."""
    body = line["body"]
    names.update(body["experts"])
    gave = contribution(body, recall.expert) if line["time"] >= recall.since else None
    if gave is None:
        return
    weights = body["experts_sha256"][body["experts"].index(recall.expert)]
    if not weights.startswith(sha256):
        return
    images = [
        {**image, "prediction": classes[number] if number < len(classes) else number, "abstained": place in undecided}
        for undecided in [set(body["abstained"])]
        for place, (image, number) in enumerate(zip(body["inputs"], body["predictions"], strict=True))
    ]
    about = {"log": _short(path), "sequence": line["sequence"], "time": line["time"]}
    about |= {name: body[name] for name in ("stream", "step", "method")}
    answer = {**about, **asdict(gave), "weights_sha256": weights, "images": images}
    recall.spool.write(json.dumps(answer) + "\n")
    total = recall.streams.setdefault(body["stream"], StreamTotal(first=line["time"]))
    total.answers, total.images, total.last = total.answers + 1, total.images + len(images), line["time"]
    recall.weights[weights] = recall.weights.get(weights, 0) + 1


def _short(path: Path) -> str:
    """The file with its folder, which tells replicas apart."""
    return f"{path.parent.name}/{path.name}"


def _add_notes(recall: Recall) -> None:
    if len(recall.weights) > 1:
        each = ", ".join(f"{weights[:16]}… ({count} answers)" for weights, count in recall.weights.items())
        recall.notes.append(f"'{recall.expert}' had several sets of weights: {each}. Choose one with --sha256.")


def in_words(recall: Recall) -> Iterator[str]:
    """One line per answer and per image, the notes, and the totals last."""
    for each in recall.answers():
        gave = Contribution(**{name: each[name] for name in Contribution.__dataclass_fields__})
        where = f"{each['log']} line {each['sequence']}"
        yield f"{each['time']} stream '{each['stream']}' step {each['step']} ({where}): {gave}"
        for image in each["images"]:
            frame = f" frame {image['frame']}" if "frame" in image else ""
            yield f"  {image['sha256']}{frame}: {image['prediction']}{' (abstained)' if image['abstained'] else ''}"
    yield from (f"Note: {note}" for note in recall.notes)
    for name, total in sorted(recall.streams.items()):
        yield f"Stream '{name}': {total.answers} answers, {total.images} images, {total.first} to {total.last}."
    answers, images = (sum(getattr(each, what) for each in recall.streams.values()) for what in ("answers", "images"))
    yield f"'{recall.expert}' contributed to {answers} answers about {images} images, in {recall.lines} sound lines."


def as_json(recall: Recall) -> Iterator[str]:
    """One JSON document with one line per answer."""
    summary = json.dumps(recall.summary(), ensure_ascii=False)
    yield f'{summary[:-1]}, "answers": ['
    before = None
    for each in recall.answers():
        if before is not None:
            yield f"{before},"
        before = json.dumps(each, ensure_ascii=False)
    yield from [before] if before is not None else []
    yield "]}"
