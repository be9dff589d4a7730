"""HostPool: a pool whose experts stay in pinned host memory and pass through the device one after the other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mergestream.functional import merging
from mergestream.functional.coefficients import on_simplex
from mergestream.functional.scores import require_finite
from mergestream.networks.architecture import logits_of
from mergestream.networks.views import ORIGINAL, VIEWS, require_known
from mergestream.pool.construction import Device, Parts
from mergestream.pool.execution import Execution
from mergestream.pool.expert_pool import Coefficients, ExpertPool
from mergestream.pool.staging import STREAMED, HostRows, RunningSum, Staging, pinned, present, refuse
from mergestream.runtime.errors import InputError, NetworkError


class HostPool(ExpertPool):
    """`bank` [K,P] lies on the host, `device` is where it computes: two staged rows and what is merged lie there.

    Build one with `load` or `of`. A step reads every row at most twice: once to score it, once to merge it.
    """

    def __init__(
        self,
        parts: Parts,
        read_candidates: Callable[[], ExpertPool | None] = lambda: None,
        device: Device = "cuda",
    ) -> None:
        self._computes_on = present(device)
        super().__init__(parts, read_candidates)
        self._pages = pinned(self.bank) if self.device.type == "cuda" else None

    @classmethod
    def of(cls, pool: ExpertPool, device: Device = "cuda", dtype: torch.dtype | None = None) -> HostPool:
        """The same experts, computed on `device`; a bank that is on the host in this type already is shared."""
        if not isinstance(pool, ExpertPool):
            raise InputError(f"A HostPool is made of an ExpertPool, got {type(pool).__name__}.")
        there = present(device)
        parts = pool.to("cpu", dtype)._parts
        return cls(parts, partial(_hosted, pool._read_candidates, there, dtype), there)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        network: nn.Module | None = None,
        device: Device = "cuda",
        dtype: torch.dtype | None = None,
    ) -> HostPool:
        """As `ExpertPool.load`; weights stream straight into the bank on the host, which is then pinned in place."""
        there = present(device)
        return cls.of(ExpertPool.load(folder, network=network, device="cpu", dtype=dtype), there)

    # --- what it is ---------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self._computes_on

    @property
    def execution(self) -> Execution:
        return self._execution

    @execution.setter
    def execution(self, wanted: Execution) -> None:
        # Which rows a step copies is decided on the host, and a graph would freeze it.
        self._execution = replace(wanted, capture=False)

    @property
    def copies(self) -> int:
        """How many rows went over the bus so far."""
        return self._staging.copies

    def __repr__(self) -> str:
        return f"HostPool on {self.device} of {super().__repr__()}"

    def to(
        self, device: Device | None = None, dtype: torch.dtype | None = None, *, execution: Execution | None = None
    ) -> ExpertPool:
        """The pool computed on another device or in another floating type; the bank stays on the host."""
        there = self.device if device is None else present(device)
        moved = super().to("cpu", dtype, execution=execution)
        pool = HostPool(moved._parts, moved._read_candidates, there)
        pool.execution = moved.execution
        return pool

    def _with(self, read_candidates: Callable[[], ExpertPool | None] | None = None, **changes: Any) -> ExpertPool:
        changed = super()._with(read_candidates, **changes)
        pool = HostPool(changed._parts, changed._read_candidates, self.device)
        pool.execution = changed.execution
        return pool

    def admit(self, method: str) -> None:
        """Refuse a method that needs all experts' weights on the device at once."""
        if method not in STREAMED:
            refuse(self.bank, f"'{method}'")

    # --- what it does -------------------------------------------------------------------------------------

    def logits(self, images: Tensor, view: str | None = None) -> Tensor:
        batch = self.prepare(images)
        name = ORIGINAL if view is None else view
        return self._answers(range(len(self)), self._shown(batch, (name,)))[name]

    def logits_of_views(self, images: Tensor, views: Sequence[str]) -> dict[str, Tensor]:
        """As the pool's; the batch and its views pass while an expert is on the device, so that it comes once."""
        return self._answers(range(len(self)), self._shown(self.prepare(images), (ORIGINAL, *views)))

    def expert_logits(self, expert: int, images: Tensor) -> Tensor:
        batches = {ORIGINAL: self.prepare(images)}
        return self._answers([range(len(self))[expert]], batches)[ORIGINAL][0]

    def expert(self, expert: int) -> nn.Module:
        """One expert as a frozen module on the device, with a copy of its weights."""
        with torch.inference_mode(False):
            return self._attached_to(self.bank[expert].to(self.device, copy=True), range(len(self))[expert])

    @cached_property
    def rows(self) -> merging.Rows:
        """The bank on the host, for `merge`; what needs all experts' numbers on the device is refused."""
        return HostRows(self.bank, self.layout.encoder_size, self.device)

    def merge(
        self,
        encoder: Coefficients,
        head: Coefficients | None = None,
        out: Tensor | None = None,
        *,
        rows: merging.Rows | None = None,
    ) -> Tensor:
        """As the pool's, row after row; one that neither segment has a share of is not copied to the device."""
        rows = self.rows if rows is None else rows
        if rows.encoder is not self.rows.encoder:
            return super().merge(encoder, head, out, rows=rows)
        a = on_simplex(encoder, len(self))
        h = a if head is None else on_simplex(head, len(self))
        out, border = self.new_weights() if out is None else out, self.layout.encoder_size
        if isinstance(rows, HostRows):
            self._add_up([(out[:border], slice(0, border), a), (out[border:], slice(border, None), h)])
        else:  # heads of the method's own, on the device
            self._add_up([(out[:border], slice(0, border), a)])
            merging.weighted_sum(rows.head, h.to(self.device), out[border:])
        return out

    def matrices(self, row: Tensor, prefix: str = "") -> dict[str, Tensor]:
        """As the pool's, of a row on the device; what is watched in a network are the weights that it computes with."""
        if row.untyped_storage().data_ptr() == self.bank.untyped_storage().data_ptr():
            refuse(self.bank, "What measures experts on images")
        return super().matrices(row, prefix)

    # --- how ----------------------------------------------------------------------------------------------

    @cached_property
    def _staging(self) -> Staging:
        return Staging(self.bank, self.device)

    @cached_property
    def _slots(self) -> list[nn.Module]:
        """A module for each staged row, whose parameters are views of it."""
        with torch.inference_mode(False):
            return [self._attached_to(row, 0) for row in self._staging.rows]

    @cached_property
    def _integers(self) -> list[dict[str, Tensor]]:
        return [{name: tensor.to(self.device) for name, tensor in own.items()} for own in self._parts.integers]

    def _attached_to(self, row: Tensor, expert: int) -> nn.Module:
        return self.layout.attach(copy.deepcopy(self.template.module), row, self._parts.integers[expert]).eval()

    def _shown(self, batch: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
        require_known(tuple(name for name in names if name != ORIGINAL))
        return {name: batch if name == ORIGINAL else VIEWS[name](batch, self.preprocessing) for name in names}

    def _answers(self, experts: Sequence[int], batches: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Logits [K,B,C] in fp32 of some experts, by the batch's name; looked at once, after the last of them."""

        def answer(expert: int, slot: int) -> Tensor:
            module = self._slots[slot]
            for name, value in self._integers[expert].items():
                module.get_buffer(name).copy_(value)
            return torch.stack(self._forward_each(module, list(batches.values())))

        logits = torch.stack(self._staging.map(experts, answer), dim=1)  # [V,K,B,C]
        if not bool(torch.isfinite(logits).all()):
            for view in logits:
                for expert, own in zip(experts, view, strict=True):
                    require_finite(own, f"Expert '{self.names[expert]}'")
        return dict(zip(batches, logits, strict=True))

    def _forward_each(self, module: nn.Module, batches: list[Tensor]) -> list[Tensor]:
        # As one batch there are fewer launches; the CPU has none to save, and keeps the bits of the pool's own logits.
        shown = batches if self.device.type == "cpu" else [torch.cat(batches)]
        found = []
        for batch in shown:
            with self.input_errors(batch):
                logits = logits_of(module(batch))
            if logits.shape != (len(batch), len(self.classes)):
                raise NetworkError(f"Expected logits [{len(batch)},{len(self.classes)}], got {tuple(logits.shape)}.")
            found.append(logits.float())
        return found if len(found) == len(batches) else list(found[0].chunk(len(batches)))

    def _add_up(self, parts: Sequence[tuple[Tensor, slice, Tensor]]) -> None:
        """Each part's span of the rows, summed by its coefficients [K] into its place."""
        sums = [RunningSum(out, self.bank.dtype) for out, _, _ in parts]
        shares = [coefficients.tolist() for _, _, coefficients in parts]

        def add(expert: int, slot: int) -> None:
            for total, (_, span, _), own in zip(sums, parts, shares, strict=True):
                total.add(self._staging.rows[slot][span], own[expert])

        self._staging.map([k for k in range(len(self)) if any(own[k] != 0 for own in shares)], add)
        for total in sums:
            total.finish()


def _hosted(read: Callable[[], ExpertPool | None], device: torch.device, dtype: torch.dtype | None) -> HostPool | None:
    runs = read()
    return None if runs is None else HostPool.of(runs, device, dtype)
