"""What `mergestream reproduce` runs: parts of the paper, their data sets and backbones, and two sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mergestream.bench.engine.plan import DEVICES, PLANS, TABLES, BenchPlan, numbers, plan_from
from mergestream.bench.reproduction.dataset_search import DatasetPlace, find_datasets, write_standins
from mergestream.bench.reproduction.paper_values import ABLATION_ROWS, BACKBONES, DATASETS, ROWS
from mergestream.data.datasets import DataRequest
from mergestream.methods import METHODS
from mergestream.methods.spelling import Variant, parse_variants
from mergestream.runtime.errors import InputError, unknown_name
from mergestream.runtime.option_checks import one_of, whole_number
from mergestream.runtime.parallel import ENGINES

RECIPE = "paper"  # of training, in training.recipe
TARGET = "art_painting"  # of Figures 2, 3 and 5
PARTS = {
    "table1": "Tables 1 and 2: the main comparison",
    "table3": "Table 3: ablation",
    "sweep": "The rule with other mu and tau",
    "fig2": "Figure 2: drift by layer",
    "fig3": "Figure 3: loss landscape",
    "fig4": "Figure 4: accuracy against class skew",
    "fig5": "Figure 5: angles of every pair",
    "cost": "Cost",
}
ALIASES = {"table2": "table1"}  # one comparison, printed as two tables
PACS = ("pacs",)
SETS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(PARTS, PACS),
    "table1": tuple(DATASETS),
    **dict.fromkeys(("table3", "sweep", "fig4"), ("pacs", "organs")),
}
PRESETS = {
    "table1": "paper-table1",
    "table3": "paper-table3",
    "sweep": "paper-sweep",
    "fig4": "paper-fig4",
    "cost": "paper-table1",
}
# Rows of the presets, by position: what the paper calls them; the rest of a preset is ours.
ROW_NAMES = {
    "paper-table1": ROWS,
    "paper-fig4": ROWS,
    "paper-table3": ("DiWA", *ABLATION_ROWS),
    "paper-sweep": ("DiWA",),
}


@dataclass(frozen=True)
class ReproductionSize:
    """How much of everything; the first is the paper's, the second a rehearsal on invented pictures."""

    recipe: Mapping[str, Any]  # what replaces the options of the recipe 'paper'
    statistics: Mapping[str, int]  # images per expert: gram_pp for RegMean++, fisher for Fisher merging
    seeds: str  # of the streams
    batch_size: int
    landscape: int  # networks along each side of the plane
    landscape_images: int
    init: str
    arguments: Mapping[str, Sequence[str]]  # of the networks, by backbone
    sets_at_once: bool  # one process per data set: starting processes takes longer than the work


FULL, SMOKE = (ReproductionSize(**TABLES["reproduction"][name]) for name in ("full", "smoke"))


@dataclass(frozen=True)
class ReproductionRequest:
    """All choices of one reproduction."""

    out: Path
    places: tuple[DatasetPlace, ...]
    parts: tuple[str, ...]
    backbones: tuple[str, ...]
    smoke: bool
    init: str
    arguments: tuple[str, ...] = ()
    settings: str | None = None  # recipes to try at every site, as in `train`; the paper's sweep by default
    steps: int | None = None
    training_seeds: tuple[int, ...] = (0,)
    device: str = "auto"
    jobs: int = 1
    engine: str = "local"

    def __post_init__(self) -> None:
        """Refuse before hours of work what a later stage would refuse."""
        whole_number("jobs", self.jobs, low=1)
        one_of("device", self.device, DEVICES)
        one_of("engine", self.engine, ENGINES)
        for what, values in {"training seed": self.training_seeds, "backbone": self.backbones}.items():
            if not values or len(set(values)) != len(values):
                raise InputError(f"Name each {what} once; got {', '.join(map(str, values)) or 'none'}.")
        for init in map(self.init_of, self.backbones):
            if init not in ("pretrained", "random") and not Path(init).is_file():
                raise InputError(f"--init {init} is no file of weights, 'pretrained' or 'random'.")

    @property
    def size(self) -> ReproductionSize:
        return SMOKE if self.smoke else FULL

    @property
    def usable(self) -> list[DatasetPlace]:
        return [place for place in self.places if place.root is not None]

    def parts_of(self, dataset: str, backbone: str) -> list[str]:
        """Tables 1 and 2 have every backbone, the rest of the paper the first one."""
        own = ("table1", *(self.parts if backbone == self.backbones[0] else ()))
        return [part for part in self.parts if dataset in SETS[part] and part in own]

    def init_of(self, backbone: str) -> str:
        """First weights of an encoder: the same words for all, or BACKBONE=FILE for some, separated by commas."""
        names = tuple(f"{name}=" for name in self.backbones)
        named = dict(item.split("=", 1) for item in self.init.split(",") if item.startswith(names))
        return named.get(backbone, self.size.init) if named else self.init

    def pool_folder(self, dataset: str, backbone: str, seed: int | None = None) -> Path:
        """The pool of a training seed, by default the first."""
        seed = self.training_seeds[0] if seed is None else seed
        return self.out / "pools" / f"{dataset}-{backbone}-{seed}"

    def recipe(self, seed: int) -> dict[str, Any]:
        """What replaces the options of the recipe 'paper' in a pool."""
        given = {"settings": self.settings, "steps": self.steps}
        chosen = {name: value for name, value in given.items() if value is not None}
        return {"accelerator": self.device, **self.size.recipe, **chosen, "seed": seed}

    def network_arguments(self, backbone: str) -> tuple[str, ...]:
        return (*self.size.arguments.get(backbone, ()), *self.arguments)

    def data(self, place: DatasetPlace) -> DataRequest:
        return DataRequest(place.name, place.root)

    def seeds_of(self, part: str) -> tuple[int, ...]:
        """Training seeds; the cost is that of one pool."""
        return self.training_seeds[:1] if part == "cost" else self.training_seeds

    def statistics(self) -> dict[str, int]:
        """Images per expert by the kinds of statistics that the main comparison's methods read."""
        fisher = next(variant for variant in rows_of_preset("paper-table1") if variant.method == "fisher")
        counts = self.size.statistics
        kind = dict(fisher.options).get("fisher", METHODS["fisher"]._parameters()["fisher"].default)
        return {"gram_pp": counts["gram_pp"], f"fisher_{kind}": counts["fisher"]}

    def bench_plan(self, part: str, place: DatasetPlace, backbone: str) -> BenchPlan:
        """The paper's preset for one part, data set and backbone. A method that cannot run is an error."""
        plan = plan_from(
            data=self.data(place),
            pools=[str(self.pool_folder(place.name, backbone, seed)) for seed in self.seeds_of(part)],
            plan=PRESETS[part],
            seeds="0" if part == "cost" else self.size.seeds if self.smoke else None,
            batch_sizes=str(self.size.batch_size),
            device=self.device,
            timed=part == "cost",
            every_expert=part == "table1",
        )
        return replace(plan, skip_impossible=False)


def rows_of_preset(preset: str) -> dict[Variant, str]:
    """The preset's methods in order, by the paper's name of the row; a method that the paper lacks by its own."""
    variants, names = parse_variants(PLANS[preset]["methods"]), ROW_NAMES[preset]
    return {variant: names[i] if i < len(names) else str(variant) for i, variant in enumerate(variants)}


def request_from(
    *,
    data: Path | None,
    out: Path,
    only: str | None,
    backbones: str | None,
    sets: str | None,
    seeds: str | None,
    smoke: bool,
    **more: Any,
) -> ReproductionRequest:
    """Parse a request from the words of a command line, and look for the data sets."""
    if (data is None) is not smoke:
        raise InputError("Give --data, the folder of the data sets, or --smoke, which invents its own.")
    parts = [ALIASES.get(name, name) for name in _names(only, PARTS)]
    parts = [part for part in PARTS if part in parts]
    for part in _names(only, ()):
        if ALIASES.get(part, part) not in PARTS:
            raise unknown_name("part of the paper", part, (*PARTS, *ALIASES))
    chosen = _names(sets, DATASETS)
    for name in chosen:
        if name not in DATASETS:
            raise unknown_name("data set of the paper", name, DATASETS)
    needed = tuple(name for name in DATASETS if name in chosen and any(name in SETS[part] for part in parts))
    if not needed:
        raise InputError(f"{', '.join(parts)} needs one of {', '.join(SETS[parts[0]])}: see --sets.")
    out = out.resolve()
    training_seeds = numbers("Training seeds", seeds or "0", int)
    if smoke:
        write_standins(out / "standins", needed)
    places = tuple(find_datasets(out / "standins" if data is None else data, needed))
    networks = tuple(_names(backbones, BACKBONES))
    return ReproductionRequest(out, places, tuple(parts), networks, smoke, training_seeds=training_seeds, **more)


def _names(text: str | None, default: Any) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()] if text else list(default)
