"""The paper's tables and figure as plans; network and data set are those of the pool and the root given.

The paper's Tables 1 and 2 are one comparison on two groups of data sets, so one plan serves both; Table 3 is the
ablation under class skew, Figure 4 the streams. Nothing is tuned per data set.
"""

from dataclasses import dataclass

from mergestream.bench.engine.variants import Variant, parse_variants

# In the paper's order; its DiWA is the mean of the experts, its RegMean is RegMean++.
COMPARISON = parse_variants(
    "ensemble, mean, ties, adamerging, task_arithmetic, regmean_pp, fisher, entropy_adaptive",
)
# Entropy only, decoupled head only, both, and both with another momentum or without views.
ABLATION = parse_variants(
    "mean, entropy_adaptive(head=shared), entropy_adaptive(encoder=uniform), entropy_adaptive, "
    "entropy_adaptive(momentum=0.9), entropy_adaptive(views=())"
)


@dataclass(frozen=True)
class NamedPlan:
    """Methods and streams of one table; three seeds, batches of 32."""

    title: str
    variants: tuple[Variant, ...]
    streams: tuple[str, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    batch_sizes: tuple[int, ...] = (32,)


PLANS: dict[str, NamedPlan] = {
    "paper-table1": NamedPlan("main comparison, i.i.d. streams; the paper's Table 2 too", COMPARISON, ("iid",)),
    "paper-table3": NamedPlan("ablation under class skew", ABLATION, ("dirichlet:0.05",)),
    "paper-fig4": NamedPlan("streams", COMPARISON, ("iid", "dirichlet:0.5", "dirichlet:0.05", "note:0.1")),
}
