"""What the service's engine adds to a step: guards, hashes, record, log and state file, beside the method alone.

    python3 benchmarks/engine_step.py --network vit_base_patch32_224 --device cuda --dtype bfloat16 --json step.json

An engine over three experts with random weights answers a batch of pictures again and again, in turns with
`method.step` on the same pixels. Medians, by method and by what the merged model's hash is of.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import provenance
from service import write_pool

import mergestream as ms
from mergestream.data.intake.pictures import Picture
from mergestream.serving.engine.engine import Engine
from mergestream.serving.open_engine import open_engine
from mergestream.serving.options import ServeOptions

METHODS, HASHES = ("entropy_adaptive", "merge_and_fit"), ("weights", "state")
WARM_UP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="vit_base_patch32_224")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    pictures = smooth_pictures(given.batch)
    record: dict[str, Any] = {name: getattr(given, name) for name in ("network", "device", "dtype", "batch", "steps")}
    record |= provenance()
    if given.device == "cuda":
        record["gpu"] = torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory() as folder:
        write_pool(Path(folder) / "pool", ("a", "b", "c"), given.network)
        for method in METHODS:
            for hashed in HASHES:
                state = Path(folder) / f"{method} {hashed}"
                chosen = {"device": given.device, "dtype": given.dtype, "method": method, "weights_hash": hashed}
                engine = open_engine(ServeOptions(Path(folder) / "pool", state=state, **chosen))
                record[f"{method}, {hashed}"] = measured(engine, pictures, given.steps)
                print(method, hashed, record[f"{method}, {hashed}"], flush=True)
                engine.close()
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")


def smooth_pictures(count: int) -> list[Picture]:
    """Pictures with structure, of 224 pixels."""
    coarse = torch.rand(count, 3, 9, 9, generator=torch.Generator().manual_seed(0))
    pixels = torch.nn.functional.interpolate(coarse, 224, mode="bicubic").clamp(0, 1).mul(255).to(torch.uint8)
    return [Picture(each.numpy(), f"{number:064x}", f"{number:064x}") for number, each in enumerate(pixels)]


def measured(engine: Engine, pictures: list[Picture], steps: int) -> dict[str, float]:
    """Milliseconds of the engine and of the method alone, in turns."""
    lineup = engine.lineup
    method = ms.create_method(lineup.method, lineup.active)
    pixels = torch.from_numpy(np.stack([picture.pixels for picture in pictures]))

    def alone() -> None:
        method.step(pixels)
        method.settle()

    served, direct = [], []
    for number in range(WARM_UP + steps):
        times = [seconds(lambda: engine.answer("ward", pictures)), seconds(alone)]
        if number >= WARM_UP:
            served.append(times[0])
            direct.append(times[1])
    ours, theirs = statistics.median(served), statistics.median(direct)
    return {"engine_ms": 1000 * ours, "method_ms": 1000 * theirs, "ratio": ours / theirs}


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
