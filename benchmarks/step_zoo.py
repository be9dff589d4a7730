"""One step on the CPU for many kinds of network: ours against a naive loop over state dicts, turn by turn.

    python3 benchmarks/step_zoo.py --json step_zoo.json
    python3 benchmarks/step_zoo.py --narrow --batch 32 --networks vit_base_patch32_224,resnet50 --json step_narrow.json

All take the same batches in turns, so that whatever else the machine does slows all of them; a ratio above 1 says ours
is faster. Times are processor time: with one thread (OMP_NUM_THREADS=1) that of a quiet machine, on a busy one too.
Random weights, three experts, one flipped view. `--narrow` compares our step with experts scored in bfloat16, all in
bfloat16, and the latter with experts scored on eight images. Random networks answer one class, whatever rounding does;
so each expert there is fitted: one encoder with noise of its own, and a head fitted to a phantom hospital, whose other
images the steps answer. `same_top_1` is the share of images with the naive loop's class.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from step import Naive, _network, _same, about

import mergestream as ms
from mergestream.pool.execution import Execution
from mergestream.training.heads import fit_probe

NOISE, FITTED = 0.01, 128  # of each expert's encoder, in units of a tensor's spread; images that fit a head
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
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--narrow", action="store_true", help="bfloat16, too")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    given.network, given.arg, given.device, given.dtype = "zoo", [], "cpu", "float32"
    given.overlap = 1
    record: dict[str, Any] = {**about(given, ("hflip",)), "rows": []}
    for name in given.networks.split(","):
        row = measure(argparse.Namespace(**{**vars(given), "network": name}))
        record["rows"].append(row)
        print(f"{name:36} naive {row['naive_ms']:8.1f} ms", flush=True)
        for ours, ratio in row["ratios"].items():
            agreement = f"same top-1 {row['same_top_1'][ours]:.4f}"
            print(f"{'':36} {ours} {row[f'{ours}_ms']:8.1f} ms, {ratio:.2f} x, {agreement}", flush=True)
        if given.json:
            given.json.write_text(json.dumps(record, indent=1) + "\n")


def measure(given: argparse.Namespace) -> dict[str, Any]:
    networks = [_network(given, seed) for seed in range(given.experts)]
    preprocessing, count = networks[0].preprocessing, given.steps + given.warm_up
    if given.narrow:
        states, images = fitted(networks[0], given.experts, count * given.batch)
    else:
        states = {f"expert{k}": copy.deepcopy(network.module.state_dict()) for k, network in enumerate(networks)}
        size = (count * given.batch, 3, *preprocessing.size)
        images = torch.randint(0, 256, size, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    pool = ms.ExpertPool.from_state_dicts(states, networks[0].module, preprocessing=preprocessing)
    runs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "naive": Naive(networks[0], list(states.values()), ("hflip",), "cpu")
    }
    if given.narrow:
        runs["bfloat16_scores"] = stepper(pool.to(execution=Execution(narrow_scores=True)))
        runs["bfloat16"] = stepper(pool.to(dtype=torch.bfloat16))
        runs["bfloat16_8"] = stepper(pool.to(dtype=torch.bfloat16), score_images=8)
    else:
        runs["eager"] = stepper(pool)
    times: dict[str, list[float]] = {name: [] for name in runs}
    answers: dict[str, list[torch.Tensor]] = {name: [] for name in runs}
    for number, batch in enumerate(images.split(given.batch)):
        for name in list(runs) if number % 2 else list(runs)[::-1]:
            began = time.process_time()
            answers[name].append(runs[name](batch))
            if number >= given.warm_up:
                times[name].append(time.process_time() - began)
    ours = [name for name in runs if name != "naive"]
    # The median of ratios of neighbours, not the ratio of medians: what disturbs a turn disturbs both.
    pairs = {name: zip(times["naive"], times[name], strict=True) for name in ours}
    ratios = {name: statistics.median(a / b for a, b in pair) for name, pair in pairs.items()}
    same = {name: _same(torch.cat(answers["naive"]), torch.cat(answers[name])) for name in ours}
    return {
        "network": given.network,
        **{f"{name}_ms": 1000 * statistics.median(values) for name, values in times.items()},
        "times_the_rival": ratios[ours[0]],
        "ratios": ratios,
        "same_top_1": same,
        "classes_answered": len(torch.cat(answers["naive"]).argmax(dim=-1).unique()),
        "timings": {name: [round(1000 * value, 3) for value in values] for name, values in times.items()},
    }


def fitted(network: Any, experts: int, count: int) -> tuple[dict[str, dict[str, torch.Tensor]], torch.Tensor]:
    """Experts' state dicts, and images [count,3,h,w] of the phantom hospitals in turn that no head was fitted to."""
    start, data = copy.deepcopy(network.module.state_dict()), ms.load_dataset("phantom")
    states = {}
    for k, name in enumerate(data.domains[:experts]):
        generator = torch.Generator().manual_seed(k)
        noisy = {
            key: value + NOISE * value.std() * torch.randn(value.shape, generator=generator)
            if value.is_floating_point() and value.numel() > 1
            else value
            for key, value in start.items()
        }
        network.module.load_state_dict(noisy)
        site = data[name]
        inputs = (network.preprocessing(part) for part in site.batch(range(FITTED)).split(32))
        states[name] = {**noisy, **fit_probe(network, inputs, site.labels[:FITTED])}
    places = [range(FITTED + n, FITTED + n + 1) for n in range(-(-count // len(data.domains)))]
    images = torch.cat([data[name].batch(place) for place in places for name in data.domains])
    return states, images[:count]


def stepper(pool: ms.ExpertPool, **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    method = ms.create_method("entropy_adaptive", pool, **options)
    return lambda batch: method.step(batch).logits


if __name__ == "__main__":
    main()
