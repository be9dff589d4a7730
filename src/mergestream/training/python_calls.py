"""`mergestream.train(...)`: the command `mergestream train` in Python."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergestream.data.datasets import DataRequest
from mergestream.pool.expert_card import ExpertCard
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.parallel import Track, quiet
from mergestream.training.recipe import plan_from, start_from
from mergestream.training.training_loop import TEMPERATURE_LIMITS
from mergestream.training.training_run import Candidate, run_training

# Options that a training plan holds as they are given.
PLAN = ("network", "domain", "keep_candidates", "statistics", "keep_every", "tensorboard")
ONE_SIDED = 1.645  # standard errors: 5 % of experts that guess are above


@dataclass(frozen=True)
class TrainedPool:
    """Result of a training run: the pool's folder, and per expert its card and every recipe that was tried."""

    folder: Path
    experts: Sequence[tuple[ExpertCard, Sequence[Candidate]]]

    @property
    def pool(self) -> ExpertPool:
        """The pool as it is on disk, ready for `create_method`."""
        return ExpertPool.load(self.folder)

    @property
    def sentences(self) -> list[str]:
        """Every expert in a sentence, why recipes failed, and the pool's folder."""
        lines = []
        for card, candidates in self.experts:
            report = card.metrics["validation"]
            scores = f"accuracy {100 * report['accuracy']:.1f} %, balanced {100 * report['balanced_accuracy']:.1f} %"
            lines.append(
                f"{card.domain}: {scores}, cross-entropy {report['nll']:.3f} on its own validation split; step "
                f"{card.metrics['best_step']}, temperature {card.temperature:.2f}, best of {len(candidates)}."
            )
            reasons = dict.fromkeys(candidate.failed for candidate in candidates if candidate.failed)
            lines += [f"  a setting failed: {reason}" for reason in reasons]
        return [*lines, f"Pool: {self.folder}"]

    @property
    def warnings(self) -> list[str]:
        """Sentences about experts that a user should look at before using them."""
        return [sentence for card, _ in self.experts for sentence in training_warnings(card)]


def train(
    dataset: str,
    network: str,
    out: str | Path,
    *,
    root: str | Path | None = None,
    domain: str | None = None,
    init: str = "pretrained",
    recipe: str = "default",
    head_init: str | None = None,
    loss: str = "plain",
    criterion: str = "plain",
    settings: str | None = None,
    steps: int | None = None,
    batch_size: int = 32,
    learning_rate: float | None = None,
    augmentation: float = 1.0,
    validate_every: int = 100,
    seed: int = 0,
    arg: Mapping[str, Any] | Sequence[str] | None = None,
    data_option: Mapping[str, Any] | Sequence[str] | None = None,
    keep_candidates: bool = False,
    statistics: int = 0,
    skip_bad: int = 0,
    allow_missing_classes: bool = False,
    device: str = "auto",
    precision: str = "32-true",
    compile: str = "auto",
    keep_every: float = 30.0,
    tensorboard: bool = False,
    jobs: int = 1,
    engine: str = "local",
    track: Track = quiet,
) -> TrainedPool:
    """Train every domain's expert from one shared base, as `mergestream train` does with the same options.

    What is None is the recipe's (RECIPES in `mergestream.training.recipe`). `arg` and `data_option` are mappings, or
    texts as on the command line. `jobs` above 1 starts processes, for which a script needs
    `if __name__ == "__main__":`. Finished work under `out` is not repeated.
    """
    given = {**locals(), "accelerator": device}
    limits = {"skip_bad": skip_bad, "allow_missing_classes": allow_missing_classes}
    start, chosen_settings, head_start = start_from(recipe, given)
    plan = plan_from(
        data=DataRequest.parse(dataset, None if root is None else Path(root), data_option, **limits),
        arguments=arg or (),
        init=init,
        settings=chosen_settings,
        start=start,
        head_init=head_start,
        **{name: given[name] for name in PLAN},
    )
    return TrainedPool(Path(out), run_training(plan, Path(out), track, jobs=jobs, engine=engine))


def training_warnings(card: ExpertCard) -> list[str]:
    """Sentences about an expert that learned nothing, or whose confidence cannot be calibrated."""
    report = card.metrics["validation"]
    counts = [sum(row) for row in report["confusion"] if sum(row)]
    sentences = []
    if len(counts) > 1:
        chance = 1 / len(counts)
        error = chance * math.sqrt(sum(chance * (1 - chance) / count for count in counts))
        if report["balanced_accuracy"] <= chance + ONE_SIDED * error:
            sentences.append(
                f"{card.domain} is at chance: balanced accuracy {report['balanced_accuracy']:.1%} on "
                f"{sum(counts)} validation images, where guessing has {chance:.1%} and the largest class alone is "
                f"{max(counts) / sum(counts):.1%} of them. Train longer (--steps), with another learning rate "
                f"(--learning-rate) or from pretrained weights (--init); or check its labels."
            )
    low, high = TEMPERATURE_LIMITS
    if not low * 1.001 < card.temperature < high / 1.001:
        why = (
            "its validation split has no error to learn from"
            if report["accuracy"] == 1
            else "its confidence says little about its errors"
        )
        sentences.append(
            f"{card.domain} has the temperature {card.temperature:g}, the limit of the search: {why}. "
            f"Give it more validation images, or do not trust its probabilities."
        )
    return sentences
