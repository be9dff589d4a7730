"""Checks of one expert against its pool: card, weights, statistics, and its confidence on noise images."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from mergestream.functional.scores import require_finite
from mergestream.networks.architecture import logits_of
from mergestream.networks.flat_layout import Layout
from mergestream.networks.preprocessing import Preprocessing
from mergestream.pool.checkpoint import WeightsFile, open_weights, read_statistics
from mergestream.pool.class_concepts import joined_concepts
from mergestream.pool.expert_card import ExpertCard, base_problems, base_warnings, differences
from mergestream.pool.parts import require_classes
from mergestream.pool.pool_folder import PoolFolder, require_some
from mergestream.runtime.errors import CheckpointError, MergestreamError, PoolError

T = TypeVar("T")
PROBES = 16
LARGEST_PROBE = 4 << 20  # numbers per image: a card must not make the check take gigabytes


@dataclass(frozen=True)
class ProbeResult:
    """The norm of an expert's head, and the lead of its first answer on noise; None where it cannot run."""

    head_norm: float
    lead: float | None = None


class NoiseProbe:
    """Reads experts of one architecture, one at a time: a large pool needs the memory of one expert only."""

    def __init__(self, card: ExpertCard, folder: Path) -> None:
        """card, folder: the expert to compare with, where the network cannot be built by name."""
        self._head = tuple(f"{part}." for part in card.head)
        weights = open_weights(folder, card)
        self._network = None if card.architecture.library == "custom" else card.network(most=weights.numbers)
        self._layout = Layout.of(self._network.module, card.head) if self._network else None
        self._shapes = weights.shapes
        pixels = card.preprocessing if self._network else None
        small = pixels is not None and len(pixels.mean) * math.prod(pixels.size) <= LARGEST_PROBE
        self._probes = probes(pixels) if pixels is not None and small else None
        if self._network:
            require_classes(card.classes, self._network)

    def read(self, folder: Path, card: ExpertCard) -> ProbeResult:
        """Run one expert; refuse weights that are damaged, do not fit the network, or are not finite."""
        state, owner = open_weights(folder, card), f"Expert '{card.name}'"
        if self._layout is None:
            return ProbeResult(self._read_unbuilt(state, owner))
        row = torch.empty(self._layout.size, dtype=torch.float32)
        integers = self._layout.write_row(state, row, owner)
        norm = float(row[self._layout.encoder_size :].norm())
        if self._probes is None:
            return ProbeResult(norm)
        assert self._network is not None
        module = self._layout.attach(self._network.module, row, integers).eval()
        try:
            with torch.no_grad():
                logits = logits_of(module(self._probes)).float()
        except (RuntimeError, ValueError, AssertionError) as error:
            size = tuple(self._probes.shape[2:])
            message = str(error).split("\n")[0]
            raise CheckpointError(f"{owner} cannot take images of its own size {size}: {message}") from error
        return ProbeResult(norm, mean_lead(require_finite(logits, owner)))

    def _read_unbuilt(self, state: WeightsFile, owner: str) -> float:
        if state.shapes != self._shapes:
            odd = sorted(state.shapes.items() ^ self._shapes.items())[0][0]
            raise CheckpointError(f"{owner} is not built as the pool's other experts: they differ at '{odd}'.")
        squares = 0.0
        for name in state:
            tensor = state[name]
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(f"{owner}: '{name}' holds NaN or Inf. Train or export this expert again.")
            squares += float(tensor.float().square().sum()) if name.startswith(self._head) else 0.0
        return squares**0.5


def probes(preprocessing: Preprocessing) -> Tensor:
    """The same noise images [16,c,H,W] every time: half white noise, half soft clouds."""
    generator = torch.Generator().manual_seed(0)
    channels, size = len(preprocessing.mean), preprocessing.size
    white = torch.rand((PROBES // 2, channels, *size), generator=generator)
    coarse = torch.rand((PROBES // 2, channels, 4, 4), generator=generator)
    clouds = torch.nn.functional.interpolate(coarse, size, mode="bilinear", align_corners=False)
    return preprocessing((torch.cat([white, clouds]) * 255).to(torch.uint8))


def mean_lead(logits: Tensor) -> float:
    """Mean lead of the largest logit over the mean of the others, for logits [B,C]."""
    if logits.shape[-1] < 2:
        return 0.0
    first = logits.amax(dim=-1)
    others = (logits.sum(dim=-1) - first) / (logits.shape[-1] - 1)
    return float((first - others).mean())


# Honest phantom experts lie within a factor of 2 of each other and of 2.5 of their own loss (docs/pools.md).
FACTOR = 8.0
LARGEST_ECE = 0.25
TEMPERATURES = (0.25, 4.0)


def confidence_warnings(card: ExpertCard, result: ProbeResult, others: Sequence[ProbeResult]) -> list[str]:
    """Warn of an expert that is much more or less confident than its validation loss and the other experts suggest.

    Methods that weigh experts by entropy follow the most confident one, so a head scaled by 100 captures the pool.
    docs/pools.md says what these checks can and cannot see.
    """
    sentences = [*_card_doubts(card), *_loss_doubts(card, result), *_pool_doubts(result, others)]
    return [f"Expert '{card.name}' {sentence} Ask the site how it was trained." for sentence in sentences]


def _card_doubts(card: ExpertCard) -> list[str]:
    """Do accuracy, loss and temperature in the card fit together?"""
    accuracy, loss, ece = map(card.validation, ("accuracy", "nll", "ece"))
    count, sentences = len(card.classes), list[str]()
    if accuracy is not None and loss is not None and loss > math.log(count) and accuracy > 1.5 / count:
        sentences.append(
            f"is right on {accuracy:.0%} of its own validation images, yet its loss there ({loss:.3g}) is above that "
            f"of answering nothing ({math.log(count):.3g}): it is far too sure when it is wrong."
        )
    if ece is not None and ece > LARGEST_ECE:
        sentences.append(f"is {ece:.0%} off between confidence and accuracy (ECE) on its own validation images.")
    low, high = TEMPERATURES
    # Without an error the best temperature is 0, whatever the scale: it says nothing then.
    if not low <= card.temperature <= high and (accuracy is None or accuracy < 1):
        sentences.append(f"needs the temperature {card.temperature:.3g} to be calibrated at home; usual is about 1.")
    return sentences


def _loss_doubts(card: ExpertCard, result: ProbeResult) -> list[str]:
    """Compare the lead with log((C-1) / (e^L - 1)): the log-odds of the truth over one other class at loss L."""
    loss = card.validation("nll")
    if loss is None or result.lead is None or not 0 < loss < math.log(len(card.classes)):
        return []
    expected = math.log((len(card.classes) - 1) / math.expm1(loss))
    expectation = f"by its validation loss ({loss:.3g}) about {expected:.2g} is to be expected."
    if result.lead > FACTOR * max(expected, 1.0):
        return [f"is too confident: on noise its first answer leads by {result.lead:.3g}; {expectation}"]
    if result.lead < expected / FACTOR:
        return [f"is hardly confident of anything: on noise its first answer leads by {result.lead:.2g}; {expectation}"]
    return []


def _pool_doubts(result: ProbeResult, others: Sequence[ProbeResult]) -> list[str]:
    """Is it far from the other experts' median?"""
    measures = {"answers noise": ("lead of its first logit", "lead"), "has a head": ("norm", "head_norm")}
    sentences = []
    for what, (measure, field) in measures.items():
        mine, theirs = getattr(result, field), [getattr(other, field) for other in others]
        usual = statistics.median([value for value in theirs if value is not None] or [0])
        if mine is not None and usual > 0 and not usual / FACTOR <= mine <= usual * FACTOR:
            sentences.append(
                f"{what} out of line with the pool: {measure} {mine:.3g}, the other experts' median is {usual:.3g}."
            )
    return sentences


def check_expert(pool: PoolFolder, folder: Path, card: ExpertCard) -> tuple[str, ...]:
    """Compare an expert in any folder with the pool's other experts and its base, and return warnings about it.

    An expert that does not fit is refused, with all its problems at once.
    """
    others = [other for other in pool.cards.values() if other.name != card.name]
    reference = others[0] if others else pool.base or card
    home = folder if reference is card else pool.root / reference.name
    probe = None if differences(card, reference) else NoiseProbe(reference, home)
    problems: list[str] = []
    attempt(problems, require_some, {card.name: card})
    result = inspect_expert(problems, folder, card, reference, pool.base, probe)
    if problems or probe is None or result is None:
        raise PoolError(f"'{card.name}' was not accepted. {' '.join(problems)}")
    other_results = [probe.read(pool.root / other.name, other) for other in others]
    _, conflicts = joined_concepts([*others, card])
    return (*base_warnings(card, others, pool.base), *confidence_warnings(card, result, other_results), *conflicts)


def inspect_expert(
    problems: list[str],
    folder: Path,
    card: ExpertCard,
    reference: ExpertCard,
    base: ExpertCard | None,
    probe: NoiseProbe | None,
) -> ProbeResult | None:
    """Add the problems of one expert's card, weights and statistics; its answers to noise where they could be had."""
    unlike = differences(card, reference)
    problems += [*unlike, *base_problems(card, base)]
    read = open_weights if unlike or probe is None else probe.read
    result = attempt(problems, read, folder, card)
    attempt(problems, require_statistics, folder, card)
    return result if isinstance(result, ProbeResult) else None


def attempt(problems: list[str], read: Callable[..., T], *arguments: object) -> T | None:
    """Result of a reader or a check; where it raises, None, and the message joins the problems."""
    try:
        return read(*arguments)
    except MergestreamError as error:
        problems.append(str(error))
        return None


def require_statistics(folder: Path, card: ExpertCard) -> None:
    """Refuse statistics of other weights, or with NaN or Inf in them."""
    statistics = read_statistics(folder, card)
    tensors = statistics.tensors if statistics else {}
    for key in tensors:
        if not bool(torch.isfinite(tensors[key]).all()):
            raise CheckpointError(f"The statistics of '{card.name}' hold NaN or Inf in '{key}'. Measure them again.")
