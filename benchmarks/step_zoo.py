"""One step on the CPU for many kinds of network: ours against a naive loop over state dicts, turn by turn.

    python3 benchmarks/step_zoo.py --json step_zoo.json

Both take the same batches in turns, so that whatever else the machine does slows both; a ratio above 1 says ours is
faster. Random weights, three experts, one flipped view.
"""

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from step import Naive, _network, _same, about

import mergestream as ms

ZOO = (
    "vit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "swin_tiny_patch4_window7_224",
    "pvt_v2_b0",
    "mobilevit_xxs",
    "resnet18",
    "resnet50",
    "regnety_002",
    "densenet121",
    "efficientnet_lite0",
    "mobilenetv3_small_050",
    "convnext_atto",
    "mixer_s32_224",
    "torchvision:resnet18",
    "torchvision:shufflenet_v2_x0_5",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--networks", default=",".join(ZOO))
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.network, given.arg, given.device, given.dtype = "zoo", [], "cpu", "float32"
    given.overlap = 1
    found: dict[str, Any] = {**about(given, ("hflip",)), "rows": []}
    for name in given.networks.split(","):
        row = measure(argparse.Namespace(**{**vars(given), "network": name}))
        found["rows"].append(row)
        line = (
            f"{name:36} naive {row['naive_ms']:8.1f} ms, ours {row['eager_ms']:8.1f} ms, {row['times_the_rival']:.2f} x"
        )
        print(f"{line}, same predictions {row['same_predictions']:.2f}", flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")


def measure(given: argparse.Namespace) -> dict[str, Any]:
    networks = [_network(given, seed) for seed in range(given.experts)]
    preprocessing = networks[0].preprocessing
    states = {f"expert{k}": copy.deepcopy(network.module.state_dict()) for k, network in enumerate(networks)}
    pool = ms.ExpertPool.from_state_dicts(states, networks[0].module, preprocessing=preprocessing)
    method = ms.create_method("entropy_adaptive", pool)
    naive = Naive(networks[0], list(states.values()), ("hflip",), "cpu")
    size = (given.steps + 2, given.batch, 3, *preprocessing.size)
    images = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    times: dict[str, list[float]] = {"naive": [], "eager": []}
    answers: dict[str, Any] = {}
    for number, batch in enumerate(images):
        for name in ("naive", "eager") if number % 2 else ("eager", "naive"):
            began = time.perf_counter()
            answers[name] = naive(batch) if name == "naive" else method.step(batch).logits
            if number >= 2:
                times[name].append(time.perf_counter() - began)
    # The median of ratios of neighbours, not the ratio of medians: what disturbs a turn disturbs both.
    ratios = [a / b for a, b in zip(times["naive"], times["eager"], strict=True)]
    return {
        "network": given.network,
        **{f"{name}_ms": 1000 * statistics.median(values) for name, values in times.items()},
        "times_the_rival": statistics.median(ratios),
        "same_predictions": _same(answers["naive"], answers["eager"]),
        "timings": {name: [round(1000 * value, 3) for value in values] for name, values in times.items()},
    }


if __name__ == "__main__":
    main()
