"""Rules about the state that a method carries from batch to batch."""

import io
from dataclasses import is_dataclass
from typing import Any

import torch

from mergestream.methods import Batch, Method, State
from mergestream.methods.state import for_experts, leaves, tensors, to_plain
from mergestream.runtime.errors import InputError, MergestreamError
from mergestream.serving.engine.lineup import options_without
from mergestream.testing.answer_rules import check_step
from mergestream.testing.method_case import STREAM, MethodCase, all_same, require, same
from mergestream.testing.small_pools import full_pool

BAD = {
    "an empty batch": torch.zeros(0, 3, 16, 16),
    "grey images": torch.zeros(2, 1, 16, 16),
    "one image without a batch": torch.zeros(3, 16, 16),
    "images of another size": torch.zeros(2, 3, 17, 17),  # floats are not resized
}


def step_changes_nothing(case: MethodCase) -> None:
    """Rollback of a refused batch and replay of an audit line go by the state before it."""
    pool, untouched = case.pool, full_pool(case.network).fingerprint()
    method = case.create()
    method.step(STREAM[0])
    before = method.state
    frozen = is_dataclass(before) and isinstance(before, State) and type(before).__dataclass_params__.frozen  # type: ignore[attr-defined]
    require(
        frozen, f"its state is a {type(before).__name__}: it has to be a frozen dataclass that inherits methods.State."
    )
    plain, images = to_plain(before), pool.prepare(STREAM[1])
    copied = images.clone()
    with torch.no_grad():
        method.advance(Batch(images), before)
    unchanged = all(map(torch.equal, leaves(to_plain(before)), leaves(plain)))
    require(unchanged and str(to_plain(before)) == str(plain), "`advance` changed the state that it was given.")
    require(torch.equal(images, copied), "`advance` changed the images that it was given.")
    require(pool.fingerprint() == untouched, "`advance` changed the pool's weights.")


def all_is_in_the_state(case: MethodCase) -> None:
    """A service keeps one method for many streams: only the state tells them apart."""
    method, steps = case.method, case.steps
    method.reset()
    require(
        all_same([method.step(batch) for batch in STREAM], steps),
        "after reset() the same stream got other answers: something is kept outside the state.",
    )
    method.reset()
    method.step(STREAM[0])
    after_one = method.state
    for batch in STREAM[1:]:
        method.step(batch)
    method.state = after_one
    require(
        same(method.step(STREAM[1]), steps[1]),
        "back in an earlier state, the same batch got another answer: something is kept outside the state.",
    )


def state_is_saved_and_loaded(case: MethodCase) -> None:
    """A service that restarts, and a benchmark that was killed, go on bit for bit."""
    method, saved = case.create(), io.BytesIO()
    method.step(STREAM[0])
    try:
        torch.save(method.state_dict(), saved)
        saved.seek(0)
        stored = torch.load(saved, weights_only=True)
    except Exception as error:
        raise AssertionError(
            f"its state cannot be saved and loaded without pickled objects ({type(error).__name__}): "
            "a state holds tensors and numbers, nothing else."
        ) from error
    again = case.create()
    again.load_state_dict(stored)
    require(
        all_same([again.step(batch) for batch in STREAM[1:]], case.steps[1:]),
        "a new method that loaded its state went on with other answers.",
    )


def bad_batches_are_refused(case: MethodCase) -> None:
    method = case.create()
    method.step(STREAM[0])
    fixed_size = hasattr(case.pool.template.module, "patch_embed")
    for what, images in BAD.items():
        if what != "images of another size" or fixed_size:
            _check_refusal(method, images, what)
    message = _check_refusal(method, torch.full((2, 3, 16, 16), float("nan")), "images with NaN")
    require("NaN or Inf for image 0" in message, f"images with NaN were refused without naming the image: {message}")
    step = method.step(STREAM[1], with_experts=True)
    require(same(step, case.steps[1]), "a batch that was refused changed the answers to the next one.")
    given = step.expert_logits is not None and torch.equal(step.expert_logits, case.pool.logits(STREAM[1]))
    require(given, "step(with_experts=True) does not hold the pool's own logits of the batch.")


def _check_refusal(method: Method[Any], images: torch.Tensor, what: str) -> str:
    try:
        method.step(images)
    except MergestreamError as refused:
        return str(refused)
    raise AssertionError(f"it answered {what}.")


def state_follows_the_experts(case: MethodCase) -> None:
    """An administrator switches an expert off and on again: the stream goes on."""
    whole, names = case.pool, case.pool.names
    fewer = whole.without(names[0])
    try:
        alone = case.create(fewer, **options_without(case.options, names, fewer.names))
    except InputError:
        return  # its options need the expert that is off
    method = case.create()
    method.step(STREAM[0])
    state, before = method.state, names
    require(for_experts(state, before, method.start(), before) is state, "the state changed for the same experts.")
    for each, images in ((alone, STREAM[1]), (method, STREAM[2]), (alone, STREAM[3])):
        after = each.pool.names
        carried = for_experts(state, before, each.start(), after)
        each.state = each.start() if carried is None else carried
        for key, tensor in tensors(each.start()).items():
            shape = tensors(each.state)[key].shape if key in tensors(each.state) else None
            require(
                shape == tensor.shape,
                f"'{key}' of its state has the shape {shape} for {len(after)} experts, not {tuple(tensor.shape)}: "
                "mark the field, as in field(metadata=PER_EXPERT).",
            )
        step = each.step(images)
        check_step(step, images, each.pool)
        state, before = each.state, after
