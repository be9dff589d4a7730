"""Settings of the better rule where classes are rare, on a CPU: PACS made uneven, pairs of sources answer a third.

    PYTHONPATH=src python3 benchmarks/real/rare.py --pacs pacs-128.zip --init vit.safetensors --out work

Experts are the last three blocks and the head of a real ViT-S/14 at 70 px (`tails.py`), trained for 200 steps on one
domain, with heads that started together and apart. As in choose.py the target of a split has no part in its comparison.
`--midog` shows instead what the rule does there: every site is answered by all others' experts, nothing is chosen.
"""

import argparse
import itertools
import json
import runpy
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scoring
import torch
from answering import answer
from recipes import HEAD_INITS, MAIN_STREAMS
from tails import VIEW, Site, answers, fit, kept_in, pool_of, sites

from mergestream.bench.engine.variants import parse_variants
from mergestream.data.streams import create_stream
from mergestream.methods import ORIGINAL, create_method
from mergestream.pool.expert_pool import ExpertPool

# Shares of its images that a class keeps, and classes that are told from the rest; a weighted loss for the latter.
THINNED = {"guitar": 0.2, "house": 0.2, "giraffe": 0.2, "elephant": 0.4}
RARE = ("guitar", "house")
TASKS = ("rare2", "thin7", "pacs7")
CANDIDATES = {
    "mean": "mean",
    "ensemble": "ensemble",
    "the paper's": "entropy_adaptive",
    "neither": "prior_adaptive(refit=False, match_scale=False, untilt=False)",
    "neither, anchor 0": "prior_adaptive(refit=False, match_scale=False, anchor=0, untilt=False)",
    "scaled": "prior_adaptive(refit=False, match_scale=True, untilt=False)",
    "refitted": "prior_adaptive(refit=True, match_scale=False, untilt=False)",
    "refitted, scaled": "prior_adaptive(refit=True, match_scale=True, untilt=False)",
    "and weights taken off": "prior_adaptive",
}
BATCH = 32
Row = dict[str, Any]


def main() -> None:
    given = arguments()
    rows: list[Row] = []
    dataset, root = ("midog", given.midog) if given.midog else ("pacs", given.pacs)
    if root is None:
        raise SystemExit("--pacs or --midog: the file with the images.")
    given.out = kept_in(given.out, root, given.init)
    domains = sites(dataset, root, given.init, given.out)
    for task in (dataset,) if given.midog else given.tasks:
        shown = {name: of_task(task, site) for name, site in domains.items()}
        for start in HEAD_INITS:
            began = time.perf_counter()
            experts = trained(task, start, shown, given)
            for row in compare(experts, shown, given):
                rows.append({"task": task, "head_init": start, **row})
            print(f"{task}, {start} heads: {time.perf_counter() - began:.0f} s", flush=True)
    print(table(rows), flush=True)
    if given.json:
        about = runpy.run_path(str(Path(__file__).parents[1] / "provenance.py"))["provenance"]()
        given.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def of_task(task: str, site: Site) -> Site:
    if task == "thin7":
        random, kept = torch.Generator().manual_seed(7), []
        for number, name in enumerate(site.classes):
            own = (site.labels == number).nonzero().flatten()
            count = max(12, int(THINNED.get(name, 1.0) * len(own)))
            kept.append(own[torch.randperm(len(own), generator=random)[:count]])
        return site.some(torch.cat(kept).sort().values)
    if task == "rare2":
        rare = torch.tensor([name in RARE for name in site.classes])
        return Site(site.tokens, rare[site.labels].long(), ("rest", "rare"))
    return site


def is_weighted(site: Site) -> bool:
    """Whether experts are trained with a class-weighted loss: where a rare class is told from the rest."""
    return len(site.classes) == 2


def trained(task: str, start: str, shown: dict[str, Site], given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Every domain's expert, fitted where it is missing."""
    experts = {}
    for name, site in shown.items():
        kept = given.out / f"{task}-{start}-{name.replace(' ', '_')}-{given.seed}.pt"
        if not kept.exists():
            torch.save(fit(site, name, start, given.init, weighted=is_weighted(site), seed=given.seed), kept)
            print(f"{kept.stem}: fitted", flush=True)
        experts[name] = torch.load(kept)
    return experts


def compare(experts: dict[str, dict[str, Any]], shown: dict[str, Site], given: argparse.Namespace) -> Iterator[Row]:
    """Scores of every candidate on every domain, by every pair of the others' experts, or by all of them."""
    first = next(iter(shown.values()))
    whole = pool_of(experts, first.classes, given.init, weighted=is_weighted(first))
    for name, site in shown.items():
        chosen = np.sort(np.random.RandomState(0).permutation(len(site.labels))[: given.images])
        few = site.some(torch.from_numpy(chosen))
        others = [other for other in experts if other != name]
        known = {view: _expert_logits(whole, few.tokens[view]) for view in (ORIGINAL, VIEW)}
        teams = [tuple(others)] if given.midog else list(itertools.combinations(others, 2))
        for team in teams:
            pool = whole.without(*(other for other in experts if other not in team))
            own = [whole.index(expert) for expert in pool.names]
            yield from scored(pool, few, {view: logits[own] for view, logits in known.items()}, name, given.seed)


def _expert_logits(pool: ExpertPool, tokens: torch.Tensor) -> torch.Tensor:
    return torch.stack([answers(pool.expert(k), tokens) for k in range(len(pool))])


def scored(pool: ExpertPool, site: Site, known: dict[str, torch.Tensor], shown: str, seed: int) -> Iterator[Row]:
    images = site.tokens[ORIGINAL].float()
    whole = torch.ones(1, len(site.labels), dtype=torch.float64)
    for candidate, spelt in CANDIDATES.items():
        variant = parse_variants(spelt)[0]
        method = create_method(variant.method, pool, **dict(variant.options))
        views = {view: known[view] for view in (ORIGINAL, *method.options().get("views", ()))}
        for stream in MAIN_STREAMS:
            batches = create_stream(stream, site.labels.numpy(), batch_size=BATCH, seed=seed)
            found = answer(method, images, views, batches).logits
            scores = scoring.scores(found, site.labels, whole, ())
            yield {
                "shown": shown, "experts": list(pool.names), "candidate": candidate, "method": spelt, "stream": stream,
                **{name: round(100 * float(value), 3) for name, value in scores.items()},
            }  # fmt: skip


def table(rows: list[Row]) -> str:
    """Mean scores of each candidate by start of heads and stream, a table a task, as Markdown."""
    tasks = dict.fromkeys(row["task"] for row in rows)
    return "\n\n".join(_table_of(task, [row for row in rows if row["task"] == task]) for task in tasks)


def _table_of(task: str, rows: list[Row]) -> str:
    shown = ("balanced_accuracy", "auroc") if task in ("rare2", "midog") else ("accuracy", "balanced_accuracy")
    cells: dict[tuple[str, str], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        cells[row["head_init"], row["stream"]][row["candidate"]].append(row)
    told = " / ".join(score.replace("_", " ") for score in shown)
    lines = [f"| {task}: {told} | " + " | ".join(", ".join(column) for column in cells) + " |"]
    lines.append("|---|" + "---:|" * len(cells))
    for name in dict.fromkeys(row["candidate"] for row in rows):
        means = [[np.mean([row[score] for row in found[name]]) for score in shown] for found in cells.values()]
        lines.append(f"| {name} | " + " | ".join(" / ".join(f"{mean:.1f}" for mean in cell) for cell in means) + " |")
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pacs", type=Path)
    parser.add_argument("--midog", type=Path)
    parser.add_argument("--init", type=Path, required=True, help="the encoder's first weights: safetensors")
    parser.add_argument("--out", type=Path, required=True, help="where tokens and experts are kept")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=TASKS)
    parser.add_argument("--images", type=int, default=1000, help="of every domain, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
