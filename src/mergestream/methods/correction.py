"""The correction of answers for the mix of classes, in units with a state each. The equations: docs/corrected.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mergestream.functional import class_mix, neighbours
from mergestream.methods import fused_correction
from mergestream.methods.fading_window import MORE_THAN_ONE, FadingWindow
from mergestream.methods.state import PER_EXPERT, State

CORRELATED_BEFORE = 0.01  # probability, before a stream, that the labels of a batch or of neighbours in time correlate
HOME_IMAGES = 32.0  # how many images of the home mix the long run starts with
RECENT_IMAGES = 8.0  # over so many images the recent past fades to 1/e
NEAR_IMAGES = 128.0  # over so many images the answers fade that a batch is compared with


@dataclass(frozen=True)
class LongRunState(State):
    """Answers, summed over images that fade."""

    counts: Tensor  # of the base [C]
    images: Tensor  # how many []
    expert_counts: Tensor = field(metadata=PER_EXPERT)  # [K,C]; 0 where the experts are not asked


@dataclass(frozen=True)
class LongRun:
    """The mix of classes that answers are made for, and how much of it is bias.

    All experts see the same images, so they differ in the long run by bias alone: the variance of their log-odds is
    that of a bias. Sites differ in prevalence: the variance between the experts' homes is that of a prevalence. The
    share of the first in the sum of both is how far the long run is taken back to the mix at home.
    """

    home: Tensor  # mix of the experts' answers at home [C]
    prevalence: Tensor  # variance of the classes' log-odds between sites [C]
    anchor: float | None  # that share, if it is given
    bias: Tensor | None = None  # variance of the bias [C] where sites have measured it; else by the stream's experts

    def start(self, experts: int) -> LongRunState:
        classes = torch.zeros_like(self.home)
        return LongRunState(classes, classes.sum(), classes.repeat(experts, 1))

    def usual(self, state: LongRunState) -> Tensor:
        """The mean answer so far [C]."""
        return class_mix.as_mix(torch.where(state.images > 0, state.counts, self.home))

    def learn(self, state: LongRunState, answers: Tensor, experts: Tensor | None, window: FadingWindow) -> LongRunState:
        """Add a batch's answers [B,C], and the experts' [K,B,C] where there are any."""
        counts = window.add(state.counts, (answers * window.shares[:, None]).sum(dim=0))
        own = state.expert_counts
        own = own if experts is None else window.add(own, (experts * window.shares[:, None]).sum(dim=1))
        return LongRunState(counts, window.faded * state.images + window.images, own)

    def mixes(self, state: LongRunState) -> tuple[Tensor, Tensor]:
        """The mix that answers are made for [C], and the same without the bias [C]."""
        assumed = class_mix.as_mix(state.counts + HOME_IMAGES * self.home)
        if self.anchor == 0:
            return assumed, assumed
        return assumed, class_mix.as_mix(assumed.log().lerp(self.home.log(), self._bias(state)).exp())

    def _bias(self, state: LongRunState) -> Tensor:
        if self.anchor is not None:
            return torch.full_like(self.home, self.anchor)
        own, other = (log_odds(counts + HOME_IMAGES * self.home) for counts in (state.expert_counts, state.counts))
        bias = own.var(dim=0, correction=min(1, len(own) - 1)) if self.bias is None else self.bias
        # A departure that is larger than both variances explain is one of prevalence.
        return bias / torch.maximum(bias + self.prevalence, (other - log_odds(self.home)).square())


def log_odds(counts: Tensor) -> Tensor:
    """Logarithms of class shares [...,C], centred."""
    logs = (counts / counts.sum(dim=-1, keepdim=True)).clamp_min(class_mix.LEAST).log()
    return logs - logs.mean(dim=-1, keepdim=True)


@dataclass(frozen=True)
class SpreadState(State):
    """Squared distances of answers from the long run, summed over images that fade."""

    squares: Tensor  # [C]
    images: Tensor  # how many []

    def add(self, answers: Tensor, usual: Tensor, has_past: Tensor, window: FadingWindow) -> SpreadState:
        squares = ((answers - usual).square() * window.shares[:, None]).sum(dim=0)
        images = window.faded * self.images + has_past * window.images
        return SpreadState(window.add(self.squares, has_past * squares), images)

    def variance(self) -> Tensor:
        return self.squares / self.images.clamp_min(1.0)


@dataclass(frozen=True)
class ClumpState(State):
    """How far the means of batches are from those of the batches before them, summed over batches that fade.

    Not from the long run: when scanner or site change, all batches depart from that, whatever their classes.
    """

    within: Tensor  # squared distances of images from their batch's mean [C] ...
    free: Tensor  # ... and their degrees of freedom []
    excess: Tensor  # squared distances of batches' means from those before them, less what chance explains []
    chance: Tensor  # what chance explains []
    batches: Tensor  # how many []
    before: Tensor  # answers of the batches before, summed over images that fade soon [C] ...
    sizes: Tensor  # ... and the squared sizes of these batches []

    def add(self, answers: Tensor, window: FadingWindow) -> ClumpState:
        mean = (answers * window.shares[:, None]).sum(dim=0)
        seen = self.before.sum()
        before = self.before / seen.clamp_min(neighbours.TINY)
        within = window.add(self.within, ((answers - mean).square() * window.shares[:, None]).sum(dim=0))
        free = window.faded * self.free + window.images - 1
        of_one = within.sum() / free.clamp_min(1.0)
        chance = of_one / window.images
        excess = (mean - before).square().sum() - chance - of_one / seen.clamp_min(1.0)
        excess = excess / (1 + self.sizes / seen.square().clamp_min(neighbours.TINY))  # few before: clumped, too
        counts = ((seen > 0) & (window.images > MORE_THAN_ONE)).float()  # one image has nothing to share a class with
        sums = zip((self.excess, self.chance, self.batches), (excess, chance, torch.ones_like(chance)), strict=True)
        excess, chance, batches = (window.faded * old + counts * new for old, new in sums)
        faded = torch.exp(-window.images / NEAR_IMAGES)
        before, sizes = faded * self.before + window.images * mean, faded**2 * self.sizes + window.images**2
        return ClumpState(within, free, excess, chance, batches, before, sizes)

    def correlation(self, variance: Tensor, mix: Tensor, of_bias: Tensor) -> tuple[Tensor, Tensor]:
        """How probable it is that the labels of a batch correlate [], and by how much []."""
        freedom = self.batches * neighbours.degrees_of_freedom(variance)
        explained = (self.chance + self.batches * of_bias).clamp_min(neighbours.TINY)
        squares = (self.excess + self.chance) / explained * freedom
        ratio = _covariance_of_one_class(variance, mix) * self.batches / explained  # for rho = 1
        return neighbours.correlation_in_batches(squares.clamp_min(0.0), freedom, ratio, CORRELATED_BEFORE)


def _covariance_of_one_class(variance: Tensor, mix: Tensor) -> Tensor:
    """Covariance [] of the answers to two images of one class, from the answers' variance [C]."""
    return (variance.sum() * neighbours.reliability(variance, mix)).clamp_min(neighbours.TINY)


@dataclass(frozen=True)
class RecentState(State):
    """How far neighbouring batches depart from the long run in one direction, and the recent past itself."""

    products: Tensor  # of the departures of neighbours, summed over pairs that fade []
    squares: Tensor  # of the departures []
    pairs: Tensor  # how many []
    last: Tensor  # departure of the last batch [C]
    answers: Tensor  # corrected answers of the recent past, summed over images that fade [C]

    def add(self, answers: Tensor, usual: Tensor, has_past: Tensor, window: FadingWindow) -> RecentState:
        departure = has_past * ((answers * window.shares[:, None]).sum(dim=0) - usual)
        new = ((departure * self.last).sum(), departure.square().sum(), has_past)
        before = (self.products, self.squares, self.pairs)
        products, squares, pairs = (window.faded * old + value for old, value in zip(before, new, strict=True))
        return RecentState(products, squares, pairs, departure, self.answers)

    def strength(self, variance: Tensor, mix: Tensor, of_bias: Tensor) -> Tensor:
        """How many images the long run counts beside those of the recent past []."""
        pairs = self.pairs.clamp_min(1.0)
        error = self.squares / pairs / (neighbours.degrees_of_freedom(variance) * pairs).sqrt()
        covariance, scale = self.products / pairs - of_bias, _covariance_of_one_class(variance, mix)
        error = torch.where(self.pairs > 0, error / scale, neighbours.LARGEST_ERROR)
        probable, rho = neighbours.correlation(covariance / scale, error, CORRELATED_BEFORE)
        return 1 / (probable * rho).clamp_min(neighbours.LEAST) - 1

    def remember(self, corrected: Tensor, window: FadingWindow) -> RecentState:
        total = self.answers + window.images * (corrected * window.shares[:, None]).sum(dim=0)
        return replace(self, answers=torch.exp(-window.images / RECENT_IMAGES) * total)


@dataclass(frozen=True)
class CorrectionState(State):
    long_run: LongRunState = field(metadata={"prefix": "long_run_"})
    spread: SpreadState = field(metadata={"prefix": "spread_"})
    clump: ClumpState = field(metadata={"prefix": "clump_"})
    recent: RecentState = field(metadata={"prefix": "recent_"})

    def remember(self, corrected: Tensor, window: FadingWindow) -> CorrectionState:
        """The state with a batch's corrected answers [B,C] in the recent past."""
        return replace(self, recent=self.recent.remember(corrected, window))


@dataclass(frozen=True)
class MixEvidence:
    """What a stream says about the mix of classes of one batch."""

    probable: Tensor  # how probable it is that its labels correlate [] ...
    rho: Tensor  # ... and by how much []
    strength: Tensor  # how many images the long run counts []
    recent: Tensor  # answers of the recent past, before this batch [C]


@dataclass(frozen=True)
class Correction:
    """Bayes' rule with three things that a stream says about the classes of its images, each as far as it is sure.

    The long run: the bias of the experts at this site is taken off. The recent past: neighbours in time may share a
    class. The batch: so may its images. No image is evidence about itself.
    """

    long_run: LongRun
    batch_bias: float = 0.3  # nats: how far the stain, scanner or slide of a batch may move its answers' log-odds

    def start(self, experts: int) -> CorrectionState:
        classes = torch.zeros_like(self.long_run.home)
        none = classes.sum()
        spread, recent = SpreadState(classes, none), RecentState(none, none, none, classes, classes)
        clump = ClumpState(classes, none, none, none, none, classes, none)
        return CorrectionState(self.long_run.start(experts), spread, clump, recent)

    def learn(
        self, state: CorrectionState, answers: Tensor, experts: Tensor | None, window: FadingWindow
    ) -> tuple[MixEvidence, CorrectionState]:
        """What the stream says about the mix of a batch, from its answers [B,C], and the state with them.

        `experts` [K,B,C]: where they were asked.
        """
        usual = self.long_run.usual(state.long_run)
        has_past = (state.long_run.images > 0).float()
        state = CorrectionState(
            self.long_run.learn(state.long_run, answers, experts, window),
            state.spread.add(answers, usual, has_past, window),
            state.clump.add(answers, window),
            state.recent.add(answers, usual, has_past, window),
        )
        variance, (mix, _) = state.spread.variance(), self.long_run.mixes(state.long_run)
        of_bias = self.variance_of_bias(variance, mix)
        probable, rho = state.clump.correlation(variance, mix, of_bias)
        strength = state.recent.strength(variance, mix, of_bias)
        return MixEvidence(probable * (window.images > MORE_THAN_ONE), rho, strength, state.recent.answers), state

    def variance_of_bias(self, variance: Tensor, mix: Tensor) -> Tensor:
        """Squared shift [] of a batch's mean answer that a bias common to its images explains.

        A shift of log-odds moves an answer p by p (1 - p), whose mean follows from the answers' variance and mix [C].
        """
        return self.batch_bias**2 * (mix * (1 - mix) - variance).clamp_min(0.0).square().sum()

    def apply(
        self, evidence: MixEvidence, answers: Sequence[tuple[LongRunState, Tensor]], window: FadingWindow
    ) -> Tensor:
        """Corrected answers [S,B,C] for several [B,C] to the same batch, each with the long run of such answers."""
        mixes = [self.long_run.mixes(state) for state, _ in answers]
        assumed, expected = (torch.stack([pair[place] for pair in mixes]) for place in (0, 1))
        joint = torch.stack([own for _, own in answers])
        expected = (evidence.strength * expected + evidence.recent) / (evidence.strength + evidence.recent.sum())
        present = (window.shares > 0).float()
        together = neighbours.answers_in_batch(joint, assumed, expected, 1 / evidence.rho - 1, present)
        alone = class_mix.reweighted(joint, expected[:, None], assumed[:, None])
        return evidence.probable * together + (1 - evidence.probable) * alone

    def correct_all(
        self,
        state: CorrectionState,
        answers: Tensor,
        experts: Tensor | None,
        other: tuple[LongRunState, Tensor] | None,
        window: FadingWindow,
        *,
        fused: bool = False,
    ) -> tuple[Tensor, LongRunState, CorrectionState]:
        """Corrected answers [S,B,C] for a batch's [B,C], the last set's long run, and the state.

        `experts` [K,B,C]: where they were asked. `other`: another set of answers [B,C] to the same batch, with a long
        run of its own. `fused`: in one kernel, where it can run.
        """
        if fused and experts is None and self.long_run.anchor == 0 and fused_correction.can_run(answers):
            return fused_correction.corrected(self, state, answers, other, window)
        evidence, state = self.learn(state, answers, experts, window)
        sets = [(state.long_run, answers)]
        if other is not None:
            sets.append((self.long_run.learn(*other, None, window), other[1]))
        corrected = self.apply(evidence, sets, window)
        return corrected, sets[-1][0], state.remember(corrected[0], window)
