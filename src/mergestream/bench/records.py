"""A run on disk, named by its hash: `run.json` (arguments), `steps.jsonl` (one line per step), `predictions.npz`."""

import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from mergestream.functional.metrics import batch_confusions, collapsed_classes, summarise, summarise_subgroups
from mergestream.functional.nested_bootstrap import NestedRun
from mergestream.methods import Step
from mergestream.pool.expert_card import library_versions
from mergestream.runtime import files
from mergestream.runtime.errors import CheckpointError

SCHEMA_VERSION = 1
MOST_UNITS = 10_000  # of a bootstrap over batches: it draws a thousand times as many numbers
HEADER, STEPS, PREDICTIONS = "run.json", "steps.jsonl", "predictions.npz"
StepRecord = dict[str, Any]


def run_hash(arguments: dict[str, Any]) -> str:
    """The run's name: a hash of everything its numbers depend on."""
    return files.sha256_of_json(arguments)[:16]


def step_record(number: int, step: Step, indices: np.ndarray) -> dict[str, Any]:
    """One JSON line. No label is in it."""
    return {
        "step": number,
        "images": len(indices),
        "encoder_coefficients": _numbers(step.encoder_coefficients),
        "head_coefficients": _numbers(step.head_coefficients),
        "entropy": _numbers(step.entropy),
        "scores": _numbers(step.scores),
        "consistency": _numbers(step.consistency),
        "head_expert": step.head_expert,
        "class_shift": _numbers(step.class_shift),
        "lambdas": None if step.lambdas is None else _numbers(step.lambdas.reshape(len(step.lambdas), -1).mean(dim=1)),
        "predictions": step.logits.argmax(dim=-1).tolist(),
        "expert_forwards": step.expert_forwards,
        "merged_forwards": step.merged_forwards,
        "backwards": step.backwards,
        "seconds": round(step.seconds, 6),
    }


class StepLines(Sequence[StepRecord]):
    """Records that are parsed whenever they are read: a line takes less than half the memory of its record."""

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self.lines = list(lines)

    @classmethod
    def checked(cls, lines: Iterable[str]) -> "StepLines":
        """Lines of a file; ValueError if one is not JSON."""
        steps = cls(lines)
        for _ in steps:
            pass
        return steps

    def append(self, record: StepRecord) -> None:
        self.lines.append(json.dumps(record))

    def __len__(self) -> int:
        return len(self.lines)

    def __iter__(self) -> Iterator[StepRecord]:
        return map(json.loads, self.lines)

    def __getitem__(self, position: Any) -> Any:
        chosen = self.lines[position]
        return json.loads(chosen) if isinstance(chosen, str) else [json.loads(line) for line in chosen]

    def to_tensor(self) -> Tensor:
        """All lines as bytes: a state file holds tensors of any size, but only 100 MB of text."""
        return torch.from_numpy(np.frombuffer("\n".join(self.lines).encode(), dtype=np.uint8).copy())

    @classmethod
    def from_tensor(cls, stored: Tensor) -> "StepLines":
        return cls(stored.numpy().tobytes().decode().splitlines())


@dataclass(frozen=True)
class Run:
    """A finished run: its arguments, its steps, and every answer in order of arrival."""

    arguments: dict[str, Any]
    classes: tuple[str, ...]
    steps: Sequence[dict[str, Any]]
    batches: tuple[np.ndarray, ...]
    labels: Tensor  # [N] in order of arrival
    predictions: Tensor  # [N] in order of arrival
    probabilities: Tensor  # [N,C] in order of arrival; fp32, or rounded to fp16 where it was read from disk
    metrics: dict[str, Any]
    seconds_per_step: float | None = None  # the median; of a static method, where it was measured
    groups: Tensor | None = None  # [N] in order of arrival: the number of each image's slide or patient, where known

    @classmethod
    def finish(
        cls,
        arguments: dict[str, Any],
        classes: Sequence[str],
        steps: Sequence[dict[str, Any]],
        batches: Sequence[np.ndarray],
        labels: Tensor,
        probabilities: Tensor,
        *,
        subgroups: Mapping[str, Sequence[str]] | None = None,
        experts: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> "Run":
        """All given in order of arrival. `experts` are the experts' own predictions [K,N], to see a collapse by."""
        predictions = probabilities.argmax(dim=-1)
        metrics = summarise(probabilities, labels, classes)
        if subgroups:
            metrics["subgroups"] = summarise_subgroups(probabilities, labels, classes, subgroups)
        if (lone := arguments.get("stream", {}).get("lone")) is not None:
            metrics["lone_sensitivity"] = metrics["recall"][lone]  # none of its images shares a batch with another
        if experts is not None:
            metrics["collapsed"] = collapsed_classes(experts, predictions, classes)
        seconds = [step["seconds"] for step in steps if step["seconds"] is not None]
        measured = float(np.median(seconds)) if seconds else None
        answers = labels, predictions, probabilities
        return cls(arguments, tuple(classes), steps, tuple(batches), *answers, metrics, measured, groups)

    @property
    def hash(self) -> str:
        return run_hash(self.arguments)

    @property
    def label(self) -> str:
        """The method with its options, as tables name it."""
        return str(self.arguments["label"])

    @property
    def is_single(self) -> bool:
        """Whether this is an expert alone."""
        return bool(self.arguments["method"] == "single_expert")

    @property
    def stream(self) -> str:
        return str(self.arguments["stream"]["name"])

    @property
    def target(self) -> str:
        return str(self.arguments["data"]["domain"])

    @property
    def accuracy(self) -> float:
        return float(self.metrics["accuracy"])

    @property
    def training_seed(self) -> str:
        """The pool that answered, by its fingerprint: pools of other training seeds have other weights."""
        return str(self.arguments["pool"]["fingerprint"])

    @property
    def stream_seed(self) -> int:
        """The seed of the order of arrival; it says nothing of the training."""
        return int(self.arguments["seed"])

    @cached_property
    def nested(self) -> NestedRun:
        """The answers with their place in the hierarchical bootstrap: slides or patients as units, else batches."""
        units = np.repeat(np.arange(len(self.batches)), [len(batch) for batch in self.batches])
        grouped = self.groups is not None and len(self.groups.unique()) > 1
        if self.groups is not None and grouped:
            units = self.groups.numpy()
        return NestedRun(
            self.target,
            self.training_seed,
            self.stream_seed,
            labels=self.labels.numpy(),
            predictions=self.predictions.numpy(),
            probabilities=self.probabilities.numpy(),
            units=units,
            unit="group" if grouped else "batch",
        )

    @property
    def majority_share(self) -> float:
        """Mean over batches of the share that the commonest class had."""
        labels = self.labels.numpy()
        return float(np.mean([np.bincount(labels[b]).max() / len(b) for b in self._positions()]))

    def confusions(self) -> np.ndarray:
        """One confusion matrix per batch [T,C,C]; of a long stream, one per block of consecutive batches."""
        positions = self._positions()
        together = -(-len(positions) // MOST_UNITS)
        units = [np.concatenate(positions[i : i + together]) for i in range(0, len(positions), together)]
        return batch_confusions(self.predictions, self.labels, units, len(self.classes))

    def _positions(self) -> list[np.ndarray]:
        """Where each batch lies in the order of arrival."""
        ends = np.cumsum([len(batch) for batch in self.batches])
        return np.split(np.arange(len(self.labels)), ends[:-1])

    def reordered(self, arguments: dict[str, Any], batches: Sequence[np.ndarray], **arrivals: Any) -> "Run":
        """The same answers in another order of arrival: what a static method would have answered on that stream.

        The stream may leave images out or repeat them. `arrivals` are those of `Run.finish`, in the new order.
        """
        place = np.empty(len(self.labels), dtype=np.int64)
        place[np.concatenate(self.batches)] = np.arange(len(self.labels))
        order = torch.from_numpy(place[np.concatenate(list(batches))])
        first, steps = self.steps[0], StepLines()
        for number, own in enumerate(self.predictions[order].split([len(batch) for batch in batches])):
            own_fields = {"step": number, "images": len(own), "predictions": own.tolist(), "seconds": None}
            steps.append({**first, **own_fields})
        answers = self.labels[order], self.probabilities[order]
        run = Run.finish(arguments, self.classes, steps, batches, *answers, **arrivals)
        return replace(run, seconds_per_step=self.seconds_per_step)

    def save(self, folder: str | Path) -> Path:
        """Write the run folder whole; a killed writer leaves nothing that looks finished."""
        header = {
            "schema_version": SCHEMA_VERSION,
            "hash": self.hash,
            "arguments": self.arguments,
            "classes": list(self.classes),
            "metrics": self.metrics,
            "seconds_per_step": self.seconds_per_step,
            "environment": {**library_versions(), "platform": platform.platform(), "threads": torch.get_num_threads()},
        }
        with files.atomic_folder(
            Path(folder), lambda old: files.contains_only(old, {HEADER, STEPS, PREDICTIONS})
        ) as scratch:
            files.write_json(scratch / HEADER, header)
            files.write_atomically(scratch / STEPS, self._write_steps)
            files.write_atomically(scratch / PREDICTIONS, self._write_predictions)
        return Path(folder)

    def _write_steps(self, path: Path) -> None:
        with path.open("w", encoding="utf-8") as file:
            for step in self.steps:
                file.write(json.dumps({"schema_version": SCHEMA_VERSION, **step}) + "\n")

    def _write_predictions(self, path: Path) -> None:
        arrays: dict[str, Any] = {
            "index": np.concatenate(self.batches),
            "batch": np.repeat(np.arange(len(self.batches)), [len(b) for b in self.batches]),
            "label": self.labels.numpy(),
            "prediction": self.predictions.numpy(),
            "probabilities": self.probabilities.numpy().astype(np.float16),
        }
        if self.groups is not None:
            arrays["group"] = self.groups.numpy()
        with path.open("wb") as file:
            np.savez_compressed(file, **arrays)

    @classmethod
    def load(cls, folder: str | Path) -> "Run":
        """Read a run back. Probabilities come back as they were stored, in fp16; metrics are those of the header."""
        root = Path(folder)
        header = files.read_json(root / HEADER, SCHEMA_VERSION)
        try:
            steps = StepLines.checked((root / STEPS).read_text(encoding="utf-8").splitlines())
            with np.load(root / PREDICTIONS) as stored:
                batches = np.split(stored["index"], np.flatnonzero(np.diff(stored["batch"])) + 1)
                labels, predictions, p = (torch.from_numpy(stored[k]) for k in ("label", "prediction", "probabilities"))
                groups = torch.from_numpy(stored["group"]) if "group" in stored else None
            arguments, classes, metrics = (header[key] for key in ("arguments", "classes", "metrics"))
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            raise CheckpointError(f"The run {root} is damaged ({error!r}). Delete it and run it again.") from error
        seconds, answers = header.get("seconds_per_step"), (labels, predictions, p.float())
        return cls(arguments, tuple(classes), steps, tuple(batches), *answers, metrics, seconds, groups)


def is_finished(folder: Path) -> bool:
    return (folder / HEADER).is_file()


def _numbers(values: Tensor | None) -> list[float] | None:
    return None if values is None else [float(f"{value:.7g}") for value in values.tolist()]
