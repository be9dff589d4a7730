"""Rules about options and answers."""

import inspect
import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergestream.bench.evaluation import evaluate
from mergestream.data.datasets.domain_data import DomainData
from mergestream.data.streams import Stream
from mergestream.methods import Method, Step
from mergestream.pool.expert_pool import ExpertPool
from mergestream.testing.method_case import STREAM, MethodCase, require, same
from mergestream.testing.small_pools import make_images


def options_are_read_back(case: MethodCase) -> None:
    """Records, states and audit lines hold the options, and another process builds the method from them."""
    kind = case.kind
    require(
        isinstance(kind, type) and issubclass(kind, Method) and not inspect.isabstract(kind),
        "a method is a class that inherits mergestream.Method and defines `advance`.",
    )
    named = isinstance(getattr(kind, "name", None), str) and kind.name.isidentifier()
    require(named, 'it has no name: write `name: ClassVar[str] = "my_method"` or register it.')
    positional = [each.name for each in kind._parameters().values() if each.kind is not inspect.Parameter.KEYWORD_ONLY]
    require(
        not positional,
        f"{', '.join(positional)} can be given by place: use @dataclass(kw_only=True), or a * in the constructor.",
    )
    options = case.method.options()
    try:
        restored = json.loads(json.dumps(options, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"its options cannot be written as JSON: {error}.") from error
    again = case.create(**restored).options() if restored else {}
    require(again == options, f"its options {options} became {again} when it was built from them.")
    missing = [key for key in case.options if key != "base" and key not in case.method.label()]
    require(not missing, f"its label {case.method.label()!r} does not show the option {', '.join(missing)}.")


def answers_are_well_formed(case: MethodCase) -> None:
    for batch, step in zip(STREAM, case.steps, strict=True):
        check_step(step, batch, case.pool)


def check_step(step: Any, batch: Tensor, pool: ExpertPool) -> None:
    """Logits [B,C] and coefficients [K] on the simplex, finite numbers in fp32."""
    require(isinstance(step, Step), f"`advance` returns (Step, state), not {type(step).__name__} first.")
    expected, logits = (len(batch), len(pool.classes)), step.logits
    require(logits.shape == expected, f"logits have the shape {tuple(logits.shape)}, not [B,C] = {expected}.")
    require(logits.dtype == torch.float32, f"logits are {logits.dtype}, not torch.float32.")
    require(torch.isfinite(logits).all(), "logits are not finite.")
    require(step.seconds > 0, "the step has no duration.")
    require(step.expert_logits is None, "the step holds the experts' logits although nobody asked for them.")
    for field in ("encoder_coefficients", "head_coefficients"):
        shares = getattr(step, field)
        if shares is not None:
            _check_shares(field, shares, len(pool))
    require(step.head_expert in (None, *pool.names), f"the head expert {step.head_expert!r} is not in the pool.")


def _check_shares(field: str, shares: Tensor, experts: int) -> None:
    require(shares.shape == (experts,), f"{field} have the shape {tuple(shares.shape)}, not [K] = ({experts},).")
    require(shares.dtype == torch.float32, f"{field} are {shares.dtype}, not torch.float32.")
    on_simplex = bool((shares >= 0).all()) and abs(float(shares.sum()) - 1) < 1e-6
    require(on_simplex, f"{field} {shares.tolist()} are not shares: each at least 0, and 1 in sum.")


def answers_are_deterministic(case: MethodCase) -> None:
    expected = case.steps
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(26)
        numbers = torch.random.get_rng_state()
        again = case.create(**case.method.options())
        steps = [again.step(batch) for batch in STREAM[:2]]
        untouched = torch.equal(numbers, torch.random.get_rng_state())
    require(
        all(map(same, steps, expected)),
        "two new methods with the same options answered the same batches differently: "
        "draw random numbers from a generator of your own with a fixed seed.",
    )
    require(untouched, "it draws from torch's global random numbers, or sets their seed: use a generator of your own.")


def single_images_are_answered(case: MethodCase) -> None:
    """The service answers pictures one by one: no method may refuse the first, or a stream of such."""
    method = case.create()
    for number in range(3):
        images = make_images(1, seed=number)
        check_step(method.step(images), images, case.pool)


def labels_are_never_seen(case: MethodCase) -> None:
    """Evaluate the same images with other labels: no answer may change."""
    images, classes = torch.cat(STREAM[:2]), case.pool.classes
    halves = Stream("given", (np.arange(5), np.arange(5, 10)))
    answers = []
    for first in (0, 1):
        labels = (torch.arange(len(images)) + first) % len(classes)
        data = DomainData("contract", "elsewhere", classes, images, labels)
        answers.append(evaluate(case.create(), data, halves).probabilities)
    require(torch.equal(*answers), "other labels of the same images changed its answers: a step must not see labels.")
