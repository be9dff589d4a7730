"""What the paper claims, checked on the demo's hospitals: every table of docs/claims.md.

    mergestream demo --out demo
    mergestream bench --dataset phantom --data-option images=1000 --pool demo/pool --pool demo/pool-seed1 \
        --pool demo/pool-seed2 --streams iid,dirichlet:0.05 --out layer-wise --methods \
        'mean, entropy_adaptive(head=entropy_gap|shared), adamerging(granularity=layer, learning_rate=0.001|0.01)'
    python benchmarks/claims.py demo --layer-wise layer-wise --out claims

Under --out it trains what the demo does not keep, with the demo's recipe: experts from random starts (each its own, and
one for all), and the checkpoints of one run. About 4 minutes on a core; what is there is not done again.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from mergestream.bench.analysis.collection import collect
from mergestream.bench.claims.checkpoint_claims import Answers, answers_of_pools, answers_of_runs, check_checkpoints
from mergestream.bench.claims.claim_checks import check_claims
from mergestream.bench.claims.claim_figures import draw_scores_and_errors
from mergestream.bench.claims.claim_tables import claims_by_stream
from mergestream.bench.claims.evidence import evidence_of_runs
from mergestream.bench.claims.gain_claims import check_gains
from mergestream.bench.claims.start_claims import check_starts
from mergestream.bench.demo.demo import FULL, MICRO, NETWORK
from mergestream.bench.drift.pool_drift import analyse_drift
from mergestream.bench.report.figures import new_figure
from mergestream.bench.report.result_table import to_markdown
from mergestream.data.datasets import Dataset, load_dataset
from mergestream.networks.architecture import from_architecture
from mergestream.pool.checkpoint import open_weights, write_expert
from mergestream.pool.expert_card import BASE, ExpertCard, read_card
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.seeding import cpu_threads
from mergestream.training import fit, train_expert, write_start

RECIPE = replace(FULL.expert, seed=0)
STEPS = (100, 200, 300, 400, 500, 600)
LATE = (400, 500, 600)
OTHERS = ((500, 600), (200, 400, 600), (100, 300, 600), (100, 200, 300))


def train_starts(out: Path, data: Dataset) -> None:
    """out/random: a random start for each site; out/one-random: the first of them for all."""
    for number, site in enumerate(data.domains):
        start = out / f"start{number}" / BASE
        if not start.exists():
            write_start(start, NETWORK, MICRO, data.classes, None, "shared", 100 + number)
        train_expert(out / "random" / site, start, data[site], RECIPE)
        train_expert(out / "one-random" / site, out / "start0" / BASE, data[site], RECIPE)


def train_epochs(out: Path, base: Path, data: Dataset, site: str) -> None:
    """out/step100, out/step200, ...: the demo's own run of this site, as it was on the way."""
    card = read_card(base)
    network = from_architecture(card.architecture)
    network.module.load_state_dict(dict(open_weights(base, card)))

    def keep(line: dict[str, float]) -> None:
        if int(line["step"]) in STEPS:
            state = {name: tensor.detach().clone() for name, tensor in network.module.state_dict().items()}
            own = ExpertCard.for_network(site, network, data.classes, domain=site)
            write_expert(out / f"step{int(line['step'])}" / site, state, own)

    fit(network, data[site], RECIPE, on_validation=keep)


def answers_at(out: Path, data: Dataset, steps: tuple[int, ...]) -> Answers:
    pools = [ExpertPool.load(out / f"step{step}") for step in steps]
    found: dict[str, torch.Tensor] = {}
    for target in data.domains:
        found |= answers_of_pools(pools, data[target])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("demo", type=Path)
    parser.add_argument("--layer-wise", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    data = load_dataset("phantom", images=FULL.images)
    with cpu_threads(1):
        train_starts(given.out, data)
        for site in data.domains:
            if not (given.out / f"step{STEPS[-1]}" / site).exists():
                train_epochs(given.out, given.demo / "pool" / BASE, data, site)
        runs = collect(given.demo).runs
        drifts = {name: analyse_drift(given.out / name) for name in ("random", "one-random")}
        findings = check_claims(
            runs,
            among_epochs=answers_at(given.out, data, LATE),
            shared_start=analyse_drift(given.demo / "pool"),
            random_start=drifts["random"],
        )
        others = {
            steps: check_checkpoints(answers_of_runs(runs), answers_at(given.out, data, steps)) for steps in OTHERS
        }
    print(to_markdown(claims_by_stream([each for each in findings if each.stream], "by stream")), "\n")
    for finding in findings:
        if finding.stream is None:
            print(f"- {finding.claim} {finding.verdict}: {finding.sentence}")
    for steps, found in others.items():
        print(f"- steps {steps}: {found[0].verdict}: {found[0].sentence}")
    for finding in check_starts(drifts["one-random"], drifts["random"]):
        print(f"- against one random start for all: {finding.verdict}: {finding.sentence}")
    print("\n" + to_markdown(claims_by_stream(check_gains(collect(given.layer_wise).runs), "layer-wise")))
    evidence = evidence_of_runs(runs)
    figure, axes = new_figure(9, 4, columns=2)
    for ax, stream in zip(axes[0], ("iid", "dirichlet:0.05"), strict=True):
        draw_scores_and_errors(ax, [each for each in evidence if each.stream == stream])
        ax.set_title(stream, loc="left")
        ax.legend(frameon=False, fontsize=8, title="expert")
    figure.savefig(given.out / "entropy-and-error.png", dpi=80)


if __name__ == "__main__":
    main()
