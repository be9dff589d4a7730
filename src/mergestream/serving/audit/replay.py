"""Steps of a log computed again from the same images, and compared field by field with what was written then."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mergestream.runtime.errors import InputError, MergestreamError
from mergestream.runtime.files import error_text, sha256_of_file
from mergestream.runtime.parallel import Track, quiet
from mergestream.serving.audit.comparison import Difference, compare
from mergestream.serving.audit.lines import AuditError, LineError, faults, parse
from mergestream.serving.audit.log_files import raw_lines

STEP = "step"
MOST_LISTED = 100


class Recompute(Protocol):
    """How a step is computed again; for logs of the service it is `mergestream.serving.engine.reproducing.Reproducer`.

    `body` is the step line's body as it was logged. Replaying itself reads `stream`, `step` and `inputs` of it: one
    dict an image of the batch, in order, with `sha256` (of the file as received; images of one file share it),
    `pixels_sha256` and, where the file holds several images, `frame` (from 1). The rest is for the recomputation:
    method and options, the state before the step, the experts switched off, versions, device, threads.

    `files` maps each of these `sha256` to the file's bytes, all of them present.

    It returns the fields of the body that it computed anew, under the same names and rounded as the service rounds
    them, as JSON knows them (lists, numbers, text, None); `inputs`, where it returns them, with the hashes of what it
    decoded. Every returned field is compared with the logged one; one of `comparing.COMPARED` that was logged and is
    not returned is told of. Steps come in the log's order, but any may be left out: it may use what it computed for an
    earlier one where the line holds the hash of just that. A MergestreamError says that this step cannot be
    recomputed, and why; the replay goes on with the next.
    """

    def __call__(self, body: Mapping[str, Any], files: Mapping[str, bytes], /) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Replayed:
    """One step: `outcome` is exact, close (within the tolerance), different, missing (images) or failed."""

    sequence: int
    stream: str | None
    step: int | None
    outcome: str
    differences: tuple[Difference, ...] = ()
    reason: str | None = None


@dataclass
class ReplayReport:
    outcomes: Counter[str] = field(default_factory=Counter)
    largest: dict[str, float] = field(default_factory=dict)  # the largest difference of a number, by field
    steps: list[Replayed] = field(default_factory=list)  # the first ones that are not exact

    @property
    def reproduced(self) -> bool:
        """Whether there were steps, and all came out the same, or as near as was asked."""
        return self.outcomes.total() > 0 and self.outcomes.keys() <= {"exact", "close"}

    def add(self, step: Replayed) -> None:
        self.outcomes[step.outcome] += 1
        for difference in step.differences:
            if difference.largest is not None:
                self.largest[difference.field] = max(difference.largest, self.largest.get(difference.field, 0.0))
        if step.outcome != "exact" and len(self.steps) < MOST_LISTED:
            self.steps.append(step)

    def to_json(self) -> dict[str, Any]:
        steps = [asdict(step) for step in self.steps]
        outcomes = dict(self.outcomes)
        return {"reproduced": self.reproduced, "outcomes": outcomes, "largest": self.largest, "steps": steps}


def replay(
    path: Path,
    images: Path,
    recompute: Recompute,
    *,
    sequence: int | None = None,
    tolerance: float = 0.0,
    track: Track = quiet,
) -> ReplayReport:
    """Recompute the log's steps, or the one with this sequence number, from the files anywhere under `images`."""
    if not tolerance >= 0:
        raise InputError(f"A tolerance is 0 or more, not {tolerance}.")
    found = files_by_hash(images, track)
    report = ReplayReport()
    total = sum(1 for _ in step_lines(path, sequence))
    if sequence is not None and not total:
        raise InputError(f"The audit log {path} has no step with sequence number {sequence}.")
    with track("recomputing steps", total) as advance:
        for line in step_lines(path, sequence):
            report.add(replay_step(line, found, recompute, tolerance))
            advance()
    return report


def step_lines(path: Path, sequence: int | None = None) -> Iterator[dict[str, Any]]:
    """The step lines of a log, each unchanged since it was written."""
    for raw in raw_lines(path):
        if raw.torn:
            return
        try:
            line = parse(raw.text)
            wrong = faults(line, None)
        except LineError as error:
            wrong = [str(error)]
        if wrong:
            raise AuditError(f"{raw.file}, line {raw.number} {wrong[0]}. Run 'audit verify' first.")
        if line["kind"] == STEP and sequence in (None, line["sequence"]):
            yield line


def files_by_hash(folder: Path, track: Track = quiet) -> dict[str, Path]:
    """Where a file with a given sha-256 lies, under whatever name."""
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder of images.")
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    found = {}
    with track("reading images", len(paths)) as advance:
        for path in paths:
            try:
                found[sha256_of_file(path)] = path
            except OSError as error:
                raise InputError(f"An image in {folder} cannot be read: {error_text(error)}.") from error
            advance()
    return found


def replay_step(
    line: Mapping[str, Any], found: Mapping[str, Path], recompute: Recompute, tolerance: float = 0.0
) -> Replayed:
    body = line["body"]
    about = (line["sequence"], body.get("stream"), body.get("step"))
    wanted = _wanted(body)
    if wanted is None:
        return Replayed(*about, "failed", reason="The line does not say which images the step had.")
    files = {digest: content for digest in wanted if (content := _content(found.get(digest), digest)) is not None}
    if missing := len(wanted) - len(files):
        return Replayed(*about, "missing", reason=f"{missing} of the step's {len(wanted)} files are not in the folder.")
    try:
        computed = recompute(body, files)
    except MergestreamError as error:
        return Replayed(*about, "failed", reason=str(error))
    differences = compare(body, computed)
    return Replayed(*about, _outcome(differences, tolerance), differences)


def _wanted(body: Mapping[str, Any]) -> list[str] | None:
    """The hashes of the files that the step's images came in, each once."""
    try:
        return list(dict.fromkeys(str(image["sha256"]) for image in body["inputs"])) or None
    except (KeyError, TypeError):
        return None


def _content(path: Path | None, digest: str) -> bytes | None:
    try:
        content = path.read_bytes() if path else b""
    except OSError:
        return None
    # It may have changed since it was found.
    return content if path and hashlib.sha256(content).hexdigest() == digest else None


def _outcome(differences: tuple[Difference, ...], tolerance: float) -> str:
    if not differences:
        return "exact"
    return "close" if all(each.within(tolerance) for each in differences) else "different"


def in_words(report: ReplayReport) -> list[str]:
    """Every step that is not exact, the largest differences, and the verdict last."""
    total, sentences = report.outcomes.total(), []
    for step in report.steps:
        told = "; ".join(map(str, step.differences)) or step.reason
        where = f"step {step.step} of stream '{step.stream}', sequence number {step.sequence}"
        sentences.append(f"{step.outcome.capitalize()}: {where}: {told}")
    rest = total - report.outcomes["exact"] - len(report.steps)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report.outcomes.items())) or "no step"
    return [
        *sentences,
        *([f"{rest} more."] if rest else []),
        *(f"Largest difference of {name}: {value:.3g}" for name, value in sorted(report.largest.items())),
        f"{'Reproduced' if report.reproduced else 'NOT reproduced'}: {counts}.",
    ]
