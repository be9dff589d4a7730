"""Rules about the pool: which networks run, in which order the experts are, and what their cards say."""

from typing import Any

import torch
from torch import Tensor, nn

from mergestream.methods import ORIGINAL
from mergestream.testing.method_case import FIELDS, STREAM, MethodCase, close, require, same
from mergestream.testing.small_pools import CLASSES, CONFUSION, NAMES, full_pool, make_images


def measured(**metrics: Any) -> dict[str, Any]:
    """A card's field of validation metrics, which also has the confusion matrix that some methods need."""
    return {"metrics": {"validation": {"confusion": CONFUSION, **metrics}}}


COUNTS = dict(zip(CLASSES, (50, 30, 10, 6, 4), strict=True))
CARD_FIELDS: dict[str, dict[str, Any]] = {
    "domain": {"domain": "elsewhere"},
    "class_counts": {"class_counts": COUNTS},
    "temperature": {"temperature": 0.5},
    "loss": {"recipe": {"loss": "weighted"}},
    "accuracy": measured(accuracy=1.0),
    "confusion": measured(confusion=[[9 - abs(i - j) for i in range(5)] for j in range(5)]),
    "mean_probability": measured(mean_probability=dict.fromkeys(CLASSES, 0.2)),
}


def forwards_are_counted(case: MethodCase) -> None:
    """The cost in tables is what the pool counted: a network that a method runs by itself would be free."""
    pool = case.pool.to()  # a pool of its own, whose networks can be watched
    ran = {"expert": 0, "merged": 0}

    def watch(module: nn.Module, kind: str) -> None:
        def count(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            ran[kind] += images_in(inputs[0])

        module.register_forward_pre_hook(count)

    watch(pool._working, "merged")
    for expert in map(pool.expert, range(len(pool))):
        watch(expert, "expert")
    method = case.create(pool)
    for batch in STREAM:
        before = dict(ran)
        step = method.step(batch)
        for kind, counted in (("expert", step.expert_forwards), ("merged", step.merged_forwards)):
            passes = (ran[kind] - before[kind]) / len(batch)
            require(
                counted is not None and abs(counted - passes) < 1e-6,
                f"each image took {passes:g} forwards through {kind} networks, and {counted:g} were counted: "
                "run networks through the pool (logits_of_views, merge, forward).",
            )
        gradients = (step.backwards or 0) > 0
        require(gradients == ("gradients" in method.needs), "`needs` names 'gradients' if, and only if, it uses them.")


def images_in(batch: Tensor) -> int:
    """How many images a tensor holds, those of a vectorised function of one image included."""
    functorch, count = torch._C._functorch, len(batch)
    while functorch.is_functorch_wrapped_tensor(batch):
        vectorised, inner = functorch.is_batchedtensor(batch), functorch.get_unwrapped(batch)
        count *= inner.shape[functorch.maybe_get_bdim(batch)] if vectorised else 1
        batch = inner
    return count


def given_logits_change_nothing(case: MethodCase) -> None:
    """A benchmark computes the experts' logits once for all methods."""
    images = torch.cat(STREAM)
    live, given = case.create(), case.create()
    views = dict.fromkeys((ORIGINAL, *(live.asked_views() or ("hflip",))))
    shared = {view: case.pool.logits(images, None if view == ORIGINAL else view) for view in views}
    alone, step = live.step(images), given.step(images, expert_logits=shared)
    require(close(alone.logits, step.logits, 1e-5), "expert logits that were computed before changed its answers.")
    forwards = [(each.expert_forwards, each.merged_forwards) for each in (alone, step)]
    require(forwards[0] == forwards[1], f"given expert logits changed the counted forwards: {forwards[1]}.")


def order_does_not_matter(case: MethodCase) -> None:
    """Permuting the experts permutes the coefficients and no prediction."""
    order = [2, 0, 1]
    tolerance = 1e-4 if case.network == "vit" else 1e-3  # BatchNorm over two images enlarges rounding
    moved = {k: [v[e] for e in order] if isinstance(v, list) and len(v) == 3 else v for k, v in case.options.items()}
    other = case.create(full_pool(case.network, tuple(NAMES[k] for k in order)), **moved)
    for batch, one in zip(STREAM, case.steps, strict=True):
        step = other.step(batch)
        equal = torch.equal(one.logits.argmax(-1), step.logits.argmax(-1)) and close(one.logits, step.logits, tolerance)
        require(equal, "the same experts in another order gave other answers.")
        require(one.head_expert == step.head_expert, "the same experts in another order gave another head expert.")
        for field in FIELDS[1:]:
            mine, theirs = getattr(one, field), getattr(step, field)
            alike = (mine is None) == (theirs is None) and (mine is None or close(mine[order], theirs, 1e-5))
            require(alike, f"the same experts in another order have other {field}.")


def one_class_is_the_answer(case: MethodCase) -> None:
    method = case.create(full_pool(case.network, classes=1))
    for size in (4, 1, 3):
        logits = method.step(make_images(size)).logits
        fine = logits.shape == (size, 1) and bool(torch.isfinite(logits).all())
        require(fine, f"with one class it answered {size} images with {logits.tolist()}.")


def card_values_are_in_the_provenance(case: MethodCase) -> None:
    """Another card is another provenance, or the same bits: a run must never pass for one with other numbers."""
    pool = case.pool
    for expert in pool.names:
        pool = pool.annotate(expert, class_counts=dict(reversed(COUNTS.items())) | {CLASSES[0]: 7}, temperature=0.7)
    method = case.create(pool)
    steps = [method.step(batch) for batch in STREAM[:2]]
    for field, details in CARD_FIELDS.items():
        other = case.create(pool.annotate(NAMES[0], **details))
        if other.provenance == method.provenance:
            equal = all(same(step, other.step(batch)) for batch, step in zip(STREAM, steps, strict=False))
            require(equal, f"it reads '{field}' of an expert's card, which is not in `card_values()`.")
