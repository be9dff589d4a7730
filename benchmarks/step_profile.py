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
from pathlib import Path
from typing import Any

import torch
from provenance import provenance
from step import _network, forward_floor, timed
from torch import Tensor

import mergestream as ms
from mergestream.methods.spelling import create_from_text

KINDS = (
    ("merge", ("weighted", "merge")),
    ("attention", ("attention_kernel", "flash", "fmha", "softmax_warp")),
    ("product", ("gemm", "cutlass", "nvjet", "xmma", "splitk", "cublas", "sm90_")),
    ("norm and residual", ("norm_kernel", "layer_norm")),
    ("copy", ("memcpy", "memset", "copy", "cat")),
)
STEPS = 40
METHODS = (
    "mean",
    "ensemble(views=hflip)",
    "entropy_adaptive",
    "entropy_adaptive(score_images=8)",
    "merge_and_fit",
    "merge_once(ask_first=32)",  # after its first images one network answers
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", default="vit_base_patch32_224")
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--arg", action="append", default=[], help="name=number, an argument of the network")
    parser.add_argument("--device", default="cuda", help="'cpu' only tries this script: nothing is captured there")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    network = _network(given, 0)
    states = {f"expert{seed}": _network(given, seed).module.state_dict() for seed in range(given.experts)}
    pool = ms.ExpertPool.from_state_dicts(states, network.module, preprocessing=network.preprocessing)
    pool = pool.to(given.device, dtype=torch.bfloat16)
    size = network.require_preprocessing().size
    images = torch.randint(0, 256, (given.batch, 3, *size), dtype=torch.uint8, device=given.device)
    record: dict[str, Any] = {
        **provenance(given.device),
        **{k: v for k, v in vars(given).items() if k not in ("json", "arg")},
    }
    one = forward_floor(network, given.batch, given.device)
    record["steps"] = {text: profiled(text, pool, images, one) for text in METHODS}
    reference = record["steps"]["entropy_adaptive"]["ms"]
    record["times_entropy_adaptive"] = {name: step["ms"] / reference for name, step in record["steps"].items()}
    record["products"] = products(pool, given.batch, size)
    record["merge"] = merge_of(pool)
    given.json.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


def profiled(text: str, pool: ms.ExpertPool, images: Tensor, one: float | None) -> dict[str, Any]:
    """A method's step beside the floor of its forwards, of which `one` takes so many milliseconds."""
    result = kernels_of(create_from_text(text, pool, inside="the benchmark"), images)
    result["floor_ms"] = None if one is None else one * (result["expert_forwards"] + result["merged_forwards"])
    return result


def kernels_of(method: ms.Method, images: Tensor) -> dict[str, Any]:
    """Milliseconds per step by the device's clock, and its kernels by kind."""
    for _ in range(5):
        method.step(images)
    milliseconds = median_ms(lambda: method.step(images))
    kind = "CUDA" if images.is_cuda else "CPU"
    with torch.profiler.profile(activities=[getattr(torch.profiler.ProfilerActivity, kind)]) as profile:
        for _ in range(STEPS):
            method.step(images)
        method.settle()
    step = method.step(images)
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
        "captured": step.graph is not None,
        "expert_forwards": step.expert_forwards,
        "merged_forwards": step.merged_forwards,
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
        there = pool.device
        x = torch.randn(count, tokens, width, device=there).bfloat16()
        w = torch.randn(count, out, width, device=there).bfloat16() / width**0.5
        bias = torch.randn(out, device=there).bfloat16()
        streams = [torch.cuda.Stream() for _ in range(count)] if there.type == "cuda" else []

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
            scale_x = torch.ones(tokens, 1, device=there)
            scale_w = torch.ones(1, out, device=there)

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
    out, shares = pool.new_weights(), torch.full((len(pool),), 1 / len(pool), device=pool.device)
    milliseconds = median_ms(lambda: pool.merge(shares, out=out))
    traffic = (len(pool) + 1) * out.numel() * out.element_size()
    return {"ms": milliseconds, "gigabytes_per_second": traffic / milliseconds / 1e6}


def captured(function: Callable[[], None]) -> Callable[[], None]:
    """The same as a graph, so that launches count little."""
    for _ in range(3):
        function()
    if not torch.cuda.is_available():
        return function
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def median_ms(function: Callable[[], object], repeats: int = 60) -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return 1000 * statistics.median(timed(lambda _: function(), [None] * (repeats + 5), device))  # type: ignore


if __name__ == "__main__":
    main()
