"""What is run, in one place: networks, training recipes, pools, methods, streams, ablations. Nothing is tuned here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mergestream.data.datasets import source_of
from mergestream.methods import list_methods
from mergestream.training import Recipe

HEAD_INITS = ("shared", "independent")
# The better rule. --ours names another.
OURS = "prior_adaptive"
PAPER = "entropy_adaptive"
RIVALS = ("mean", "ensemble", PAPER)
MAIN_STREAMS = ("iid", "dirichlet:0.05")
OTHER_STREAMS = ("dirichlet:0.5", "note:0.1", "sorted")
MIXTURES = ("mixture:smooth", "mixture:abrupt")
# What the bars of a data set are about: these get resamples, all others are numbers only.
METRICS = {"pacs": ("accuracy",), "midog": ("balanced_accuracy", "auroc")}
LOUDNESS = 100.0  # of the hostile expert's head
# Names of rows, and the options that make them.
ABLATION = {
    "full": "entropy_adaptive",
    "encoder only": "entropy_adaptive(head_sharpness=0)",
    "head only": "entropy_adaptive(encoder=uniform)",
    "shared head": "entropy_adaptive(head=shared)",
    "select": "entropy_adaptive(head=select)",
    "momentum 0.9": "entropy_adaptive(momentum=0.9)",
    "temperature card": "entropy_adaptive(temperature=card)",
    "no views": "entropy_adaptive(views=())",
    "softmax weighting": "entropy_adaptive(weighting=softmax)",
}
# Settings that choose.py compares on sources.
CANDIDATES = {
    "mean": "mean",
    "ensemble": "ensemble",
    "the paper's": "entropy_adaptive",
    "ours": "prior_adaptive",
    "anchor 0": "prior_adaptive(anchor=0)",
    "anchor 0.5": "prior_adaptive(anchor=0.5)",
    "anchor 0.75": "prior_adaptive(anchor=0.75)",
    "temperature 1": "prior_adaptive(temperature=1)",
    "head not fitted": "prior_adaptive(refit=False)",
    "not scaled": "prior_adaptive(match_scale=False)",
    "neither": "prior_adaptive(refit=False, match_scale=False)",
    "fitted from 128": "prior_adaptive(refit_before=128)",
    "one view": "prior_adaptive(views=())",
    "momentum 0.9": "prior_adaptive(momentum=0.9)",
    "uniform": "prior_adaptive(encoder=uniform, head=shared)",
}
# The ablation of ours: name -> method with options, as above.
OURS_ABLATION: dict[str, str] = {
    "ours": "prior_adaptive",
    "ours, scored by entropy alone": "prior_adaptive(score=entropy)",
    "ours, uniform coefficients": "prior_adaptive(encoder=uniform, head=shared)",
    "ours, head not fitted": "prior_adaptive(refit=False)",
    "ours, not scaled": "prior_adaptive(match_scale=False)",
    "ours, neither": "prior_adaptive(refit=False, match_scale=False)",
    "ours, weights left on": "prior_adaptive(untilt=False)",
    "ours, one view": "prior_adaptive(views=())",
    "ours, anchor 0": "prior_adaptive(anchor=0)",
    "ours, anchor 0.5": "prior_adaptive(anchor=0.5)",
}


@dataclass(frozen=True)
class SetRecipe:
    """How the experts of one data set are trained. Losses beside the first are trained for independent seed 0 alone."""

    arguments: tuple[str, ...]
    losses: tuple[str, ...]
    fit: Mapping[str, Any]


@dataclass(frozen=True)
class Profile:
    """All numbers of one benchmark."""

    name: str
    network: str
    sets: Mapping[str, SetRecipe]
    seeds: tuple[int, ...] = (0, 1, 2)
    batch_size: int = 32
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    fixed_images: int = 1000  # a target, for the batch sizes
    resamples: int = 500
    # Of each expert's own training images, for methods that merge by statistics. Fisher takes a gradient per class.
    statistics: Mapping[str, int] = field(default_factory=lambda: {"gram": 256, "fisher_exact": 64, "gram_pp": 256})
    timed_steps: int = 100


REAL = Profile(
    "real",
    "vit_small_patch14_dinov2",
    {
        "pacs": SetRecipe(("img_size=126",), ("plain",), {"steps": 500, "batch_size": 64, "learning_rate": 1e-5}),
        "midog": SetRecipe(
            ("img_size=84",),
            ("weighted", "plain"),
            {
                "steps": 300,
                "batch_size": 64,
                "learning_rate": 3e-5,
                "optimiser": "adamw",
                "schedule": "cosine",
                "augmentation": 0.0,
                "validate_every": 50,
            },
        ),
    },
)
_TINY = ("img_size=16", "patch_size=8", "embed_dim=16", "depth=2", "num_heads=2")
_QUICK = {"steps": 3, "batch_size": 8, "learning_rate": 1e-3, "validate_every": 3}
# For tests: everything passes through, nothing is learnt. Its records are tries.
MICRO = Profile(
    "micro",
    "vit_tiny_patch16_224",
    {"pacs": SetRecipe(_TINY, ("plain",), _QUICK), "midog": SetRecipe(_TINY, ("weighted", "plain"), _QUICK)},
    seeds=(0,),
    batch_size=4,
    batch_sizes=(1, 4),
    fixed_images=6,
    resamples=20,
    statistics={"gram": 8, "fisher_exact": 4, "gram_pp": 8},
    timed_steps=2,
)
PROFILES = {profile.name: profile for profile in (REAL, MICRO)}


@dataclass(frozen=True)
class PoolSpec:
    """One pool: all domains of a data set, trained from one seed."""

    dataset: str
    head_init: str
    loss: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.dataset}-{self.head_init}-{self.loss}-{self.seed}"


def pools_of(profile: Profile, dataset: str, *, every_loss: bool = False) -> list[PoolSpec]:
    """Head starts x seeds with the set's own loss; with `every_loss` the other losses' pool, too."""
    first, *others = profile.sets[dataset].losses
    found = [PoolSpec(dataset, start, first, seed) for start in HEAD_INITS for seed in profile.seeds]
    return found + [PoolSpec(dataset, "independent", loss, 0) for loss in others if every_loss]


def recipe_of(profile: Profile, pool: PoolSpec, device: str, steps: int | None) -> Recipe:
    options = {**profile.sets[pool.dataset].fit, **({} if steps is None else {"steps": steps})}
    precision = "bf16-mixed" if device == "cuda" else "32-true"
    return Recipe(loss=pool.loss, seed=pool.seed, accelerator=device, precision=precision, **options)


def domains_of(dataset: str) -> tuple[str, ...]:
    return source_of(dataset).card.domains


def pairs_of(dataset: str) -> list[tuple[str, str]]:
    """Every domain with the next one, in a ring: each is in two mixtures."""
    domains = domains_of(dataset)
    return [(domain, domains[(place + 1) % len(domains)]) for place, domain in enumerate(domains)]


def main_methods(ours: str) -> list[str]:
    return list(dict.fromkeys([*list_methods(), ours]))


def compared_methods(ours: str) -> list[str]:
    return list(dict.fromkeys([*RIVALS, ours]))
