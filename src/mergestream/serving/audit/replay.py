"""Replay: compute logged steps again from the same images and compare them field by field."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mergestream.runtime.errors import InputError, MergestreamError
from mergestream.runtime.files import error_text, sha256_of_file
from mergestream.runtime.parallel import Track, quiet
from mergestream.serving.audit.chain import sound_lines
from mergestream.serving.audit.line_kinds import STEP

MOST_LISTED = 100
# Fields that say what the model did. One that was logged but not computed again counts as a difference.
COMPARED = (
    "inputs", "predictions", "probabilities", "encoder_coefficients", "head_coefficients", "lambdas", "entropy",
    "scores", "consistency", "class_shift", "head_expert", "weights_sha256", "logits_sha256",
)  # fmt: skip
# Another class or another image is never a small difference, even where the field holds numbers.
EXACT = ("inputs", "predictions", "head_expert")
# Hashes of computed numbers: on other hardware they differ with the last bit of any of them.
BITS = ("weights_sha256", "logits_sha256")


@dataclass(frozen=True)
class FieldDifference:
    """One field that differs; `largest` is set if only numbers differ."""

    field: str
    what: str
    largest: float | None = None

    def within(self, tolerance: float) -> bool:
        """Whether the tolerance allows this difference. A tolerance of 0 allows none."""
        return tolerance > 0 and (self.field in BITS or (self.largest is not None and self.largest <= tolerance))

    def __str__(self) -> str:
        return f"{self.field} {self.what}"


def compare(logged: Mapping[str, Any], computed: Mapping[str, Any]) -> tuple[FieldDifference, ...]:
    """Compare every field that was computed again, and those of COMPARED that were logged."""
    fields = [*computed, *(name for name in COMPARED if name in logged and name not in computed)]
    differences = (_difference(name, logged, computed) for name in fields)
    return tuple(difference for difference in differences if difference is not None)


def _difference(name: str, logged: Mapping[str, Any], computed: Mapping[str, Any]) -> FieldDifference | None:
    if name not in computed:
        return FieldDifference(name, "was not computed again")
    if name not in logged:
        return FieldDifference(name, "is not in the log")
    pairs = list(_pairs(logged[name], computed[name]))
    unequal = [(a, b) for a, b in pairs if a != b]
    if not unequal:
        return None
    if name in EXACT or not all(_is_finite(value) for pair in unequal for value in pair):
        return FieldDifference(name, f"differs in {len(unequal)} of {len(pairs)} values")
    largest = max(abs(a - b) for a, b in unequal)
    return FieldDifference(
        name, f"differs by up to {largest:.3g} in {len(unequal)} of {len(pairs)} values", float(largest)
    )


def _pairs(one: Any, other: Any) -> Iterator[tuple[Any, Any]]:
    """Values at the same place of two nested values; where the nesting differs, the two parts themselves."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for a, b in zip(one, other, strict=True):
            yield from _pairs(a, b)
    elif isinstance(one, Mapping) and isinstance(other, Mapping) and one.keys() == other.keys():
        for key in one:
            yield from _pairs(one[key], other[key])
    else:
        yield one, other


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# Computes a step again from its logged body and its files by sha-256, as `engine.recomputation.Reproducer` does. It
# returns the fields that it computed, under the same names. Steps come in the log's order, but any may be left out.
# A MergestreamError says why a step cannot be computed; the replay continues.
Recompute = Callable[[Mapping[str, Any], Mapping[str, bytes]], Mapping[str, Any]]


@dataclass(frozen=True)
class ReplayedStep:
    """Result for one step. `outcome`: exact, close (within the tolerance), different, missing (images) or failed."""

    sequence: int
    stream: str | None
    step: int | None
    outcome: str
    differences: tuple[FieldDifference, ...] = ()
    reason: str | None = None


@dataclass
class ReplayReport:
    outcomes: Counter[str] = field(default_factory=Counter)
    largest: dict[str, float] = field(default_factory=dict)  # the largest difference of a number, by field
    steps: list[ReplayedStep] = field(default_factory=list)  # the first ones that are not exact

    @property
    def reproduced(self) -> bool:
        """Whether there were steps and all came out the same, or within the tolerance."""
        return self.outcomes.total() > 0 and self.outcomes.keys() <= {"exact", "close"}

    def add(self, step: ReplayedStep) -> None:
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
    files = files_by_hash(images, track)
    report = ReplayReport()
    total = sum(1 for _ in step_lines(path, sequence))
    if sequence is not None and not total:
        raise InputError(f"The audit log {path} has no step with sequence number {sequence}.")
    with track("recomputing steps", total) as advance:
        for line in step_lines(path, sequence):
            report.add(replay_step(line, files, recompute, tolerance))
            advance()
    return report


def step_lines(path: Path, sequence: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the step lines of a log; a changed line is an error."""
    return (line for line in sound_lines(path) if line["kind"] == STEP and sequence in (None, line["sequence"]))


def files_by_hash(folder: Path, track: Track = quiet) -> dict[str, Path]:
    """Find the files of a folder by their sha-256."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder of images.")
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    by_hash = {}
    with track("reading images", len(paths)) as advance:
        for path in paths:
            try:
                by_hash[sha256_of_file(path)] = path
            except OSError as error:
                raise InputError(f"An image in {folder} cannot be read: {error_text(error)}.") from error
            advance()
    return by_hash


def replay_step(
    line: Mapping[str, Any], paths: Mapping[str, Path], recompute: Recompute, tolerance: float = 0.0
) -> ReplayedStep:
    body = line["body"]
    about = (line["sequence"], body.get("stream"), body.get("step"))
    hashes = _file_hashes(body)
    if hashes is None:
        return ReplayedStep(*about, "failed", reason="The line does not say which images the step had.")
    files = {digest: content for digest in hashes if (content := _content(paths.get(digest), digest)) is not None}
    if missing := len(hashes) - len(files):
        return ReplayedStep(
            *about, "missing", reason=f"{missing} of the step's {len(hashes)} files are not in the folder."
        )
    try:
        computed = recompute(body, files)
    except MergestreamError as error:
        return ReplayedStep(*about, "failed", reason=str(error))
    differences = compare(body, computed)
    allowed = all(each.within(tolerance) for each in differences)
    return ReplayedStep(*about, ("close" if allowed else "different") if differences else "exact", differences)


def _file_hashes(body: Mapping[str, Any]) -> list[str] | None:
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
    # The file may have changed since it was hashed.
    return content if path and hashlib.sha256(content).hexdigest() == digest else None


def in_words(report: ReplayReport) -> list[str]:
    """Steps that are not exact, the largest differences, and the verdict last."""
    total, sentences = report.outcomes.total(), []
    for step in report.steps:
        difference = "; ".join(map(str, step.differences)) or step.reason
        where = f"step {step.step} of stream '{step.stream}', sequence number {step.sequence}"
        sentences.append(f"{step.outcome.capitalize()}: {where}: {difference}")
    rest = total - report.outcomes["exact"] - len(report.steps)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(report.outcomes.items())) or "no step"
    return [
        *sentences,
        *([f"{rest} more."] if rest else []),
        *(f"Largest difference of {name}: {value:.3g}" for name, value in sorted(report.largest.items())),
        f"{'Reproduced' if report.reproduced else 'NOT reproduced'}: {counts}.",
    ]
