"""What a stage consists of: units small enough to lose, each a pool at a target."""

from dataclasses import dataclass

from recipes import HEAD_INITS, PoolSpec, Profile, domains_of, pairs_of, pools_of

from mergestream.runtime.errors import unknown_name

TRAIN = "train"
TIMING = "costs"  # by one process that has the device for itself


@dataclass(frozen=True)
class Unit:
    """One pool at one target (or several streamed together), or the training of one pool."""

    stage: str
    kind: str
    pool: PoolSpec
    targets: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        plain = "+".join(self.targets).replace(" ", "_")
        return f"{self.pool.name}--{plain}" if plain else self.pool.name


@dataclass(frozen=True)
class Stage:
    """Units that are run, timed and listed together; at most nine minutes on one GPU."""

    name: str
    units: tuple[Unit, ...]

    @property
    def kind(self) -> str:
        return self.units[0].kind


def stages_of(profile: Profile) -> list[Stage]:
    """All stages in the order in which they are run."""
    found = []
    for dataset in profile.sets:
        for start in HEAD_INITS:
            pools = [pool for pool in pools_of(profile, dataset, every_loss=True) if pool.head_init == start]
            name = f"{TRAIN}-{dataset}-{start}"
            found.append(Stage(name, tuple(Unit(name, TRAIN, pool) for pool in pools)))
    for kind in ("main", "streams", "batches", "ablation"):
        for dataset in profile.sets:
            # All methods take the longest: a stage a head start.
            starts = [(start,) for start in HEAD_INITS] if kind == "main" else [HEAD_INITS]
            found += [_bench(profile, kind, dataset, of) for of in starts]
    first = [pools_of(profile, dataset)[0] for dataset in profile.sets]
    costs = tuple(Unit(TIMING, TIMING, pool, (domains_of(pool.dataset)[0],)) for pool in first)
    hostile = tuple(
        Unit("hostile", "hostile", pool, (target,)) for pool in first for target in domains_of(pool.dataset)
    )
    return [*found, Stage(TIMING, costs), Stage("hostile", hostile)]


def _bench(profile: Profile, kind: str, dataset: str, starts: tuple[str, ...]) -> Stage:
    """Leave one domain out, pool by pool; mixtures leave two out."""
    name = "-".join([kind, dataset, *(starts if len(starts) == 1 else ())])
    targets: list[tuple[str, ...]] = [(domain,) for domain in domains_of(dataset)]
    targets += pairs_of(dataset) if kind == "streams" else []
    pools = [pool for pool in pools_of(profile, dataset, every_loss=kind == "main") if pool.head_init in starts]
    return Stage(name, tuple(Unit(name, kind, pool, target) for pool in pools for target in targets))


def chosen(stages: list[Stage], names: str | None) -> list[Stage]:
    """Those named, by whole names or by how they begin: 'main' is main-pacs and main-midog."""
    if names is None:
        return stages
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if not any(stage.name == name or stage.name.startswith(f"{name}-") for stage in stages):
            raise unknown_name("stage", name, [stage.name for stage in stages])
    return [s for s in stages if any(s.name == name or s.name.startswith(f"{name}-") for name in wanted)]
