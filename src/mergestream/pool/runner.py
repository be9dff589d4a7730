"""PoolRunner: how a pool's experts and the networks merged from them run on a batch."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from mergestream.functional import merging
from mergestream.functional.coefficients import on_simplex
from mergestream.functional.scores import require_finite
from mergestream.networks.architecture import logits_of
from mergestream.networks.batch_checks import input_errors, require_preprocessed
from mergestream.networks.layers import LastLayer, one_per_image, reestimate
from mergestream.networks.preprocessing import ORIGINAL, network_input, view_names, views_for
from mergestream.pool.execution import Execution, Recording, memory_format, patches_as_products
from mergestream.pool.parts import Parts
from mergestream.pool.pixel_kernel import looked_up
from mergestream.runtime.errors import NetworkError

MERGED = "The merged model"
Coefficients = Sequence[float] | Tensor
ExpertLogits = Mapping[str, Tensor]  # [K,B,C] by the name of the view, the unaltered batch as ORIGINAL


@dataclass
class Batch:
    """Prepared images [B,c,H,W], and the experts' logits [K,B,C] on them by view, as far as they are computed."""

    images: Tensor
    expert_logits: dict[str, Tensor] = field(default_factory=dict)
    shares: Tensor | None = None  # [B] what each image counts where the batch is padded; of 1 in all, padding 0
    given: set[str] = field(default_factory=set)  # views whose logits came with the batch and are not used yet

    def first(self, count: int) -> "Batch":
        """The first images as a batch of their own, with what is computed about them."""
        if count >= len(self.images):
            return self
        logits = {view: values[:, :count] for view, values in self.expert_logits.items()}
        shares = None if self.shares is None else self.shares[:count] / self.shares[:count].sum()
        return Batch(self.images[:count], logits, shares, {*self.given})


class PoolRunner:
    """Expert logits, merges and forward passes over one contiguous bank [K,P]: encoder segment, then head."""

    def __init__(self, parts: Parts, execution: Execution | None = None) -> None:
        self._parts = parts
        self._recording: Recording | None = None
        self._attached: Tensor | None = None
        # How many images have passed through an expert, through a merged model, and backwards through either.
        self.passes = {"expert": 0, "merged": 0, "backward": 0}
        self.execution = execution or Execution()
        self.bank, self.template, self.layout = parts.bank, parts.network, parts.layout
        self.device, self.preprocessing = parts.bank.device, parts.network.preprocessing
        self._views = views_for(self.preprocessing)
        self.names, self.classes = tuple(card.name for card in parts.cards), parts.cards[0].classes
        self.integers = parts.integers
        self.merged_integers = merging.merge_integers(parts.integers)
        self.layout.move_rest(self.layout.strip(self.template.module), self.device, self.bank.dtype)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def rows(self) -> merging.Rows:
        """The bank as encoder [K,E] and head [K,H]."""
        return merging.Rows.of(self.bank, self.layout.encoder_size)

    # --- logits -------------------------------------------------------------------------------------------

    def prepare(self, images: Tensor, *, preprocessed: bool = False) -> Tensor:
        """Turn a batch into network input: resize and normalise uint8 of any size, pass preprocessed floats through."""
        if self._recording and (fast := looked_up(images, self.preprocessing, self.bank.dtype)) is not None:
            return fast
        batch = network_input(images, self.preprocessing, self.device)
        if batch is images and not preprocessed and self._recording is None:
            require_preprocessed(images, self.preprocessing)
        return batch.to(self.device, self.bank.dtype).contiguous(memory_format=self._memory_format)

    def logits(self, images: Tensor, view: str | None = None, *, preprocessed: bool = False) -> Tensor:
        """Every expert's logits [K,B,C] in fp32, of the batch or of a named view of it."""
        view = ORIGINAL if view is None else view_names("view", (view,))[0]
        return self.logits_of_views(Batch(self.prepare(images, preprocessed=preprocessed)), (view,))[view]

    def logits_of_views(self, batch: Batch, views: Sequence[str] = (ORIGINAL,)) -> dict[str, Tensor]:
        """Every expert's logits [K,B,C] of views of a batch, which is a view itself ('original').

        They are computed when first needed and stay with the batch.
        """
        answers, inputs = batch.expert_logits, {}
        for view in views:
            if view not in answers:
                inputs[view] = batch.images if view == ORIGINAL else self._views[view](batch.images)
            elif view in batch.given:  # the experts were run for it elsewhere
                batch.given.remove(view)
                self.passes["expert"] += len(self.names) * len(batch.images)
        if inputs and self._recording is not None:  # one forward per expert: larger products, fewer launches
            stacked = torch.cat(list(inputs.values()))
            networks = zip(self._owners, self._scorers, strict=True)
            tasks = [partial(self._run, *network, stacked, len(inputs)) for network in networks]
            logits = torch.stack(self._recording.side_by_side(tasks, self.device))
            answers.update(zip(inputs, logits.chunk(len(inputs), dim=1), strict=True))
            return answers
        for view, images in inputs.items():
            answers[view] = torch.stack(list(map(self._run, self._owners, self._scorers, repeat(images))))
        return answers

    def expert_logits(self, expert: int, images: Tensor, *, preprocessed: bool = False) -> Tensor:
        """One expert's logits [B,C] in fp32."""
        return self._run(self._owners[expert], self._experts[expert], self.prepare(images, preprocessed=preprocessed))

    def forward(self, weights: Tensor, images: Tensor, *, recalibrate_bn: bool = False) -> Tensor:
        """Logits [B,C] in fp32 of the network whose flat weights [P] are given.

        `recalibrate_bn` first overwrites the BatchNorm statistics inside `weights` with this batch's.
        """
        is_prepared = images.dtype == self.bank.dtype and images.device == self.device
        batch = images if is_prepared else self.prepare(images, preprocessed=True)
        if self._attached is not weights:
            self.module_with(weights)
        if recalibrate_bn:
            with self.input_errors(batch):
                self.passes["merged"] += len(batch) * reestimate(self._working, batch)
        return self._run(MERGED, self._working, batch)

    def logits_with(
        self, parameters: Mapping[str, Tensor], batch: Tensor, *, expert: int | None = None, images: int | None = None
    ) -> Tensor:
        """Logits [B,C] of an expert or the merged model with other parameters, through which gradients flow.

        `images`: how many the batch stands for, where a function of one image is vectorised.
        """
        self.passes["merged" if expert is None else "expert"] += images or len(batch)
        module = self._working if expert is None else self._experts[expert]
        return logits_of(self.layout.call(module, parameters, batch))

    def forward_with_inputs(
        self, weights: Tensor, images: Tensor, *, recalibrate_bn: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Logits [B,C] as from `forward`, and the last layer's input [B,D], in fp32."""
        with self._require_last_layer().recorded_inputs(self.module_with(weights)) as inputs:
            logits = self.forward(weights, images, recalibrate_bn=recalibrate_bn)
        return logits, one_per_image(inputs[-1], len(logits))

    @contextmanager
    def merged_inputs(self, batch: Batch) -> Iterator[list[Tensor]]:
        """Collect the last layer's inputs [B,D], in fp32, of every pass of a batch through a merged model."""
        features: list[Tensor] = []
        with self._require_last_layer().recorded_inputs(self._working, batch.images) as inputs:
            yield features
        features += [one_per_image(each, len(batch.images)) for each in inputs]

    def _require_last_layer(self) -> LastLayer:
        if self.last_layer is None:
            raise NetworkError(f"{self.template.architecture} does not end in one linear layer with a bias.")
        return self.last_layer

    @cached_property
    def last_layer(self) -> LastLayer | None:
        """The linear layer that writes the logits; None where the network does not end in one."""
        return LastLayer.of(self.template.module, self.template.head, self.layout, len(self.classes))

    @property
    def is_recording(self) -> bool:
        """Whether a step is being recorded: nothing may be read back from the device."""
        return self._recording is not None

    def side_by_side(self, first: Callable[[], Any], second: Callable[[], Any]) -> tuple[Any, Any]:
        """Run two tasks, neither of which needs the other: in a recorded step beside each other on the device."""
        return self._recording.both(first, second, self.device) if self._recording else (first(), second())

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Read nothing back to the host inside the block; note on the device what an eager step would refuse."""
        self._recording = Recording(self.execution)
        try:
            with ExitStack() as fast:
                if self.execution.capture:
                    from mergestream.pool.fused_blocks import fused_blocks  # it needs timm

                    modules = [self._working, *self._scorers]
                    fast.enter_context(patches_as_products(modules))
                    fast.enter_context(fused_blocks(modules))
                yield self._recording
        finally:
            self._recording = None

    # --- merged weights -----------------------------------------------------------------------------------

    def new_weights(self) -> Tensor:
        """An unfilled vector [P] to merge into, usable inside and outside inference mode."""
        with torch.inference_mode(False):
            return torch.empty(self.layout.size, dtype=self.bank.dtype, device=self.device)

    def merge(
        self,
        encoder: Coefficients,
        head: Coefficients | None = None,
        out: Tensor | None = None,
        *,
        rows: merging.Rows | None = None,
    ) -> Tensor:
        """Merge weights [P] (Eq. 7): the encoder by `encoder` [K], the head by `head` [K] or the same.

        `rows` replace the experts' own where a method changes them first.
        """
        a = self._checked(encoder)
        h = a if head is None else self._checked(head)
        return merging.merge(rows or self.rows, a, h, self.new_weights() if out is None else out)

    def network(self, encoder: Coefficients, head: Coefficients | None = None) -> nn.Module:
        """Build an ordinary frozen module with merged weights of its own, in eval mode."""
        return self.network_with(self.merge(encoder, head))

    def network_with(self, weights: Tensor) -> nn.Module:
        """Build an ordinary frozen module with a copy of flat weights [P], in eval mode."""
        module = copy.deepcopy(self.template.module)
        return self.layout.attach(module, weights.clone(), self.merged_integers).eval()

    def module_with(self, weights: Tensor) -> nn.Module:
        """The pool's one working module, its parameters views of `weights` [P]."""
        if self._attached is not weights:
            self.layout.attach(self._working, weights, self.merged_integers)
            self._attached = weights
        return self._working

    def expert(self, expert: int) -> nn.Module:
        """One expert as a frozen module whose parameters are views of the bank."""
        return self._experts[expert]

    def matrices(self, row: Tensor, prefix: str = "") -> dict[str, Tensor]:
        """Parameters that may be the weight of a linear map or a convolution, by name, as views of a row [P]."""
        names = {e.name for e in self.layout.parameters if len(e.shape) > 1 and e.name.startswith(prefix)}
        return {name: view for name, view in self.layout.views(row).items() if name in names}

    # --- inside -------------------------------------------------------------------------------------------

    def input_errors(self, batch: Tensor) -> AbstractContextManager[None]:
        """Report a network's failure on a batch as an error about the batch."""
        return input_errors(batch, self.preprocessing)

    @cached_property
    def _working(self) -> nn.Module:
        return copy.deepcopy(self.template.module).eval()

    @cached_property
    def _experts(self) -> list[nn.Module]:
        return self._modules_of(self.bank)

    def _modules_of(self, bank: Tensor) -> list[nn.Module]:
        rows = zip(bank, self.integers, strict=True)
        return [self.layout.attach(copy.deepcopy(self.template.module), *row).eval() for row in rows]

    @cached_property
    def _scorers(self) -> list[nn.Module]:  # as they answer whole batches
        if not self.execution.narrow_scores:
            return self._experts
        from mergestream.pool.fused_blocks import narrowed

        narrow = self._modules_of(self.bank.bfloat16())
        form = memory_format(narrow[0].bfloat16(), self.bank[:, :0].bfloat16(), self.preprocessing)
        return [narrowed(each, form) for each in narrow]

    @cached_property
    def _memory_format(self) -> torch.memory_format:
        return memory_format(self._experts[0], self.bank, self.preprocessing)

    def _checked(self, coefficients: Coefficients) -> Tensor:
        if self._recording is not None and isinstance(coefficients, Tensor):
            return coefficients
        return on_simplex(coefficients, len(self), self.device)

    @cached_property
    def _owners(self) -> list[str]:
        return [f"Expert '{name}'" for name in self.names]

    def _run(self, owner: str, module: nn.Module, batch: Tensor, views: int = 1) -> Tensor:
        """A network's logits [B,C] in fp32; what is not finite is refused, or noted where a step is recorded.

        `views`: how many views of the same images the batch holds, one after the other.
        """
        self.passes["merged" if owner is MERGED else "expert"] += len(batch)
        try:
            output = module(batch)
        except (AssertionError, RuntimeError, ValueError):
            with self.input_errors(batch):
                raise
        logits = (output if isinstance(output, Tensor) else logits_of(output)).float()
        if logits.shape != (len(batch), len(self.classes)):
            raise NetworkError(f"Expected logits [{len(batch)},{len(self.classes)}], got {tuple(logits.shape)}.")
        if self._recording is not None:
            self._recording.note(owner, logits.unflatten(0, (views, -1)))
            return logits
        return logits if bool(torch.isfinite(logits).all()) else require_finite(logits, owner)
