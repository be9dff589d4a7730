"""A method with its options on a small pool, and what the rules compare: its steps on one short stream."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mergestream.methods import Method, Step, instance_of
from mergestream.pool.expert_pool import ExpertPool
from mergestream.testing.small_pools import full_pool, make_images, own_copy

STREAM = (make_images(5, seed=1), make_images(5, seed=2), make_images(2, seed=3), make_images(1, seed=4))
FIELDS = ("logits", "encoder_coefficients", "head_coefficients", "entropy", "scores", "consistency", "lambdas")


@dataclass(frozen=True)
class MethodCase:
    """A class, options and the kind of network that its experts are."""

    kind: type[Method[Any]]
    options: Mapping[str, Any]
    network: str = "vit"

    @cached_property
    def pool(self) -> ExpertPool:
        """A pool of its own, whose weights a faulty method can change without harm to other checks."""
        return own_copy(full_pool(self.network))

    def create(self, pool: ExpertPool | None = None, **options: Any) -> Method[Any]:
        """A new method, on the case's pool and with its options unless others are given."""
        return instance_of(self.kind, pool or self.pool, **(options or self.options))

    @cached_property
    def method(self) -> Method[Any]:
        """The method that took `steps`."""
        return self.create()

    @cached_property
    def steps(self) -> list[Step]:
        """The answers of a new method to the whole stream."""
        return [self.method.step(batch) for batch in STREAM]


def require(condition: object, sentence: str) -> None:
    """Refuse with the sentence, also where Python leaves out assertions."""
    if not bool(condition):
        raise AssertionError(sentence)


def same(first: Step, second: Step) -> bool:
    """Whether two steps are the same bit for bit."""
    pairs = [(getattr(first, field), getattr(second, field)) for field in FIELDS]
    return all((a is None and b is None) or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def all_same(first: Sequence[Step], second: Sequence[Step]) -> bool:
    return len(first) == len(second) and all(map(same, first, second))


def close(first: Tensor, second: Tensor, tolerance: float = 1e-4) -> bool:
    return torch.allclose(first, second, rtol=tolerance, atol=tolerance)
