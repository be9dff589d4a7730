"""Candidates of a training run: one fit per domain and recipe, its progress, and the choice of the best per domain.

Progress goes through small files: workers of other processes and machines write them, the first process reads.
"""

import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from mergestream.data.datasets.data_request import open_data
from mergestream.networks.preprocessing import Preprocessing
from mergestream.pool.checkpoint import holds_only_an_expert, open_weights, write_expert
from mergestream.pool.expert_card import BASE, CARD, ExpertCard, read_card
from mergestream.runtime.errors import CheckpointError, InputError, MergestreamError, TrainingError
from mergestream.runtime.files import atomic_folder, read_json, sha256_of_json, write_json
from mergestream.runtime.parallel import Advance, Track
from mergestream.training.expert_training import train_expert
from mergestream.training.recipe import Recipe, TrainPlan

SCHEMA_VERSION = 1
SECONDS_BETWEEN_WRITES = 0.5
Progress = dict[str, Any]


class ProgressFile:
    """Steps, seconds and losses of one fit, for the progress bar, the candidate's record and TensorBoard."""

    def __init__(self, path: Path, steps: int, tensorboard: Path | None = None) -> None:
        self._path, self._tensorboard = path, tensorboard
        self._writer: Any = None
        zero: Progress = {"schema_version": SCHEMA_VERSION, "step": 0, "steps": steps, "seconds": 0.0, "curve": []}
        self.progress = zero
        self._start, self._written = time.monotonic(), -SECONDS_BETWEEN_WRITES

    def add_step(self) -> None:
        self.progress["step"] += 1
        if time.monotonic() - self._written >= SECONDS_BETWEEN_WRITES:
            self._write()

    def add_validation(self, line: dict[str, float]) -> None:
        """Add a validation; a resumed fit reports its earlier ones again."""
        self.progress["curve"].append(line)
        self.progress["step"] = int(line["step"])
        if self._tensorboard is not None:
            self._writer = self._writer or _open_tensorboard(self._tensorboard)
            for key in line.keys() - {"step"}:
                split, _, kind = key.partition("_")
                self._writer.add_scalar(f"{kind}/{split}", line[key], int(line["step"]))

    def close(self) -> None:
        if self.progress["curve"]:  # otherwise the expert was cached, and the earlier file stays valid
            self._write()
        if self._writer is not None:
            self._writer.close()

    def _write(self) -> None:
        self.progress["seconds"] = round(time.monotonic() - self._start, 3)
        write_json(self._path, self.progress)
        self._written = time.monotonic()


def read_progress(path: Path) -> Progress | None:
    """Return a fit's progress, or None if it has written none yet."""
    try:
        return read_json(path, SCHEMA_VERSION)
    except CheckpointError:
        return None


@contextmanager
def follow_progress(title: str, paths: Sequence[Path], steps: Sequence[int], track: Track) -> Iterator[None]:
    """Show all fits as one progress bar during a block: the sum of their steps, and the latest losses."""
    done = threading.Event()
    with track(title, sum(steps)) as advance:
        watcher = threading.Thread(target=_watch, args=(paths, advance, done), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


def _watch(paths: Sequence[Path], advance: Advance, done: threading.Event) -> None:
    shown, last = [0] * len(paths), False
    while not last:
        last = done.wait(SECONDS_BETWEEN_WRITES)
        for number, path in enumerate(paths):
            progress = read_progress(path)
            if progress is not None and progress["step"] > shown[number]:
                latest = f"step {progress['step']}"
                for line in progress["curve"][-1:]:
                    latest = f"loss {line['training_loss']:.3f}, validation {line['validation_loss']:.3f}"
                advance(progress["step"] - shown[number], f"{path.stem}: {latest}")
                shown[number] = progress["step"]


def require_tensorboard() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise InputError("TensorBoard files need TensorBoard: pip install 'mergestream[tensorboard]'.") from error
    return SummaryWriter


def _open_tensorboard(folder: Path) -> Any:
    """Open a writer that replaces an earlier fit's files."""
    for earlier in folder.glob("events.out.tfevents.*") if folder.exists() else ():
        earlier.unlink()
    return require_tensorboard()(str(folder))


@dataclass(frozen=True)
class Candidate:
    """Result of one recipe at one domain: the expert's folder and its losses, or why the fit failed."""

    domain: str
    recipe: Recipe
    folder: Path
    progress: Progress
    metrics: dict[str, Any] = field(default_factory=dict)  # of the expert's card
    failed: str | None = None

    @property
    def loss(self) -> float | None:
        """Plain cross-entropy on the validation split."""
        return None if self.failed else float(self.metrics["validation"]["nll"])

    @property
    def criterion(self) -> float | None:
        """The value by which candidates are compared: the loss, unless the recipe says otherwise."""
        return None if self.failed else float(self.metrics["criterion"])

    def to_json(self) -> dict[str, Any]:
        curve = {"seconds": self.progress.get("seconds"), "curve": self.progress.get("curve", [])}
        scores = {"validation_loss": self.loss, "criterion": self.criterion}
        fit = {"domain": self.domain, "recipe": asdict(self.recipe), "expert": self.folder.name}
        return {**fit, **scores, "failed": self.failed, "metrics": self.metrics, **curve}


def work_folder(out: Path) -> Path:
    """Folder beside the pool for decoded images and candidates; it can be deleted when training is finished."""
    return out.with_name(f"{out.name}.work")


def candidate_folder(out: Path, domain: str, recipe: Recipe) -> Path:
    return work_folder(out) / "candidates" / f"{expert_name(domain)}-{sha256_of_json(asdict(recipe))[:8]}"


def progress_path(out: Path, domain: str, recipe: Recipe) -> Path:
    return work_folder(out) / "progress" / f"{candidate_folder(out, domain, recipe).name}.json"


def expert_name(domain: str) -> str:
    """Convert a domain's name to a folder name."""
    return "".join(character if character.isalnum() or character in "-_." else "_" for character in domain)


def train_candidate(plan: TrainPlan, out: Path, preprocessing: Preprocessing, domain: str, recipe: Recipe) -> Candidate:
    """Train one recipe at one domain. A failed fit is recorded, and the others continue."""
    data = open_data(plan.data, preprocessing, work_folder(out))[domain]
    folder, path = candidate_folder(out, domain, recipe), progress_path(out, domain, recipe)
    events = work_folder(out) / "tensorboard" / folder.name if plan.tensorboard else None
    file = ProgressFile(path, recipe.steps, events)
    try:
        listeners: dict[str, Any] = {"on_step": file.add_step, "on_validation": file.add_validation}
        card = train_expert(folder, out / BASE, data, recipe, **listeners, keep_every=plan.keep_every)
        file.close()
    except (TrainingError, OSError, torch.OutOfMemoryError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Candidate(domain, recipe, folder, file.progress, failed=reason)
    return Candidate(domain, recipe, folder, read_progress(path) or {}, card.metrics)


def install_best(out: Path, candidates: Sequence[Candidate]) -> ExpertCard:
    """Copy the candidate with the lowest criterion into the pool as the domain's expert."""
    finished = [candidate for candidate in candidates if not candidate.failed]
    if not finished:
        reasons = "; ".join(dict.fromkeys(str(candidate.failed) for candidate in candidates))
        raise TrainingError(f"No setting could be trained at '{candidates[0].domain}': {reasons}.")
    best = min(finished, key=lambda candidate: (candidate.criterion, candidate.folder.name))
    card = read_card(best.folder)
    renamed = replace(card, name=expert_name(best.domain))
    try:
        installed = read_card(out / renamed.name)
        if installed.weights_sha256 == card.weights_sha256:
            return installed
    except MergestreamError:
        pass
    return write_expert(out / renamed.name, dict(open_weights(best.folder, card)), renamed)


def copy_candidates(candidates: Sequence[Candidate], folder: Path) -> None:
    """Copy all candidates into a pool beside the pool, for DiWA's averages."""
    for candidate in candidates:
        if not candidate.failed and not (folder / candidate.folder.name / CARD).exists():
            with atomic_folder(folder / candidate.folder.name, holds_only_an_expert) as scratch:
                shutil.copytree(candidate.folder, scratch, dirs_exist_ok=True)
