"""Entropy-adaptive merging with a head that is fitted to the stream and its mix of classes: docs/prior_adaptive.md."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from mergestream.functional import class_mix, merging
from mergestream.methods.base import ExpertLogits
from mergestream.methods.choices import resolve_home, resolve_tilt, resolve_untilted_home
from mergestream.methods.entropy_adaptive import EntropyAdaptive
from mergestream.methods.fitted_head import FittedHead, said_together
from mergestream.methods.restoring import even_heads, head_bias, last_layers, restored
from mergestream.methods.step import Step
from mergestream.networks.views import ORIGINAL
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import NetworkError
from mergestream.runtime.log_once import log_once
from mergestream.runtime.option_checks import number, yes_or_no

_log = logging.getLogger(__name__)
# What a stream is thought to be before its first batch: so many batches, whose mixes have this concentration.
BATCHES_BEFORE, CONCENTRATION_BEFORE = 4.0, 100.0
MORE_THAN_ONE = 1.5
NEAR = 0.05  # of the largest logit: what a half type may round in a last layer


class PriorAdaptive(EntropyAdaptive):
    """Coefficients by entropy, as the paper's; the head says what the experts say, its bias follows the classes' mix.

    Heads that started apart have no useful mean, so the last layer is fitted to the experts' answers. A merged model on
    a foreign site prefers some classes: what it says in the long run is compared with what experts say at home, and
    each batch with the long run; how far a batch may depart is learnt from the batches themselves.

    anchor        how far the long-run mix is taken back to the experts' home: 0 not at all, 1 wholly
    home          that mix: 'card' (from the experts' cards), 'uniform', or a share per class
    memory        how many images the long run is; older ones fade
    before        how many images of the home mix the long run starts with
    untilt        experts of a class-weighted loss: weights are taken off before answers are compared with the home mix
    even_heads    a head three times as large as the pool's median, or a third, is brought to it
    refit         the last layer is fitted to what the experts said of the stream's images and their views; where a
                  network does not end in a linear layer, it is not
    refit_before  for how many images the merged layer itself counts in that
    match_scale   merged logits are brought to the experts' spread over images, both over the long run
    restore       encoders' changes are scaled up by what merging heads of different directions loses (needs a base)
    score         'entropy_agreement' doubts an expert that is certain and alone; others as of entropy_adaptive
    """

    name: ClassVar[str] = "prior_adaptive"
    revision: ClassVar[int] = 3
    portable: ClassVar[bool] = False
    _counts: Tensor  # the merged model's mean probabilities, summed over faded images [C]
    _untilted: Tensor  # the same with the weights of losses taken off, where there are any [C]
    _images: Tensor  # and how many those are []
    _clumped: Tensor  # how clumped batches were, summed over faded batches []
    _clumps: Tensor  # and how many those are []
    _heard: bool  # whether experts were asked about the batch under way
    _said: Tensor  # what they said of it together [B,C]
    _own_moments: Tensor  # of the merged model's logits, summed over faded images [1,C+2]
    _expert_moments: Tensor  # of each expert's, over the same images [K,C+2]

    def __init__(
        self,
        pool: ExpertPool,
        *,
        temperature: float | Sequence[float] | str = "card",
        encoder: str = "adaptive",
        head: str = "shared",
        head_sharpness: float = 1.0,
        momentum: float = 0.0,
        score: str = "entropy_agreement",
        views: Sequence[str] = ("hflip",),
        recalibrate_bn: bool = False,
        refresh_every: int = 1,
        anchor: float = 1.0,
        home: str | Sequence[float] = "card",
        memory: float = 4096,
        before: float = 32,
        untilt: bool = True,
        even_heads: bool = True,
        refit: bool = True,
        refit_before: float = 32,
        match_scale: bool = True,
        restore: bool = False,
    ) -> None:
        self.anchor = number("anchor", anchor, low=0, high=1)
        self.memory = number("memory", memory, low=1)
        self.before = number("before", before, above=0)
        self.home, self._home = home, class_mix.as_mix(resolve_home(home, pool))
        self.untilt = yes_or_no("untilt", untilt)
        self._tilt = resolve_tilt(home, pool) if self.untilt else None
        self._untilted_home = class_mix.as_mix(resolve_untilted_home(home, pool))
        self.even_heads = yes_or_no("even_heads", even_heads)
        self.refit = yes_or_no("refit", refit)
        self.refit_before = number("refit_before", refit_before, above=0)
        self.match_scale = yes_or_no("match_scale", match_scale)
        self._fitted, self._proven = self._fitted_head(pool) if self.refit else None, False
        self.restore = yes_or_no("restore", restore)
        super().__init__(
            pool,
            temperature=temperature,
            encoder=encoder,
            head=head,
            head_sharpness=head_sharpness,
            momentum=momentum,
            score=score,
            views=views,
            recalibrate_bn=recalibrate_bn,
            refresh_every=refresh_every,
        )
        self._prepare_rows(pool)

    def _fitted_head(self, pool: ExpertPool) -> FittedHead | None:
        if pool.last_layer is not None:
            return FittedHead(pool.last_layer, self.refit_before, pool.device)
        self._tell_that_none_is_fitted(pool)
        return None

    def _tell_that_none_is_fitted(self, pool: ExpertPool) -> None:
        told = f"'{self.name}' fits no head: {pool.template.architecture} does not end in one linear layer with a bias."
        log_once(_log, logging.WARNING, told)

    def _prepare_rows(self, pool: ExpertPool) -> None:
        """Rows that are merged in place of the experts' own, and what their scores are divided by."""
        rows = pool.rows
        self._evened = torch.ones(len(pool), device=pool.device)  # what each expert's head was multiplied by
        if self.even_heads:
            rows, self._evened = even_heads(pool)
            self._temperature = self._temperature / self._evened
        self._own_rows, self._restored = restored(pool, rows) if self.restore else (rows, 1.0)
        self._of_base = torch.tensor([1 - self._restored], device=pool.device)  # not sent there at every step

    def _step(self, images: Tensor, expert_logits: ExpertLogits) -> Step:
        step = super()._step(images, expert_logits)
        logits = self._scaled(step.logits) if self.match_scale else step.logits
        self._heard = False
        shift = self._follow(logits)
        return replace(step, logits=logits + shift, class_shift=shift)

    def merged_weights(self) -> Tensor:
        """The merged weights [P] that answered the last batch, its scale and shift in the last layer: a copy."""
        weights = super().merged_weights().clone()
        scale, last = self._scale if self.match_scale else 1.0, self.pool.last_layer
        if last is not None:
            weight, bias = last.of_weights(weights) if self._fitted is None else self._fitted.layer(weights)
            last.write(weights, scale * weight, scale * bias + self._shift)
            return weights
        for layer in last_layers(self.pool):
            weights[layer] = (scale * weights[layer].float()).to(weights.dtype)
        place = head_bias(self.pool)
        if place is not None:
            weights[place] += self._shift.to(weights.dtype)
        return weights

    def _merge(self) -> None:
        encoder = self._encoder
        if self._restored != 1:
            encoder = torch.cat([self._restored * encoder, self._of_base])
        merging.merge(self._own_rows, encoder, self._head, self._weights)

    def _hear_experts(self, logits: Mapping[str, Tensor]) -> None:
        self._heard = True
        if self.match_scale:
            calibrated = logits[ORIGINAL].float() / self._temperature[:, None, None]
            self._expert_moments = self._moved_on(self._expert_moments, calibrated)
        if self._fitted is not None:
            views = torch.stack([logits[view].float() for view in (ORIGINAL, *self.views)])
            self._said = said_together(views, self._encoder * self._evened)

    def _answer(self, images: Tensor) -> Tensor:
        if self._fitted is None:
            return super()._answer(images)
        if not self._proven and not self._writes_the_logits(images):
            self._tell_that_none_is_fitted(self.pool)
            self._fitted = None
            return super()._answer(images)
        self._proven = True
        _, inputs = self.pool.forward_with_inputs(self._weights, images, recalibrate_bn=self.recalibrate_bn)
        if self._heard:
            self._fitted.learn(inputs, self._said, *self._window(inputs))
        return self._fitted.answer(self._weights, inputs)

    def _scaled(self, logits: Tensor) -> Tensor:
        """The merged model's logits at the experts' scale; what that is, batches tell that experts were asked of."""
        if self._heard:
            self._own_moments = self._moved_on(self._own_moments, logits[None])
        self._scale = class_mix.scale_between(self._own_moments, self._expert_moments)
        return logits * self._scale

    def _writes_the_logits(self, images: Tensor) -> bool:
        """Whether the network's answers are what its last layer writes: asked once, of the first batch."""
        assert self.pool.last_layer is not None
        try:
            logits, inputs = self.pool.forward_with_inputs(self._weights, images)
        except NetworkError:
            return False
        weight, bias = self.pool.last_layer.of_weights(self._weights)
        return bool((inputs @ weight.T + bias - logits).abs().amax() <= NEAR * logits.abs().amax())

    def _moved_on(self, moments: Tensor, logits: Tensor) -> Tensor:
        """Moments [n,C+2] that have faded a little, with those of a batch [n,B,C]."""
        shares, images, faded = self._window(logits[0])
        return faded * moments + images * class_mix.moments(logits, shares)

    def _window(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What each image of a batch counts [B], how many images that are [], and what is kept of older ones []."""
        shares = class_mix.counted(self._shares, logits)
        images = 1 / (shares**2).sum()
        return shares, images, torch.exp(-images / self.memory)

    def _follow(self, logits: Tensor) -> Tensor:
        """Learn from the batch, then the shift [C] of its log-odds."""
        probabilities = torch.softmax(logits, dim=-1)
        shares, images, faded = self._window(logits)
        tells = (self._images > 0) & (images > MORE_THAN_ONE)  # the first batch has nothing to depart from
        usual = class_mix.as_mix(torch.where(self._images > 0, self._counts, self._home))
        told = torch.where(tells, class_mix.clumped(probabilities, usual, shares), 0.0)
        self._clumped, self._clumps = faded * self._clumped + told, faded * self._clumps + tells
        self._counts = faded * self._counts + images * (probabilities * shares[:, None]).sum(dim=0)
        if self._tilt is not None:
            untilted = torch.softmax(logits + self._tilt, dim=-1)
            self._untilted = faded * self._untilted + images * (untilted * shares[:, None]).sum(dim=0)
        self._images = faded * self._images + images
        assumed = class_mix.as_mix(self._counts + self.before * self._home)
        expected = class_mix.between(assumed, self._at_home(assumed), self.anchor)
        before = BATCHES_BEFORE / (1 + CONCENTRATION_BEFORE)
        clumping = (self._clumped + before) / (self._clumps + BATCHES_BEFORE)
        mix = class_mix.mix_of_batch(probabilities, assumed, expected, class_mix.concentration(clumping), shares)
        self._shift = mix.log() - assumed.log()
        return self._shift

    def _at_home(self, assumed: Tensor) -> Tensor:
        """The mix [C] that the model would answer with in the long run if the classes were mixed as at home.

        A weighted loss makes the answers' mean move towards even shares the less a model knows, so it can be compared
        with home only once the weights are taken off; the ratio that is found there holds for the answers as they are.
        """
        if self._tilt is None:
            return self._home
        usual = class_mix.as_mix(self._untilted + self.before * self._untilted_home)
        return class_mix.as_mix(assumed * self._untilted_home / usual)

    def _sources(self) -> dict[str, str | None]:
        told = {"home": _as_json(self._home)}
        if self._tilt is not None:
            told |= {"tilt": _as_json(self._tilt), "untilted_home": _as_json(self._untilted_home)}
        return {**super()._sources(), **told, "base": self.pool.base_fingerprint() if self.restore else None}

    def _carried(self) -> dict[str, Tensor]:
        return {**super()._carried(), **self._learnt()}

    def _learnt(self) -> dict[str, Tensor]:
        counts = {"counts": self._counts, "images": self._images}
        counts |= {} if self._tilt is None else {"untilted": self._untilted}
        learnt = {**counts, "clumped": self._clumped, "clumps": self._clumps, "shift": self._shift}
        learnt |= {} if self._fitted is None else self._fitted.tensors()
        scale = {"own_moments": self._own_moments, "expert_moments": self._expert_moments, "scale": self._scale}
        return {**learnt, **scale} if self.match_scale else learnt

    def _carry(self, tensors: Mapping[str, Tensor]) -> None:
        super()._carry(tensors)
        self._counts, self._images = tensors["counts"], tensors["images"]
        self._clumped, self._clumps = tensors["clumped"], tensors["clumps"]
        self._shift = tensors["shift"]
        if self._tilt is not None:
            self._untilted = tensors["untilted"]
        if self._fitted is not None:
            self._fitted.take(tensors)
        if self.match_scale:
            self._own_moments, self._expert_moments = tensors["own_moments"], tensors["expert_moments"]
            self._scale = tensors["scale"]

    def _state(self) -> dict[str, Any]:
        return {**super()._state(), **{name: tensor.clone() for name, tensor in self._learnt().items()}}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        device, nothing = self.pool.device, torch.zeros(())
        classes = torch.zeros(len(self.pool.classes))
        self._counts = state.get("counts", classes).to(device)
        self._untilted = state.get("untilted", classes).to(device)
        self._images = state.get("images", nothing).to(device)
        self._clumped = state.get("clumped", nothing).to(device)
        self._clumps = state.get("clumps", nothing).to(device)
        self._shift = state.get("shift", classes).to(device)
        experts, width = len(self.pool), len(self.pool.classes) + 2
        self._own_moments = state.get("own_moments", torch.zeros(1, width)).to(device)
        self._expert_moments = state.get("expert_moments", torch.zeros(experts, width)).to(device)
        self._scale = state.get("scale", torch.ones(())).to(device)
        if self._fitted is not None:
            self._fitted.take(state)
        self._heard = False


def _as_json(values: Tensor) -> str:
    return json.dumps([round(value, 6) for value in values.tolist()])
