"""One model merged from a pool, written as an expert folder whose card names its parts."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mergestream.functional.coefficients import on_simplex
from mergestream.methods import create_method
from mergestream.methods.merged_model import MergedModel
from mergestream.pool.checkpoint import write_expert
from mergestream.pool.expert_card import ExpertCard
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.pool_folder import read_pool, require_new_folder
from mergestream.runtime.errors import InputError


def merge_pool(
    folder: Path,
    out: Path,
    *,
    encoder: Sequence[float] | None = None,
    head: Sequence[float] | None = None,
    method: str | None = None,
) -> ExpertCard:
    """Merge a pool by coefficients for the encoder (and others for the head), or by a method that merges once."""
    if (encoder is None) == (method is None) or (head is not None and encoder is None):
        raise InputError("Choose how to merge: --encoder with one number per expert (and --head), or --method mean.")
    require_new_folder(out)
    present = read_pool(folder)
    pool = ExpertPool.load(folder)
    described: dict[str, Any]
    if encoder is not None:
        shares, of_head = _shares(encoder, pool), _shares(head if head is not None else encoder, pool)
        network, described = pool.network(shares, of_head), {"encoder": shares, "head": of_head}
    else:
        merged = create_method(str(method), pool)
        if not isinstance(merged, MergedModel) or not merged.static:
            raise InputError(
                f"'{method}' does not make one model for all batches. Merge with mean, task_arithmetic, ties, fisher "
                f"or regmean, or give coefficients with --encoder."
            )
        network, described = merged.network(), {"method": method}
    return write_expert(out, network.state_dict(), _card(out, pool, present.base, described))


def _shares(values: Sequence[float], pool: ExpertPool) -> list[float]:
    try:
        on_simplex(values, len(pool))
    except InputError as error:
        raise InputError(f"{error} The pool's experts, in this order: {', '.join(pool.names)}.") from None
    return list(values)


def _card(out: Path, pool: ExpertPool, base: ExpertCard | None, described: dict[str, Any]) -> ExpertCard:
    shares = [described.get(part, [None] * len(pool)) for part in ("encoder", "head")]
    parts = [
        {"name": card.name, "weights_sha256": card.weights_sha256, "encoder": a, "head": h}
        for card, a, h in zip(pool.cards, *shares, strict=True)
        if (a, h) != (0, 0)
    ]
    used = [card for card in pool.cards if card.name in {part["name"] for part in parts}]
    counts = {name: sum(card.class_counts.get(name, 0) for card in used) for name in pool.classes}
    # Rules that compare answers with class shares depend on the loss, where all were trained with the same.
    losses = {card.recipe.get("loss") for card in used}
    common = {"loss": losses.pop()} if len(losses) == 1 and None not in losses else {}
    return ExpertCard.for_network(
        out.name,
        pool.template,
        pool.classes,
        # All sites whose data went in, so that a benchmark at one of them sees the leakage.
        domain="+".join(dict.fromkeys(card.domain or card.name for card in used)),
        class_counts=counts if all(card.class_counts for card in used) else {},
        recipe={"merged_from": parts, "method": described.get("method", "coefficients"), **common},
        base_sha256=base.weights_sha256 if base and all(card.base_sha256 for card in used) else None,
    )
