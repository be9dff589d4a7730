"""Where the milliseconds of a captured step go on a GPU, and what each candidate for more speed could gain at most.

    python3 benchmarks/step_profile.py --network vit_base_patch32_224 --json step_profile.json

Three parts: the kernels of a replayed step by kind, the rates of the network's products alone (one expert after the
other, beside each other, as one grouped product, in eight bits), and the merge against the memory's speed.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from provenance import provenance
from torch import Tensor

import mergestream as ms
from mergestream.networks.architecture import create_network

KINDS = (
    ("merge", ("weighted", "merge")),
    ("attention", ("attention_kernel", "flash", "fmha", "softmax_warp")),
    ("product", ("gemm", "cutlass", "nvjet", "xmma", "splitk", "cublas", "sm90_")),
    ("norm and residual", ("norm_kernel", "layer_norm")),
    ("copy", ("memcpy", "memset", "copy", "cat")),
)
STEPS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="vit_base_patch32_224")
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    network = create_network(given.network, num_classes=7)
    states = {}
    for seed in range(given.experts):
        torch.manual_seed(seed)
        states[f"expert{seed}"] = create_network(given.network, num_classes=7).module.state_dict()
    pool = ms.ExpertPool.from_state_dicts(states, network.module, preprocessing=network.preprocessing)
    pool = pool.to("cuda", dtype=torch.bfloat16)
    size = network.require_preprocessing().size
    images = torch.randint(0, 256, (given.batch, 3, *size), dtype=torch.uint8, device="cuda")
    record: dict[str, Any] = {**provenance("cuda"), **{k: v for k, v in vars(given).items() if k != "json"}}
    record["steps"] = {
        text: kernels_of(ms.create_method(name, pool, **options), images)
        for text, name, options in (
            ("entropy_adaptive", "entropy_adaptive", {}),
            ("entropy_adaptive(score_images=8)", "entropy_adaptive", {"score_images": 8}),
            ("merge_and_fit", "merge_and_fit", {}),
            ("mean", "mean", {}),
        )
    }
    record["products"] = products(pool, given.batch, size)
    record["merge"] = merge_of(pool)
    given.json.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


def kernels_of(method: ms.Method, images: Tensor) -> dict[str, Any]:
    """Milliseconds per step by the device's clock, and its kernels by kind."""
    for _ in range(5):
        method.step(images)
    torch.cuda.synchronize()
    milliseconds = median_ms(lambda: method.step(images))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(STEPS):
            method.step(images)
        torch.cuda.synchronize()
    method.settle()
    by_kind: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    longest: dict[str, float] = defaultdict(float)
    spans = []
    for event in profile.events():
        span = event.time_range
        if event.device_type != torch.autograd.DeviceType.CUDA or span.elapsed_us() <= 0:
            continue
        kind = next((kind for kind, words in KINDS if any(word in event.name.lower() for word in words)), "other")
        by_kind[kind][0] += span.elapsed_us() / STEPS / 1000
        by_kind[kind][1] += 1 / STEPS
        longest[event.name[:70]] += span.elapsed_us() / STEPS / 1000
        spans.append((span.start, span.end))
    top = sorted(longest.items(), key=lambda item: -item[1])[:14]
    return {
        "ms": milliseconds,
        "device_busy_ms": covered(spans) / STEPS / 1000,
        "kinds": {kind: {"ms": round(ms_, 4), "launches": round(count, 1)} for kind, (ms_, count) in by_kind.items()},
        "longest": {name: round(value, 4) for name, value in top},
        "captured": method.graphs is not None and bool(method.graphs.recorded),
    }


def covered(spans: list[tuple[float, float]]) -> float:
    """Microseconds during which at least one kernel ran."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def products(pool: ms.ExpertPool, batch: int, size: tuple[int, int]) -> dict[str, Any]:
    """The four products of a block for all experts' scores: milliseconds and TFLOP/s of every way to compute them."""
    block = pool.expert(0).blocks[0]
    patch = pool.expert(0).patch_embed.patch_size[0]
    tokens = 2 * batch * ((size[0] // patch) ** 2 + 1)  # original and mirrored
    results = {}
    layers = {"qkv": block.attn.qkv, "proj": block.attn.proj, "fc1": block.mlp.fc1, "fc2": block.mlp.fc2}
    for name, layer in layers.items():
        out, width = layer.weight.shape
        count = len(pool)
        x = torch.randn(count, tokens, width, device="cuda").bfloat16()
        w = torch.randn(count, out, width, device="cuda").bfloat16() / width**0.5
        bias = torch.randn(out, device="cuda").bfloat16()
        streams = [torch.cuda.Stream() for _ in range(count)]

        def one_by_one(x: Tensor = x, w: Tensor = w, bias: Tensor = bias) -> None:
            for k in range(len(x)):
                torch.nn.functional.linear(x[k], w[k], bias)

        def side_by_side(x: Tensor = x, w: Tensor = w, bias: Tensor = bias, streams: Any = streams) -> None:
            here = torch.cuda.current_stream()
            for k, stream in enumerate(streams):
                stream.wait_stream(here)
                with torch.cuda.stream(stream):
                    torch.nn.functional.linear(x[k], w[k], bias)
                here.wait_stream(stream)

        def grouped(x: Tensor = x, w: Tensor = w) -> None:
            torch.bmm(x, w.transpose(1, 2))

        ways: dict[str, Callable[[], None]] = {
            "one by one": one_by_one,
            "side by side": side_by_side,
            "grouped": grouped,
        }
        if hasattr(torch, "_scaled_mm"):
            x8, w8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
            scale_x = torch.ones(tokens, 1, device="cuda")
            scale_w = torch.ones(1, out, device="cuda")

            def eight_bits(x8: Tensor = x8, w8: Tensor = w8, a: Tensor = scale_x, b: Tensor = scale_w) -> None:
                for k in range(len(x8)):
                    torch._scaled_mm(x8[k], w8[k].t(), scale_a=a, scale_b=b, out_dtype=torch.bfloat16)

            ways["eight bits"] = eight_bits
        operations = 2 * count * tokens * out * width
        results[name] = {"tokens": tokens, "out": out, "in": width}
        for way, function in ways.items():
            try:
                milliseconds = median_ms(captured(function))
            except Exception as error:
                results[name][way] = f"{type(error).__name__}: {error}".splitlines()[0][:150]
                continue
            results[name][way] = {"ms": milliseconds, "tflops": operations / milliseconds / 1e9}
    return results


def merge_of(pool: ms.ExpertPool) -> dict[str, float]:
    """The merge's milliseconds and the memory traffic that it needs at least."""
    out, shares = pool.new_weights(), torch.full((len(pool),), 1 / len(pool), device="cuda")
    milliseconds = median_ms(lambda: pool.merge(shares, out=out))
    traffic = (len(pool) + 1) * out.numel() * out.element_size()
    return {"ms": milliseconds, "gigabytes_per_second": traffic / milliseconds / 1e6}


def captured(function: Callable[[], None]) -> Callable[[], None]:
    """The same as a graph, so that launches count little."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def median_ms(function: Callable[[], object], repeats: int = 60) -> float:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for _ in range(5):
        function()
    marks[0].record()
    for mark in marks[1:]:
        function()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))


if __name__ == "__main__":
    main()
