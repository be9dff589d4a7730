"""What the paper's tables and figure ran, as plans. Network and data set are those of the pool and the root given.

The paper's Tables 1 and 2 are its main comparison (two networks, medical and natural sets), Table 3 the ablation under
class skew, Figure 4 the streams. Nothing is tuned per data set.
"""

from dataclasses import dataclass

from mergestream.bench.engine.variants import Variant

# In the paper's order; its DiWA is the mean of the experts, its RegMean is RegMean++.
COMPARISON = (
    "ensemble",
    "mean",
    "ties",
    "adamerging",
    "task_arithmetic",
    "regmean_pp",
    "fisher",
    "entropy_adaptive",
)
ABLATION = (
    Variant("mean"),
    Variant("entropy_adaptive", (("head", "shared"),)),  # entropy only
    Variant("entropy_adaptive", (("encoder", "uniform"),)),  # decoupled head only
    Variant("entropy_adaptive"),  # both
    Variant("entropy_adaptive", (("momentum", 0.9),)),
    Variant("entropy_adaptive", (("views", ()),)),
)


@dataclass(frozen=True)
class Preset:
    """What a table ran: methods and streams; three seeds, batches of 32."""

    title: str
    variants: tuple[Variant, ...]
    streams: tuple[str, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    batch_size: int = 32


_MAIN = tuple(Variant(name) for name in COMPARISON)
PRESETS: dict[str, Preset] = {
    "paper-table1": Preset("main comparison, i.i.d. streams", _MAIN, ("iid",)),
    "paper-table2": Preset("main comparison, i.i.d. streams", _MAIN, ("iid",)),
    "paper-table3": Preset("ablation under class skew", ABLATION, ("dirichlet:0.05",)),
    "paper-fig4": Preset("streams", _MAIN, ("iid", "dirichlet:0.5", "dirichlet:0.05", "note:0.1")),
}
