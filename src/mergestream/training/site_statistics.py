"""Statistics of the experts of a trained pool, each measured on its own site's training images."""

from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor

from mergestream.data.datasets import DataRequest, open_data
from mergestream.pool.checkpoint import write_statistics
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.statistics.measurement import (
    BLOCKWISE,
    BlockwiseOptions,
    blockwise_kind,
    existing_statistics,
    measure_statistics,
)
from mergestream.training.training_loop import split_of

REGMEAN_PP: BlockwiseOptions = {"ratio": 1.0, "ridge": 0.01, "convolutions": True}


def measure_pool(
    folder: Path,
    request: DataRequest,
    work: Path,
    images: Mapping[str, int],
    device: str = "cpu",
    experts: Collection[str] = (),
) -> None:
    """Write the statistics of these experts (by default all) into their folders; what is there is left alone.

    `images`: how many, by kind. RegMean++'s ('gram_pp') belong to a set of experts, so there is one for every domain
    that may be left out.
    """
    measured = ExpertPool.load(folder, device=device)
    dataset = open_data(request, measured.template.require_preprocessing(), work)
    cards = {card.name: card for card in measured.cards if card.name in (experts or measured.names)}
    data = {name: dataset[card.domain or name] for name, card in cards.items()}
    training = {name: split_of(data[name], card.recipe)[0] for name, card in cards.items()}

    def own_images(names: Collection[str], kind: str) -> dict[str, Tensor]:
        return {name: data[name].batch(training[name][: images[kind]]) for name in names}

    # Left-out experts by the kind of statistics that the others need then. Subpools may be large copies: one at a time.
    left_out = {blockwise_kind(measured.without(name), REGMEAN_PP): name for name in cards if BLOCKWISE in images}
    plain = {kind: count for kind, count in images.items() if kind != BLOCKWISE}

    def is_complete(name: str) -> bool:
        own = existing_statistics(measured, measured.index(name))
        needed = plain | {kind: images[BLOCKWISE] for kind, other in left_out.items() if other != name}
        counts = {kind: min(count, len(training[name])) for kind, count in needed.items()}
        return counts.items() <= own.images.items()

    if all(map(is_complete, cards)):
        return
    for kind in plain:
        measured = measure_statistics(measured, own_images(cards, kind), (kind,))
    for name in left_out.values():
        rest = measured.without(name)
        rest = measure_statistics(rest, own_images(rest.names, BLOCKWISE), (BLOCKWISE,), **REGMEAN_PP)
        measured = measured.with_statistics({name: existing_statistics(rest, k) for k, name in enumerate(rest.names)})
    for name, card in cards.items():
        write_statistics(folder / name, existing_statistics(measured, measured.index(name)), card)
