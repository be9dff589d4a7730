"""ExpertPool: the ordered experts of one architecture, what is known about them, and pools derived from them."""

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mergestream.networks.architecture import class_names, create_network, find_head, first_difference, from_module
from mergestream.networks.preprocessing import Preprocessing
from mergestream.pool.checkpoint import Statistics
from mergestream.pool.execution import Execution
from mergestream.pool.expert_card import BASE
from mergestream.pool.parts import Device, Parts, parts_of_states, read_parts, write_pool
from mergestream.pool.pool_folder import candidates_folder, require_named, require_named_modules
from mergestream.pool.runner import PoolRunner
from mergestream.pool.trust.revocations import read_revocations
from mergestream.pool.trust.trusted_signers import trusted_signers
from mergestream.runtime.errors import InputError, PoolError, require_known

# Card fields that a site may change after its expert was built.
DETAILS = ("domain", "class_counts", "class_concepts", "metrics", "recipe", "temperature")


class ExpertPool(PoolRunner):
    """K experts of one architecture. Nothing in it changes after it is built; a step never writes to it.

    `bank` [K,P] holds the encoder segment, then the head. Build one with `load`, `from_modules` or `from_state_dicts`.
    """

    def __init__(self, parts: Parts, execution: Execution | None = None) -> None:
        super().__init__(parts, execution)
        self._fingerprint: tuple[object, str] | None = None
        self.cards = parts.cards

    # --- building and saving ------------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        network: nn.Module | None = None,
        device: Device = "cpu",
        dtype: torch.dtype | None = None,
        require_signed_by: str | Path | None = None,
        keep_revoked: bool = False,
    ) -> "ExpertPool":
        """Read a folder of expert folders, in their recorded order or by name; weights stream straight into the bank.

        `network` is needed only for experts whose architecture is their author's own. It must be configured as it was
        in training: tensors are checked, but a setting that leaves their shapes alone is not on disk.

        `require_signed_by`: a folder of public keys and certificates. Every expert, the base and the candidates must
        be signed by one of these signers, and what is used is what was signed. Revoked experts are refused;
        `keep_revoked` loads them nevertheless, for a replay or a service that leaves them out.
        """
        runs = candidates_folder(Path(folder))

        def read_candidates() -> "ExpertPool | None":
            same: dict[str, Any] = {"network": network, "device": device, "dtype": dtype}
            if not runs.is_dir():
                return None
            pool = cls.load(runs, **same, require_signed_by=require_signed_by)
            revocations.refuse(pool.cards)
            return pool

        trusted = trusted_signers(require_signed_by)
        revocations = read_revocations(Path(folder), trusted)
        parts = read_parts(Path(folder), network, device, dtype, trusted)
        if not keep_revoked:
            revocations.refuse(parts.cards)
        return cls(replace(parts, read_candidates=read_candidates))

    @classmethod
    def from_modules(
        cls,
        modules: Mapping[str, nn.Module],
        *,
        base: nn.Module | None = None,
        classes: Iterable[str] | None = None,
        head: str | Iterable[str] | None = None,
        preprocessing: Preprocessing | None = None,
    ) -> "ExpertPool":
        """Build a pool from live modules of one class, in the mapping's order; their weights are copied."""
        require_named_modules(modules)
        first = next(iter(modules.values()))
        network = from_module(copy.deepcopy(first).eval(), head, preprocessing)
        for name, module in modules.items():
            if type(module) is not type(first):
                raise PoolError(f"Expert '{name}' is a {type(module).__name__}, not a {type(first).__name__}.")
            own = preprocessing or from_module(module, network.head).preprocessing
            if own != network.preprocessing:
                raise PoolError(f"Expert '{name}' differs in preprocessing: {own}, not {network.preprocessing}.")
        for name, module in [*modules.items(), *([(BASE, base)] if base is not None else [])]:
            difference = first_difference(first, module)
            if difference:
                raise PoolError(f"'{name}' is built differently from '{next(iter(modules))}': {difference}.")
            if classes is None and class_names(module) != class_names(first):
                raise PoolError(f"'{name}' names its classes {class_names(module)}, not {class_names(first)}.")
        states = {name: module.state_dict() for name, module in modules.items()}
        start = None if base is None else base.state_dict()
        return cls(parts_of_states(states, network, start, class_names(first) if classes is None else classes))

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
    ) -> "ExpertPool":
        """Build a pool from state dicts and one network: a module, or a name where `classes` are given."""
        require_named(states, "state dicts")
        if not isinstance(network, str):
            blueprint = from_module(copy.deepcopy(network).eval(), head, preprocessing)
        elif classes is None:
            raise PoolError(f"To build '{network}' by name, give classes=: its head needs their number.")
        else:
            classes = tuple(classes)
            built = create_network(network, num_classes=len(classes))
            preprocessing, parts = preprocessing or built.preprocessing, find_head(built.module, head)
            blueprint = replace(built, head=parts, preprocessing=preprocessing)
        return cls(parts_of_states(states, blueprint, base, classes))

    def save(self, folder: str | Path) -> None:
        """Write the pool as a folder of expert folders, whole or not at all, and its candidates beside it."""
        if self.candidates is not None:
            self.candidates.save(candidates_folder(Path(folder)))
        write_pool(Path(folder), self)

    # --- content ------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        size, kind = f"P={self.layout.numbers:,}", str(self.bank.dtype).removeprefix("torch.")
        return f"ExpertPool({', '.join(self.names)}; {self.template.architecture}, {size}, {kind})"

    def index(self, name: str) -> int:
        """Position of an expert by its name."""
        require_known("expert in this pool", name, self.names)
        return self.names.index(name)

    @cached_property
    def base(self) -> Tensor | None:
        """The shared start of all experts [P], read at first use; None where the pool has none."""
        read = self._parts.read_base
        return None if read is None else read().to(self.device, self.bank.dtype)

    @cached_property
    def statistics(self) -> tuple[Statistics | None, ...]:
        """Every expert's statistics of its own site's images; None where a site shipped none."""
        return tuple(self.statistics_of(k) for k in range(len(self)))

    def statistics_of(self, expert: int) -> Statistics | None:
        return self._parts.read_statistics[expert]()

    @cached_property
    def candidates(self) -> "ExpertPool | None":
        """All runs that the experts were chosen from, each with its domain in its card; None where there are none."""
        runs = self._parts.read_candidates()
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
                    f"{', '.join(sorted(domains))}. Set it with runs = runs.annotate('{card.name}', domain=...)."
                )
        return runs

    @property
    def recommendation(self) -> dict[str, Any] | None:
        """What 'mergestream choose' wrote into pool.json, for this pool or the one it is a part of; None without it."""
        return self._parts.recommendation

    @property
    def signed_by(self) -> dict[str, str] | None:
        """The signer of each expert; None where signatures were not checked."""
        signers = self._parts.signers
        return None if signers is None else {name: signers[name] for name in self.names}

    @property
    def temperatures(self) -> Tensor:
        """Each expert's temperature [K], scaled on its own validation split; 1 where its card has none."""
        return torch.tensor([card.temperature for card in self.cards], device=self.device)

    def fingerprint(self) -> str:
        """sha-256 of the pool's present content: order, classes, network and every bit of the bank."""
        header = {
            "names": self.names,
            "classes": self.classes,
            "dtype": str(self.bank.dtype),
            "temperatures": [card.temperature for card in self.cards],
            "class_counts": [card.class_counts for card in self.cards],
            "integers": [{name: tensor.tolist() for name, tensor in own.items()} for own in self.integers],
            **({"scores": "bfloat16"} if self.execution.narrow_scores else {}),
        }
        text = json.dumps({**header, **self.template.describe()}, sort_keys=True)
        # Hashing takes seconds, so it is done once: torch counts the writes to a tensor.
        version = (text, None if self.bank.is_inference() else self.bank._version)
        if version[1] is None or self._fingerprint is None or self._fingerprint[0] != version:
            digest = hashlib.sha256(text.encode())
            for row in self.bank:
                digest.update(row.cpu().view(torch.uint8).numpy().data)
            self._fingerprint = (version, digest.hexdigest())
        return self._fingerprint[1]

    def base_fingerprint(self) -> str | None:
        """sha-256 of the base weights' bits; None where there is no base."""
        return None if self.base is None else sha256_of_tensor(self.base)

    # --- derived pools ------------------------------------------------------------------------------------

    def with_statistics(self, statistics: Mapping[str, Statistics]) -> "ExpertPool":
        """The pool with other statistics for some experts; weights are shared."""
        for name, own in statistics.items():
            if not isinstance(own, Statistics):
                raise InputError(f"Statistics come from measure_statistics, got {type(own).__name__} for '{name}'.")
        given = {self.index(name): own for name, own in statistics.items()}
        readers = enumerate(self._parts.read_statistics)
        return self._with(read_statistics=tuple(partial(given.get, k) if k in given else read for k, read in readers))

    def with_candidates(self, runs: "ExpertPool") -> "ExpertPool":
        """The pool with the runs that its experts were chosen from; each run's card names its domain."""
        if not isinstance(runs, ExpertPool):
            raise InputError(f"Candidates are an ExpertPool of runs, got {type(runs).__name__}.")
        return self._with(read_candidates=lambda: runs)

    def annotate(self, name: str, **details: Any) -> "ExpertPool":
        """The pool with other details of one expert: its domain, class_counts, class_concepts, metrics, …."""
        for detail in details:
            require_known("detail of an expert", detail, DETAILS)
        expert = self.index(name)
        cards = [replace(card, **details) if k == expert else card for k, card in enumerate(self.cards)]
        return self._with(cards=tuple(cards))

    def without(self, *names: str) -> "ExpertPool":
        """The pool less some experts, in the same order; rows are shared where they stay adjacent."""
        dropped = {self.index(name) for name in names}
        rest = [k for k in range(len(self)) if k not in dropped]
        if not rest:
            raise PoolError(f"Without {', '.join(names)} this pool would be empty.")
        adjacent = rest == list(range(rest[0], rest[-1] + 1))
        domains = {self.cards[k].domain or self.names[k] for k in dropped}
        return self._with(
            bank=self.bank[rest[0] : rest[-1] + 1] if adjacent else self.bank[rest],
            cards=tuple(self.cards[k] for k in rest),
            integers=tuple(self.integers[k] for k in rest),
            read_statistics=tuple(self._parts.read_statistics[k] for k in rest),
            read_candidates=partial(_runs_outside, self._parts.read_candidates, domains),
        )

    def to(
        self, device: Device | None = None, dtype: torch.dtype | None = None, *, execution: Execution | None = None
    ) -> "ExpertPool":
        """The pool on another device, in another floating type or with another execution; this one is unchanged."""
        if dtype is not None and not dtype.is_floating_point:
            raise InputError(f"Weights are floating numbers; {dtype} is not a floating type.")
        bank = self.bank.to(device, dtype)
        if dtype is not None and not bool(torch.isfinite(bank).all()):
            raise PoolError(f"Some weights are too large for {dtype}. Choose torch.bfloat16 or torch.float32.")
        return self._with(execution, bank=bank)

    def _with(self, execution: Execution | None = None, **changes: Any) -> "ExpertPool":
        """A pool that differs in some parts and shares the others."""
        network = replace(self.template, module=copy.deepcopy(self.template.module))
        return ExpertPool(replace(self._parts, network=network, **changes), execution or self.execution)


def sha256_of_tensor(values: Tensor) -> str:
    """A hash of the bits, in row-major order."""
    return hashlib.sha256(values.detach().cpu().contiguous().view(torch.uint8).numpy().data).hexdigest()


def _runs_outside(read: Callable[[], ExpertPool | None], domains: set[str]) -> "ExpertPool | None":
    """The candidates less all runs of some domains: an expert that leaves the pool takes its runs along."""
    runs = read()
    if runs is None:
        return None
    dropped = [card.name for card in runs.cards if (card.domain or card.name) in domains]
    if len(dropped) == len(runs):
        return None
    return runs.without(*dropped) if dropped else runs
