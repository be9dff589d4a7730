"""The plan 'results': networks, training recipes, pools and stages of the study on a GPU. Nothing is tuned here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mergestream.bench.engine.plan import TABLES
from mergestream.data.datasets import source_of
from mergestream.methods import list_methods
from mergestream.methods.spelling import parse_variants

HEAD_INITS = ("shared", "independent")
OURS, PAPER = "merge_and_fit", "entropy_adaptive"
COMPARED = ("mean", "ensemble", PAPER, OURS)
MAIN_STREAMS = ("iid", "dirichlet:0.05")
OTHER_STREAMS = ("dirichlet:0.5", "note:0.1", "sorted")
MIXTURES = ("mixture:smooth", "mixture:abrupt")
# Streams of real life: kinds of stages, each with batches of several sizes.
LIFE = ("prevalence", "missing", "slides", "recurrence", "lone", "sizes", "long")
SLIDES = ("midog",)  # sets that name the slide of each image
LOUD = 100.0  # factor of the hostile expert's head
# What the bars of a data set are about, and the loss that its pools are trained with.
METRICS = {"pacs": ("accuracy",), "midog": ("balanced_accuracy", "auroc")}
LOSS = {"pacs": "plain", "midog": "weighted"}


@dataclass(frozen=True)
class PoolRecipe:
    """One pool: all domains of a data set, trained from one seed."""

    dataset: str
    head_init: str
    loss: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.dataset}-{self.head_init}-{self.loss}-{self.seed}"


@dataclass(frozen=True)
class Stage:
    """Pools of one data set that go through the same benchmarks; `plans` are options of a BenchPlan each."""

    name: str
    kind: str
    pools: tuple[PoolRecipe, ...]
    plans: tuple[Mapping[str, Any], ...]
    draws_at: int | None = None  # the batch size with intervals; all by default


@dataclass(frozen=True)
class Study:
    """All numbers of the study. `fits`: options of the training recipe by data set; the rest: see plans.toml."""

    network: str
    arguments: Mapping[str, Sequence[str]]
    fits: Mapping[str, Mapping[str, Any]]
    seeds: Sequence[int]
    batch_size: int
    batch_sizes: Sequence[int]
    fixed_images: int
    life_batch_sizes: Sequence[int]
    prevalences: Sequence[float]
    long_steps: int
    resamples: int
    statistics: Mapping[str, int]
    ablation: str
    choose: bool = True  # each pool's method for 'auto', nested in the targets

    def pools(self, dataset: str) -> tuple[PoolRecipe, ...]:
        """Head starts × seeds; of a set with a weighted loss also one pool with a plain one."""
        pools = [PoolRecipe(dataset, start, LOSS[dataset], seed) for start in HEAD_INITS for seed in self.seeds]
        plain = [] if LOSS[dataset] == "plain" else [PoolRecipe(dataset, "independent", "plain", 0)]
        return (*pools, *plain)

    def stages(self, *, half: bool) -> list[Stage]:
        """All benchmark stages in the order in which they run; `half`: weights in bfloat16, as on a GPU."""
        stages = []
        for dataset, loss in LOSS.items():
            every = self.pools(dataset)
            for start in HEAD_INITS:
                own = tuple(pool for pool in every if pool.head_init == start)
                stages.append(Stage(f"main-{dataset}-{start}", "main", own, self._main(MAIN_STREAMS, half=half)))
            first, usual = every[:1], tuple(pool for pool in every if pool.loss == loss)
            common = {"variants": parse_variants(", ".join(COMPARED)), **self._common(half=half)}
            mixed = {"streams": MIXTURES, "targets": ring_of(dataset)}
            sizes = {"batch_sizes": tuple(self.batch_sizes), "images": self.fixed_images}
            ablation = {"variants": parse_variants(self.ablation), "streams": MAIN_STREAMS}
            timed = {"timed": True, "targets": source_of(dataset).card.domains[:1], "every_expert": False}
            stages += [
                Stage(f"streams-{dataset}", "streams", usual, ({**common, "streams": OTHER_STREAMS}, common | mixed)),
                Stage(f"batches-{dataset}", "batches", usual, (common | sizes,)),
                Stage(f"ablation-{dataset}", "ablation", usual, (common | ablation,)),
                Stage("costs", "costs", first, tuple({**plan, **timed} for plan in self._main(("iid",), half=half))),
                Stage("hostile", "hostile", first, ({**common, "loud_heads": (1.0, LOUD)},)),
            ]
            stages += self._life(dataset, usual, common)
        return stages

    def _life(self, dataset: str, pools: tuple[PoolRecipe, ...], common: Mapping[str, Any]) -> list[Stage]:
        """Streams of real life, in batches of all sizes; the long one of a single pool, target and batch size."""
        card = source_of(dataset).card
        streams = {
            "prevalence": tuple(f"prevalence:{share:g}" for share in self.prevalences),
            # Without one of two classes there is nothing left to tell apart.
            "missing": ("missing:1", "missing:3") if len(card.classes) > 3 else (),
            "slides": ("slides",) if dataset in SLIDES else (),
            "lone": ("lone",),
            "sizes": (MAIN_STREAMS[1], *OTHER_STREAMS),
        }
        sizes = {"batch_sizes": tuple(self.life_batch_sizes), "images": self.fixed_images, "every_expert": False}
        plans = {kind: ({**common, **sizes, "streams": own},) for kind, own in streams.items() if own}
        several = {"streams": ("recurrence", *MIXTURES), "targets": ring_of(dataset)}
        long = {"streams": (f"long:{self.long_steps}",), "targets": card.domains[:1], "every_expert": False}
        plans |= {"recurrence": ({**common, **sizes, **several},), "long": ({**common, **long},)}
        order = [kind for kind in LIFE if kind in plans]
        own_pools = {kind: pools[:1] if kind == "long" else pools for kind in order}
        return [Stage(f"{kind}-{dataset}", kind, own_pools[kind], plans[kind], self.batch_size) for kind in order]

    def _main(self, streams: tuple[str, ...], *, half: bool) -> tuple[Mapping[str, Any], ...]:
        """All methods. RegMean++'s statistics belong to weights in full precision, so it runs in that."""
        common = {**self._common(half=half), "streams": streams}
        others = parse_variants(", ".join(name for name in list_methods() if name != "regmean_pp"))
        alone = {"variants": parse_variants("regmean_pp"), "dtype": "float32", "every_expert": False}
        return {**common, "variants": others}, {**common, **alone}

    def _common(self, *, half: bool) -> dict[str, Any]:
        return {"batch_sizes": (self.batch_size,), "dtype": "bfloat16" if half else "float32"}


def ring_of(dataset: str) -> tuple[str, ...]:
    """Every domain with the next one, in a ring: each is in two mixtures."""
    domains = source_of(dataset).card.domains
    return tuple(f"{domain}+{domains[(place + 1) % len(domains)]}" for place, domain in enumerate(domains))


RESULTS = Study(**TABLES["results"])
STUDIES = {"results": RESULTS}
