"""Statistics of every expert of a trained pool, measured on its own site's training images."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from mergestream.bench.engine.pool_at_target import preprocessing_of
from mergestream.data.datasets.data_request import DataRequest, open_data
from mergestream.pool.checkpoint import Statistics, write_statistics
from mergestream.pool.expert_pool import ExpertPool
from mergestream.pool.statistics.measurement import BLOCKWISE, BlockwiseOptions, blockwise_kind, measure_statistics
from mergestream.training import split_of

REGMEAN_PP: BlockwiseOptions = {"ratio": 1.0, "ridge": 0.01, "convolutions": True}


def measure_pool(
    folder: Path, request: DataRequest, work: Path, images: Mapping[str, int], device: str = "cpu"
) -> None:
    """Write each expert's statistics into its folder; what is there is left alone. `images`: how many, by kind.

    RegMean++'s ('gram_pp') belong to a set of experts, so there is one for every domain that may be left out.
    """
    pool = ExpertPool.load(folder, device=device)
    dataset = open_data(request, preprocessing_of(pool, str(folder)), work)

    def own_images(names: tuple[str, ...], kind: str) -> dict[str, Tensor]:
        chosen = {}
        for card in (pool.cards[pool.index(name)] for name in names):
            data = dataset[card.domain or card.name]
            chosen[card.name] = data.batch(split_of(data, card.recipe)[0][: images[kind]])
        return chosen

    # Left-out experts by the kind of statistics that the others need then. Subpools may be large copies: one at a time.
    left_out = {blockwise_kind(pool.without(name), REGMEAN_PP): name for name in pool.names if BLOCKWISE in images}
    plain = [kind for kind in images if kind != BLOCKWISE]
    if all(_has(name, own, plain, left_out) for name, own in zip(pool.names, pool.statistics, strict=True)):
        return
    measured = pool
    for kind in plain:
        measured = measure_statistics(measured, own_images(pool.names, kind), (kind,))
    statistics = _by_name(measured)
    del measured
    for kind, name in left_out.items():
        rest = pool.without(name)
        own = _by_name(measure_statistics(rest, own_images(rest.names, BLOCKWISE), (BLOCKWISE,), **REGMEAN_PP))
        for expert in rest.names:
            statistics[expert] = statistics[expert].with_kind(
                kind, dict(own[expert].of(kind)), own[expert].images[kind]
            )
    for card in pool.cards:
        write_statistics(folder / card.name, statistics[card.name], card)


def _by_name(pool: ExpertPool) -> dict[str, Statistics]:
    return {name: own for name, own in zip(pool.names, pool.statistics, strict=True) if own is not None}


def _has(name: str, own: Statistics | None, plain: Sequence[str], left_out: Mapping[str, str]) -> bool:
    needed = [*plain, *(kind for kind, other in left_out.items() if other != name)]
    return own is not None and all(kind in own.images for kind in needed)
