"""ExpertPool: the ordered experts in one contiguous [K,P] bank; their logits, and networks merged from them."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mergestream.functional import merging
from mergestream.functional.coefficients import on_simplex
from mergestream.functional.scores import finite_images, require_finite
from mergestream.networks.architecture import logits_of
from mergestream.networks.batchnorm import reestimate
from mergestream.networks.flat_layout import Integers
from mergestream.networks.last_layer import LastLayer
from mergestream.networks.preprocessing import Preprocessing, require_batch
from mergestream.networks.views import ORIGINAL, VIEWS, require_known
from mergestream.pool.bank import holds_only_a_pool, write_order
from mergestream.pool.checkpoint import BASE, write_expert
from mergestream.pool.construction import Device, Parts, parts_of_modules, parts_of_states, read_parts
from mergestream.pool.execution import Execution, Recording, patches_as_products
from mergestream.pool.fused_blocks import fused_blocks
from mergestream.pool.statistics import Statistics, write_statistics
from mergestream.runtime.errors import InputError, MergestreamError, NetworkError, PoolError, unknown_name
from mergestream.runtime.files import folder_written_whole

Coefficients = Sequence[float] | Tensor
# What a site may say of its expert after it was built.
DETAILS = ("domain", "class_counts", "metrics", "recipe", "temperature")


class ExpertPool:
    """K experts of one architecture. Nothing in it changes after it is built; a step never writes to it.

    `bank` [K,P] holds the encoder segment, then the head. Build one with `load`, `from_modules` or `from_state_dicts`.
    """

    def __init__(self, parts: Parts, read_candidates: Callable[[], ExpertPool | None] = lambda: None) -> None:
        self._parts, self._read_candidates = parts, read_candidates
        self._fingerprint: tuple[object, str] | None = None
        self._recording: Recording | None = None
        self.execution = Execution()
        self.cards, self.bank, self.template, self.layout = parts.cards, parts.bank, parts.network, parts.layout
        self.names = tuple(card.name for card in parts.cards)
        self.classes = parts.cards[0].classes
        self.layout.move_rest(self.layout.strip(self.template.module), self.device, self.bank.dtype)

    # --- building -----------------------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        network: nn.Module | None = None,
        device: Device = "cpu",
        dtype: torch.dtype | None = None,
    ) -> ExpertPool:
        """Read a folder of expert folders, in their recorded order or by name; weights stream straight into the bank.

        `network` is needed only for experts whose architecture is their author's own. It must be configured as it was
        in training: tensors are checked, but a setting that leaves their shapes alone is not on disk.
        """
        root = Path(folder)
        candidates = partial(_load_candidates, root, network, device, dtype)
        return cls(read_parts(root, network, device, dtype), candidates)

    @classmethod
    def from_modules(
        cls,
        modules: Mapping[str, nn.Module],
        *,
        base: nn.Module | None = None,
        classes: Iterable[str] | None = None,
        head: str | Iterable[str] | None = None,
        preprocessing: Preprocessing | None = None,
    ) -> ExpertPool:
        """Experts from live modules of one class, in the mapping's order; their weights are copied."""
        return cls(parts_of_modules(modules, base, classes, head, preprocessing))

    @classmethod
    def from_state_dicts(
        cls,
        states: Mapping[str, Mapping[str, Tensor]],
        network: nn.Module | str,
        *,
        base: Mapping[str, Tensor] | None = None,
        classes: Iterable[str] | None = None,
        head: str | Iterable[str] | None = None,
        preprocessing: Preprocessing | None = None,
    ) -> ExpertPool:
        """Experts from state dicts and one network: a module, or a name where `classes` are given."""
        return cls(parts_of_states(states, network, base, classes, head, preprocessing))

    def save(self, folder: str | Path) -> None:
        """Write the pool as a folder of expert folders and their order, whole or not at all; candidates beside it."""
        if self.candidates is not None:
            self.candidates.save(candidates_folder(Path(folder)))
        with folder_written_whole(Path(folder), holds_only_a_pool) as scratch:
            self._write(scratch)
            write_order(scratch, self.names)

    def _write(self, root: Path) -> None:
        base_sha256 = None
        if self.base is not None:
            base_card = replace(self.cards[0], name=BASE, domain=None, class_counts={}, metrics={}, recipe={})
            base_card = write_expert(root / BASE, {**self.layout.views(self.base), **self._merged_integers}, base_card)
            base_sha256 = base_card.weights_sha256
        for k, card in enumerate(self.cards):
            state = {**self.layout.views(self.bank[k]), **self._parts.integers[k]}
            written = write_expert(root / card.name, state, replace(card, base_sha256=base_sha256))
            statistics = self.statistics[k]
            if statistics is not None:
                write_statistics(root / card.name, statistics, written)

    # --- what it is ---------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        size, kind = f"P={self.layout.numbers:,}", str(self.bank.dtype).removeprefix("torch.")
        return f"ExpertPool({', '.join(self.names)}; {self.template.architecture}, {size}, {kind})"

    @property
    def device(self) -> torch.device:
        return self.bank.device

    @property
    def preprocessing(self) -> Preprocessing | None:
        return self.template.preprocessing

    @cached_property
    def base(self) -> Tensor | None:
        """The shared start of all experts [P], read when first asked for; None where the pool has none."""
        read = self._parts.read_base
        return None if read is None else read().to(self.device, self.bank.dtype)

    @cached_property
    def statistics(self) -> tuple[Statistics | None, ...]:
        """What each expert's site measured on its own images, where it shipped any."""
        return tuple(self.statistics_of(k) for k in range(len(self)))

    def statistics_of(self, expert: int) -> Statistics | None:
        return self._readers[expert]()

    @property
    def _readers(self) -> tuple[Callable[[], Statistics | None], ...]:
        return self._parts.read_statistics or (partial(_given, None),) * len(self)

    def with_statistics(self, statistics: Mapping[str, Statistics]) -> ExpertPool:
        """The pool with other statistics for some experts; weights are shared."""
        readers = list(self._readers)
        for name, own in statistics.items():
            if not isinstance(own, Statistics):
                raise InputError(f"Statistics come from measure_statistics, got {type(own).__name__} for '{name}'.")
            readers[self.index(name)] = partial(_given, own)
        return self._with(read_statistics=tuple(readers))

    @cached_property
    def candidates(self) -> ExpertPool | None:
        """All runs that the experts were chosen from, each with its domain in its card; None where none were kept."""
        runs = self._read_candidates()
        if runs is None:
            return None
        if runs.layout != self.layout or runs.classes != self.classes or runs.preprocessing != self.preprocessing:
            raise PoolError("The candidates are of another network, classes or preprocessing than this pool's experts.")
        domains = {card.domain or card.name for card in self.cards}
        for card in runs.cards:
            # Otherwise a pool without some domain would still average that domain's runs.
            if card.domain not in domains:
                raise PoolError(
                    f"The candidate '{card.name}' is of domain {card.domain!r}, which must be an expert's: "
                    f"{', '.join(sorted(domains))}. Say it: runs = runs.annotate('{card.name}', domain=...)."
                )
        return runs

    def with_candidates(self, runs: ExpertPool) -> ExpertPool:
        """The pool with the runs that its experts were chosen from; each one's card says of which domain it is."""
        if not isinstance(runs, ExpertPool):
            raise InputError(f"Candidates are an ExpertPool of runs, got {type(runs).__name__}.")
        return self._with(partial(_given, runs))

    def annotate(self, name: str, **details: Any) -> ExpertPool:
        """The pool with more said of one expert: its domain, class_counts, metrics, recipe or temperature."""
        for detail in details:
            if detail not in DETAILS:
                raise unknown_name("detail of an expert", detail, DETAILS)
        expert = self.index(name)
        cards = [replace(card, **details) if k == expert else card for k, card in enumerate(self.cards)]
        return self._with(cards=tuple(cards))

    @property
    def temperatures(self) -> Tensor:
        """Each expert's temperature [K], scaled on its own validation split; 1 where its card has none."""
        return torch.tensor([card.temperature for card in self.cards], device=self.device)

    def fingerprint(self) -> str:
        """sha-256 of what the pool is now: order, classes, network and every bit of the bank."""
        header = {
            "names": self.names,
            "classes": self.classes,
            "dtype": str(self.bank.dtype),
            "temperatures": [card.temperature for card in self.cards],
            "class_counts": [card.class_counts for card in self.cards],
            "integers": [{name: tensor.tolist() for name, tensor in own.items()} for own in self._parts.integers],
        }
        told = json.dumps({**header, **self.template.describe()}, sort_keys=True)
        # Hashing takes seconds, so it is done once: torch counts what is written into a tensor.
        now = (told, None if self.bank.is_inference() else self.bank._version)
        if now[1] is None or self._fingerprint is None or self._fingerprint[0] != now:
            digest = hashlib.sha256(told.encode())
            for row in self.bank:
                digest.update(row.cpu().view(torch.uint8).numpy().data)
            self._fingerprint = (now, digest.hexdigest())
        return self._fingerprint[1]

    def base_fingerprint(self) -> str | None:
        """sha-256 of the base weights' bits; None where there is no base."""
        return None if self.base is None else sha256_of_tensor(self.base)

    def index(self, name: str) -> int:
        if name not in self.names:
            raise unknown_name("expert in this pool", name, self.names)
        return self.names.index(name)

    def without(self, *names: str) -> ExpertPool:
        """The pool less some experts, in the same order; rows are shared where they stay adjacent."""
        dropped = {self.index(name) for name in names}
        kept = [k for k in range(len(self)) if k not in dropped]
        if not kept:
            raise PoolError(f"Without {', '.join(names)} this pool would be empty.")
        adjacent = kept == list(range(kept[0], kept[-1] + 1))
        bank = self.bank[kept[0] : kept[-1] + 1] if adjacent else self.bank[kept]
        domains = {self.cards[k].domain or self.names[k] for k in dropped}
        return self._with(
            partial(_runs_outside, self._read_candidates, domains),
            bank=bank,
            cards=tuple(self.cards[k] for k in kept),
            integers=tuple(self._parts.integers[k] for k in kept),
            read_statistics=tuple(self._readers[k] for k in kept),
        )

    def to(
        self, device: Device | None = None, dtype: torch.dtype | None = None, *, execution: Execution | None = None
    ) -> ExpertPool:
        """The pool on another device, in another floating type or run in another way; this one stays as it is."""
        if dtype is not None and not dtype.is_floating_point:
            raise InputError(f"Weights are floating numbers; {dtype} is not a floating type.")
        bank = self.bank.to(device, dtype)
        if dtype is not None and not bool(torch.isfinite(bank).all()):
            raise PoolError(f"Some weights are too large for {dtype}. Choose torch.bfloat16 or torch.float32.")
        moved = self._with(bank=bank)
        moved.execution = self.execution if execution is None else execution
        return moved

    def _with(self, read_candidates: Callable[[], ExpertPool | None] | None = None, **changes: Any) -> ExpertPool:
        """A pool that differs in some parts and shares the others."""
        network = replace(self.template, module=copy.deepcopy(self.template.module))
        parts = replace(self._parts, network=network, **changes)
        pool = ExpertPool(parts, read_candidates or self._read_candidates)
        pool.execution = self.execution
        return pool

    # --- what it does -------------------------------------------------------------------------------------

    def admit(self, method: str) -> None:
        """Refuse a method that this pool cannot serve; one whose experts all lie on the device serves every method."""

    def prepare(self, images: Tensor) -> Tensor:
        """A batch as the network takes it: uint8 of any size is resized and normalised, float passes as it is."""
        require_batch(images, self.preprocessing)
        if images.dtype == torch.uint8:
            assert self.preprocessing is not None
            images = self.preprocessing(images.to(self.device))
        return images.to(self.device, self.bank.dtype).contiguous()

    def logits(self, images: Tensor, view: str | None = None) -> Tensor:
        """Every expert's logits [K,B,C] in fp32, of the batch or of a named view of it."""
        batch = self.prepare(images)
        if view is not None:
            require_known((view,))
            batch = VIEWS[view](batch, self.preprocessing)
        return torch.stack([self._run_expert(k, batch) for k in range(len(self))])

    def logits_of_views(self, images: Tensor, views: Sequence[str]) -> dict[str, Tensor]:
        """Every expert's logits [K,B,C] of the batch as it is ('original') and of each named view of it."""
        batch = self.prepare(images)
        if self._recording is None:
            return {ORIGINAL: self.logits(batch), **{view: self.logits(batch, view) for view in views}}
        # One forward an expert: larger products, fewer launches.
        shown = torch.cat([batch, *(VIEWS[view](batch, self.preprocessing) for view in require_known(tuple(views)))])
        tasks = [partial(self._run_expert, k, shown) for k in range(len(self))]
        logits = torch.stack(self._recording.side_by_side(tasks, self.device))
        return dict(zip((ORIGINAL, *views), logits.chunk(1 + len(views), dim=1), strict=True))

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """A block in which nothing is read back to the host: what would be refused is noted on the device instead."""
        self._recording = Recording(self.execution)
        try:
            modules = [self._working, *self._experts] if self.execution.capture else []
            with patches_as_products(modules), fused_blocks([] if self.execution.compile else modules):
                yield self._recording
        finally:
            self._recording = None

    def expert_logits(self, expert: int, images: Tensor) -> Tensor:
        """One expert's logits [B,C] in fp32."""
        return self._run_expert(expert, self.prepare(images))

    def new_weights(self) -> Tensor:
        """An unfilled [P] vector to merge into, usable whatever mode it was made in."""
        with torch.inference_mode(False):
            return torch.empty(self.layout.size, dtype=self.bank.dtype, device=self.device)

    @property
    def rows(self) -> merging.Rows:
        """The bank as encoder [K,E] and head [K,H]."""
        return merging.Rows.of(self.bank, self.layout.encoder_size)

    def merge(
        self,
        encoder: Coefficients,
        head: Coefficients | None = None,
        out: Tensor | None = None,
        *,
        rows: merging.Rows | None = None,
    ) -> Tensor:
        """Merged weights [P] (Eq. 7): the encoder by `encoder` [K], the head by `head` [K] or the same.

        `rows` stand for the experts' own where a method changes them first.
        """
        a = self._checked(encoder)
        h = a if head is None else self._checked(head)
        out = self.new_weights() if out is None else out
        return merging.merge(rows or self.rows, a, h, out)

    def _checked(self, coefficients: Coefficients) -> Tensor:
        if self._recording is not None and isinstance(coefficients, Tensor):
            return coefficients
        return on_simplex(coefficients, len(self), self.device)

    def forward(self, weights: Tensor, images: Tensor, *, recalibrate_bn: bool = False) -> Tensor:
        """Logits [B,C] in fp32 of the network whose flat weights [P] are given.

        `recalibrate_bn` first overwrites the BatchNorm statistics inside `weights` with this batch's.
        """
        batch, module = self.prepare(images), self.module_with(weights)
        if recalibrate_bn:
            with self.input_errors(batch):
                reestimate(module, batch)
        return self._run(module, batch, "The merged model")

    def forward_with_inputs(
        self, weights: Tensor, images: Tensor, *, recalibrate_bn: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Logits [B,C] as of `forward`, and what the last layer read [B,D], in fp32."""
        if self.last_layer is None:
            raise NetworkError(f"{self.template.architecture} does not end in one linear layer with a bias.")
        with self.last_layer.remembering(self.module_with(weights)) as layer:
            logits = self.forward(weights, images, recalibrate_bn=recalibrate_bn)
            return logits, layer.inputs(len(logits))

    @cached_property
    def last_layer(self) -> LastLayer | None:
        """The linear layer that writes the logits; None where the network does not end in one."""
        return LastLayer.of(self.template.module, self.template.head, self.layout, len(self.classes))

    def network(self, encoder: Coefficients, head: Coefficients | None = None) -> nn.Module:
        """An ordinary frozen module with merged weights of its own, in eval mode."""
        return self.network_with(self.merge(encoder, head))

    def network_with(self, weights: Tensor) -> nn.Module:
        """An ordinary frozen module with a copy of flat weights [P], in eval mode."""
        module = copy.deepcopy(self.template.module)
        return self.layout.attach(module, weights.clone(), self._merged_integers).eval()

    def module_with(self, weights: Tensor) -> nn.Module:
        """The pool's one working module, its parameters views of `weights` [P]; attached anew only when they change."""
        if self._attached is not weights:
            self.layout.attach(self._working, weights, self._merged_integers)
            self._attached = weights
        return self._working

    _attached: Tensor | None = None

    def expert(self, expert: int) -> nn.Module:
        """One expert as a frozen module whose parameters are views of the bank."""
        return self._experts[expert]

    def matrices(self, row: Tensor, prefix: str = "") -> dict[str, Tensor]:
        """Parameters that may be the weight of a linear map or a convolution, by name, as views of a row [P]."""
        views = self.layout.views(row)
        found = [e.name for e in self.layout.parameters if len(e.shape) > 1 and e.name.startswith(prefix)]
        return {name: views[name] for name in found}

    @cached_property
    def _working(self) -> nn.Module:
        return copy.deepcopy(self.template.module).eval()

    @cached_property
    def _experts(self) -> list[nn.Module]:
        return [
            self.layout.attach(copy.deepcopy(self.template.module), row, own).eval()
            for row, own in zip(self.bank, self._parts.integers, strict=True)
        ]

    @cached_property
    def _merged_integers(self) -> Integers:
        names = self.layout.integers
        return {name: merging.merge_integers([own[name] for own in self._parts.integers]) for name in names}

    def _run_expert(self, expert: int, batch: Tensor) -> Tensor:
        return self._run(self._experts[expert], batch, f"Expert '{self.names[expert]}'")

    def _run(self, module: nn.Module, batch: Tensor, owner: str) -> Tensor:
        with self.input_errors(batch):
            logits = logits_of(module(batch)) if self._recording is None else self._recording.run(module, batch)
        if logits.shape != (len(batch), len(self.classes)):
            raise NetworkError(f"Expected logits [{len(batch)},{len(self.classes)}], got {tuple(logits.shape)}.")
        if self._recording is None:
            return require_finite(logits.float(), owner)
        self._recording.note(owner, finite_images(logits))
        return logits.float()

    @contextmanager
    def input_errors(self, batch: Tensor) -> Iterator[None]:
        """What a network says of a batch it cannot take, as an error about the batch."""
        try:
            yield
        except (torch.OutOfMemoryError, MergestreamError):
            raise
        except (AssertionError, RuntimeError, ValueError) as error:
            wanted = f" (the pool's preprocessing is for {self.preprocessing.size})" if self.preprocessing else ""
            shape = tuple(batch.shape)
            raise InputError(f"The network cannot take a batch of shape {shape}{wanted}: {error}") from error


def sha256_of_tensor(values: Tensor) -> str:
    """A hash of the bits, in row-major order."""
    return hashlib.sha256(values.detach().cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()


def _given(value: Any) -> Any:
    return value


def _load_candidates(
    root: Path, network: nn.Module | None, device: Device, dtype: torch.dtype | None
) -> ExpertPool | None:
    folder = candidates_folder(root)
    return ExpertPool.load(folder, network=network, device=device, dtype=dtype) if folder.is_dir() else None


def candidates_folder(root: Path) -> Path:
    """Where the runs of a pool lie: beside it."""
    whole = root.resolve()
    return whole.with_name(f"{whole.name}.candidates")


def _runs_outside(read: Callable[[], ExpertPool | None], domains: set[str]) -> ExpertPool | None:
    """The candidates less all runs of some domains: whoever leaves the pool takes its runs along."""
    runs = read()
    if runs is None:
        return None
    dropped = [card.name for card in runs.cards if (card.domain or card.name) in domains]
    if len(dropped) == len(runs):
        return None
    return runs.without(*dropped) if dropped else runs
