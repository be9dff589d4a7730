"""Settings of the better rule, compared on source domains alone: of the sources of a target, two answer the third.

    PYTHONPATH=src python3 benchmarks/real/choose.py --pacs pacs-128.zip --init vit.safetensors --out work \\
        --json choice.json

The target of a leave-one-out split has no part in its comparison, neither its images nor its expert; the same pools as
run.py's are opened, or trained where they are missing. MIDOG is not looked at: the rule is to be settled before.
"""

import argparse
import json
import runpy
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from answering import KnownLogits, TargetData, answer
from crew import side_by_side
from pools import OpenPool, Place, known_note, open_pool, train
from recipes import CANDIDATES, MAIN_STREAMS, PROFILES, PoolSpec, domains_of, pools_of

from mergestream.bench.engine.pool_at_target import method_of
from mergestream.bench.engine.variants import parse_variants

DATASET = "pacs"
Row = dict[str, Any]


def main() -> None:
    given = arguments()
    place = Place(given.out, ((DATASET, given.pacs.resolve()),), given.init, given.device, PROFILES[given.profile])
    rows: list[Row] = []
    asked = [spec for spec in pools_of(place.profile, DATASET) if spec.seed in given.seeds]
    missing = [spec for spec in asked if known_note(place, spec) is None]
    for _ in side_by_side(train, missing, given.jobs, place, key=lambda spec: spec):
        pass
    tasks = [(spec, shown) for spec in asked for shown in domains_of(DATASET)]
    for number, (_, found) in enumerate(side_by_side(shown_to_pairs, tasks, given.jobs, place, key=first), start=1):
        rows += found
        print(f"[{number}/{len(tasks)}]", flush=True)
    print(table(rows), flush=True)
    about = runpy.run_path(str(Path(__file__).parents[1] / "provenance.py"))["provenance"](given.device)
    if given.json:
        given.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def shown_to_pairs(place: Place, task: tuple[PoolSpec, str]) -> list[Row]:
    spec, shown = task
    return list(compare(open_pool(place, spec), shown, CANDIDATES, place))


def first(task: tuple[PoolSpec, str]) -> PoolSpec:
    return task[0]


def compare(opened: OpenPool, shown: str, candidates: dict[str, str], place: Place) -> Iterator[Row]:
    """Percent right of every candidate on a domain, for every other target by the pair of experts that is left."""
    data = TargetData.of([opened.dataset[shown]], place.device)
    labels = torch.from_numpy(data.labels).to(data.images.device)
    for target in opened.dataset.domains:
        if target == shown:
            continue
        pool = opened.sources((shown, target))
        known = KnownLogits(pool, data.images)
        for name, spelt in candidates.items():
            method = method_of(parse_variants(spelt)[0], pool, opened.dataset)
            for stream in MAIN_STREAMS:
                batches = data.stream(stream, batch_size=place.profile.batch_size, seed=opened.spec.seed)
                found = answer(method, data.images, known.for_method(method), batches).logits.argmax(dim=-1)
                yield {
                    "head_init": opened.spec.head_init, "seed": opened.spec.seed, "target": target, "shown": shown,
                    "experts": list(pool.names), "candidate": name, "method": spelt, "stream": stream,
                    "accuracy": round(100 * float((found == labels).float().mean()), 3),
                }  # fmt: skip


def table(rows: list[Row]) -> str:
    """Mean accuracy of each candidate by head start and stream, and for how many targets it is the best."""
    cells: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    by_target: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        column = (row["head_init"], row["stream"])
        cells[column][row["candidate"]].append(row["accuracy"])
        by_target[(*column, row["target"])][row["candidate"]].append(row["accuracy"])
    best = [max(found, key=lambda name: _mean(found[name])) for found in by_target.values()]
    lines = [" | ".join(["candidate", *(" ".join(column) for column in cells), "best of targets"])]
    for name in dict.fromkeys(row["candidate"] for row in rows):
        shown = [f"{_mean(found[name]):.2f}" for found in cells.values()]
        lines.append(" | ".join([name, *shown, f"{best.count(name)} of {len(best)}"]))
    return "\n".join(lines)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pacs", type=Path, required=True)
    parser.add_argument("--init", required=True, help="the encoder's first weights: safetensors, or random")
    parser.add_argument("--out", type=Path, required=True, help="where run.py keeps its pools")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--jobs", type=int, default=1, help="processes on the GPU; more than one wants NVIDIA's MPS")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--profile", default="real", choices=tuple(PROFILES))
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
