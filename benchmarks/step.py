"""One step of entropy_adaptive: a naive loop over state dicts, ours eager and ours captured, beside the floor.

    python3 benchmarks/step.py --network vit_base_patch32_224 --experts 3 --batch 32 --dtype bfloat16 --json step.json

Every step sees another uint8 batch that lies on the device; views and normalisation are part of it. Random weights.
The naive loop is in float32, whatever --dtype says. On a CPU there is nothing to capture, and fast_ms is null.
"""

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from provenance import provenance
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import mergestream as ms
from mergestream.networks.architecture import create_network, logits_of
from mergestream.networks.preprocessing import views_for
from mergestream.pool.execution import Execution

PEAK_TFLOPS = {"NVIDIA H200": 790.0}  # dense bf16, as measured on the machine that is lent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="vit_base_patch32_224")
    parser.add_argument("--arg", action="append", default=[], help="name=number, an argument of the network")
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--views", default="hflip")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--naive-steps", type=int, help="of the naive loop, which needs no more", metavar="STEPS")
    parser.add_argument("--overlap", type=int, default=Execution().overlap, help="experts beside each other")
    parser.add_argument("--only", default="naive,eager,fast", help="which of the three")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    chosen = given.only.split(",")
    networks = [_network(given, seed) for seed in range(given.experts)]
    preprocessing = networks[0].preprocessing
    size = preprocessing.size
    generator = torch.Generator(given.device).manual_seed(0)
    images = torch.randint(
        0, 256, (given.steps + 5, given.batch, 3, *size), dtype=torch.uint8, generator=generator, device=given.device
    )
    views = tuple(view for view in given.views.split(",") if view)
    record: dict[str, Any] = about(given, views)
    timings: dict[str, list[float]] = {}
    states = [copy.deepcopy(network.module.state_dict()) for network in networks]
    pool = ms.ExpertPool.from_state_dicts(
        {f"expert{k}": state for k, state in enumerate(states)}, networks[0].module, preprocessing=preprocessing
    ).to(given.device, dtype=getattr(torch, given.dtype))
    record["memory_gib"] = None
    if "fast" in chosen and given.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        resting = torch.cuda.memory_allocated() - images.numel()  # the batches are the benchmark's, not the step's
        fast = pool.to(execution=Execution(overlap=given.overlap))
        method = ms.create_method("entropy_adaptive", fast, views=views)
        timings["fast"] = timed(lambda batch: method.step(batch).logits, images, given.device)
        method.settle()
        require_captured(method, given.device)
        record["memory_gib"] = (torch.cuda.max_memory_allocated() - images.numel()) / 2**30
        record["pool_gib"] = resting / 2**30
        answers = method.step(images[0]).logits
        del method
    if "eager" in chosen:
        method = ms.create_method("entropy_adaptive", pool.to(execution=Execution(capture=False)), views=views)
        timings["eager"] = timed(lambda batch: method.step(batch).logits, images, given.device)
        eager_answers = method.step(images[0]).logits
        if "fast" in timings:
            record["fast_predictions_as_eager"] = _same(answers, eager_answers)
        answers = eager_answers
        del method
    if "naive" in chosen:
        naive = Naive(networks[0], states, views, given.device)
        count = len(images) if given.naive_steps is None else given.naive_steps + 5
        timings["naive"] = timed(naive, images[:count], given.device)
        record["same_predictions"] = _same(naive(images[0]), answers)
    for name in ("naive", "eager", "fast"):
        record[f"{name}_ms"] = 1000 * statistics.median(timings[name]) if name in timings else None
    record["floor_ms"] = floor(given, networks[0], len(views))
    best = record["fast_ms"] or record["eager_ms"] or record["naive_ms"]
    record["share_of_floor"] = record["floor_ms"] / best if record["floor_ms"] else None
    record["images_per_second"] = given.batch / best * 1000
    record["timings"] = {name: [round(1000 * value, 4) for value in values] for name, values in timings.items()}
    printed = {key: value for key, value in record.items() if key not in ("timings", "command", "machine")}
    print(json.dumps(printed, indent=1))
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")


class Naive:
    """What one would write first: load each expert's state dict, merge dict by dict, load the result."""

    def __init__(self, network: Any, states: list[dict[str, Tensor]], views: tuple[str, ...], device: str) -> None:
        self._module = copy.deepcopy(network.module).to(device).eval()
        self._states = [{name: tensor.to(device) for name, tensor in state.items()} for state in states]
        self._preprocessing, self._views = network.preprocessing, views
        self._head = tuple(f"{part}." for part in network.head)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        batch = self._preprocessing(images)
        entropies, consistencies = [], []
        for state in self._states:
            self._module.load_state_dict(state)
            p = torch.softmax(logits_of(self._module(batch)), dim=-1)
            entropies.append(-(p * p.clamp_min(1e-30).log()).sum(dim=-1).mean())
            changed = [
                torch.softmax(logits_of(self._module(views_for(self._preprocessing)[v](batch))), -1)
                for v in self._views
            ]
            drops = [(p - each).abs().sum(dim=-1).mean() / 2 for each in changed]
            consistencies.append(1 - sum(drops) / len(drops) if drops else torch.tensor(0.0))
        scores = torch.stack(entropies)
        a = 1 / (scores + 1e-6)
        chosen = int((a * (1 + torch.stack(consistencies).to(a.device))).argmax())
        a = a / a.sum()
        h = torch.softmax(-(scores - scores[chosen]).abs(), dim=0)
        merged = {}
        for name, first in self._states[0].items():
            shares = h if name.startswith(self._head) else a
            floating = first.is_floating_point()
            merged[name] = sum(c * s[name] for c, s in zip(shares, self._states, strict=True)) if floating else first
        self._module.load_state_dict(merged)
        return logits_of(self._module(batch))


def _same(one: Tensor, two: Tensor) -> float:
    return float((one.argmax(dim=-1) == two.argmax(dim=-1)).float().mean())


def timed(function: Callable[[Tensor], Tensor], images: Tensor, device: str) -> list[float]:
    """Seconds of each step after five that warm up; on a GPU by its own clock, without waiting between steps."""
    if device == "cuda":
        return _timed_there(function, images)
    values = []
    for number, batch in enumerate(images):
        began = time.perf_counter()
        function(batch)
        if number >= 5:
            values.append(time.perf_counter() - began)
    return values


def _timed_there(function: Callable[[Tensor], Tensor], images: Tensor) -> list[float]:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(images) + 1)]
    marks[0].record()
    for batch, mark in zip(images, marks[1:], strict=True):
        function(batch)
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)][5:]


def floor(given: argparse.Namespace, network: Any, views: int) -> float | None:
    """Milliseconds of K(1+V) + 1 forwards' multiply-adds at the device's peak."""
    one = forward_floor(network, given.batch, given.device)
    return None if one is None else one * (given.experts * (1 + views) + 1)


def forward_floor(network: Any, batch: int, device: str) -> float | None:
    """Milliseconds of one forward's multiply-adds at the device's peak; None where that is not known."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor()
    peak = PEAK_TFLOPS.get(name)
    if peak is None:
        return None
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        network.module.cpu().eval()(torch.zeros(1, 3, *network.preprocessing.size))
    return counter.get_total_flops() * batch / (peak * 1e12) * 1000


def about(given: argparse.Namespace, views: tuple[str, ...]) -> dict[str, Any]:
    return {
        "network": given.network,
        "experts": given.experts,
        "batch": given.batch,
        "views": list(views),
        "dtype": given.dtype,
        "overlap": given.overlap,
        "device": given.device,
        **provenance(given.device),
    }


def require_captured(method: ms.Method, device: str) -> None:
    """A step that fell back to eager is not what the benchmark is asked for."""
    if device.startswith("cuda") and method.graphs is None:
        raise SystemExit("The step was not captured: the log says why.")


def _network(given: argparse.Namespace, seed: int) -> Any:
    torch.manual_seed(seed)
    arguments = {name: int(value) for name, _, value in (item.partition("=") for item in given.arg)}
    return create_network(given.network, num_classes=7, **arguments)


if __name__ == "__main__":
    main()
