"""What each fusion of a captured step brings on a GPU, and whether its answers are the eager step's.

    python3 benchmarks/step_variants.py --json step_variants.json

Every part is tried by itself, so that one failure stops no other; the table comes last.
"""

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from provenance import provenance
from step import _network, _same, timed
from torch import Tensor

import mergestream as ms
from mergestream.methods import fused_correction, merge_and_fit
from mergestream.methods.correction import Correction, LongRun
from mergestream.methods.fading_window import FadingWindow
from mergestream.methods.spelling import create_from_text
from mergestream.pool import fused_blocks, runner
from mergestream.pool.execution import Execution

METHODS = ("mean", "entropy_adaptive", "merge_once(ask_first=32)", "merge_and_fit", "corrected")
OFF: dict[str, Callable[[], Any]] = {
    "kernel": lambda: mock.patch.object(fused_correction, "can_run", return_value=False),
    "table": lambda: mock.patch.object(runner, "looked_up", return_value=None),
    "first token": lambda: mock.patch.object(fused_blocks, "last_block", return_value=[]),
    "late alarm": lambda: mock.patch.object(merge_and_fit.MergeAndFit, "alarm", return_value=None),
}
SIZES = ((32, 7), (8, 3), (64, 4), (64, 8), (128, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--networks", default="vit_base_patch32_224,vit_base_patch16_224")
    parser.add_argument("--arg", action="append", default=[], help="name=number, an argument of the network")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    record: dict[str, Any] = {**provenance(given.device), "batch": given.batch}
    rows: list[str] = []
    tried(record, "launch_us", lambda: launch(rows), given)
    tried(record, "mix_kernel", lambda: kernels(rows, given.device), given)
    for network in given.networks.split(","):
        tried(record, network, lambda network=network: steps(network, given, rows), given)
    print("\n".join(rows))


def tried(record: dict[str, Any], name: str, part: Callable[[], Any], given: argparse.Namespace) -> None:
    try:
        record[name] = part()
    except Exception:
        record[name] = traceback.format_exc()
        print(f"{name} failed:\n{record[name]}")
    given.json.write_text(json.dumps(record, indent=1) + "\n")


# --- steps ------------------------------------------------------------------------------------------------------


def steps(name: str, given: argparse.Namespace, rows: list[str]) -> dict[str, Any]:
    given.network = name
    network = _network(given, 0)
    states = {f"expert{seed}": _network(given, seed).module.state_dict() for seed in range(3)}
    pool = ms.ExpertPool.from_state_dicts(states, network.module, preprocessing=network.preprocessing)
    pool = pool.to(given.device, dtype=torch.bfloat16 if given.device == "cuda" else torch.float32)
    size = network.require_preprocessing().size
    generator = torch.Generator(given.device).manual_seed(0)
    shape = (given.steps + 5, given.batch, 3, *size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, device=given.device, generator=generator)
    few = name == given.networks.split(",")[0]
    cases = {"new": [], "old": [*OFF], **({f"without {each}": [each] for each in OFF} if few else {})}
    result: dict[str, Any] = {}
    for text in METHODS:
        result[text] = {"all eager": eager(text, pool, images)}
        for case, off in cases.items():
            with switched_off(off):
                tried(result[text], case, lambda text=text: measured(text, pool, images, given), given)
        numbers = {case: value for case, value in result[text].items() if isinstance(value, dict)}
        line = "  ".join(f"{case} {value['ms']:.3f}" for case, value in numbers.items() if "ms" in value)
        new = numbers.get("new", {})
        rows.append(f"{name} {text}: {line}  busy {new.get('busy_ms')} launches {new.get('launches')} "
                    f"host {new.get('host_ms')} same {new.get('same')} far {new.get('far')}")  # fmt: skip
    return result


@contextmanager
def switched_off(names: list[str]) -> Iterator[None]:
    patches = [OFF[name]() for name in names]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


REFERENCE: dict[str, list[Tensor]] = {}


def eager(text: str, pool: ms.ExpertPool, images: Tensor) -> dict[str, Any]:
    method = create_from_text(text, pool.to(execution=Execution(capture=False)), inside="the benchmark")
    REFERENCE[text] = [method.step(batch).logits.clone() for batch in images[:8]]
    return {"first": REFERENCE[text][0][:2].tolist()}


def measured(text: str, pool: ms.ExpertPool, images: Tensor, given: argparse.Namespace) -> dict[str, Any]:
    method = create_from_text(text, pool, inside="the benchmark")
    answers = [method.step(batch).logits.clone() for batch in images[:8]]
    same = [_same(one, two) for one, two in zip(answers, REFERENCE[text], strict=True)]
    pairs = list(zip(answers, REFERENCE[text], strict=True))
    far = max(float((torch.softmax(one, -1) - torch.softmax(two, -1)).abs().max()) for one, two in pairs)
    values = timed(lambda batch: method.step(batch).logits, images, given.device)
    hosts = []
    for batch in images[:12]:
        method.settle()
        began = time.perf_counter()
        method.step(batch)
        hosts.append(time.perf_counter() - began)
    result = {
        "ms": 1000 * statistics.median(values),
        "lowest": 1000 * min(values),
        "host_ms": round(1000 * statistics.median(hosts), 3),
        "same": round(statistics.mean(same), 4),
        "far": round(far, 5),
        "captured": method.graphs is not None and bool(method.graphs.recorded),
    }
    method.settle()
    if given.device == "cuda":
        result |= profiled(method, images)
    return result


def profiled(method: ms.Method, images: Tensor) -> dict[str, Any]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for batch in images[:20]:
            method.step(batch)
        method.settle()
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end, e.name[:60]) for e in events if e.time_range.elapsed_us() > 0)
    busy, reached = 0.0, float("-inf")
    names: dict[str, list[float]] = {}
    for start, end, name in spans:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
        one = names.setdefault(name, [0, 0.0])
        one[0] += 1 / 20
        one[1] += (end - start) / 20
    gaps = [after[0] - before[1] for before, after in pairwise(spans)]
    top = sorted(names.items(), key=lambda item: -item[1][1])[:25]
    return {
        "busy_ms": round(busy / 20 / 1000, 4),
        "launches": round(len(spans) / 20, 1),
        "gaps_over_5us": sorted((round(gap, 1) for gap in gaps if gap > 5), reverse=True)[:40],
        "top": {name: [round(count, 2), round(us, 1)] for name, (count, us) in top},
    }


# --- kernels ----------------------------------------------------------------------------------------------------


def launch(rows: list[str]) -> dict[str, float]:
    """Microseconds per node of a graph of tiny kernels."""
    x = torch.zeros(32, device="cuda")
    result = {str(count): 1000 * graph_ms(lambda count=count: [x.add_(1) for _ in range(count)]) for count in (1, 201)}
    rows.append(f"a tiny kernel in a graph: {(result['201'] - result['1']) / 200:.2f} us")
    return result


def kernels(rows: list[str], device: str) -> dict[str, Any]:
    """The mix kernel against the torch code: largest distance of answers and state, and microseconds."""
    result = {}
    for batch, classes in SIZES:
        for sets in (1, 2):
            name = f"B={batch} C={classes} S={sets}"
            try:
                result[name] = one_kernel(batch, classes, sets, device)
                rows.append(f"mix {name}: " + "  ".join(f"{key} {value:.3g}" for key, value in result[name].items()))
            except Exception as error:
                result[name] = {"failed": f"{type(error).__name__}: {error}"}
                rows.append(f"mix {name}: {result[name]['failed'][:200]}")
    return result


def one_kernel(batch: int, classes: int, sets: int, device: str) -> dict[str, float]:
    from mergestream.functional import mix_kernel

    torch.manual_seed(batch)
    home = torch.softmax(torch.randn(classes, device=device), dim=0)
    unit = Correction(LongRun(home, torch.ones_like(home), 0.0))
    shares = torch.full((batch,), 1 / batch, device=device)
    images = 1 / shares.square().sum()
    window = FadingWindow(shares, images, torch.exp(-images / 4096))
    plain = fused = unit.start(3)
    own = other = plain.long_run
    answers_far = state_far = 0.0
    for number in range(12):
        clump = torch.nn.functional.one_hot(torch.randint(classes, (1,), device=device), classes) * 3.0 * (number % 2)
        x, y = (torch.softmax(torch.randn(batch, classes, device=device) * 2 + clump, dim=-1) for _ in range(2))
        one, own, plain = unit.correct_all(plain, x, None, (own, y) if sets == 2 else None, window)
        two, other, fused = unit.correct_all(fused, x, None, (other, y) if sets == 2 else None, window, fused=True)
        answers_far = max(answers_far, float((one - two).abs().max()))
        pairs = zip(fused_correction.tensors(plain).values(), fused_correction.tensors(fused).values(), strict=True)
        state_far = max(state_far, *(float(((a - b).abs() / (1 + a.abs())).max()) for a, b in pairs))
    result = {"answers_far": answers_far, "state_far": state_far}
    pair = (own, y) if sets == 2 else None
    result["torch_us"] = 1000 * graph_ms(lambda: unit.correct_all(plain, x, None, pair, window))
    result["whole_us"] = 1000 * graph_ms(lambda: unit.correct_all(plain, x, None, pair, window, fused=True))
    named = fused_correction.tensors(plain)
    del named["long_run_expert_counts"]
    past = torch.cat([v.reshape(-1) for v in sorted(named.values(), key=lambda v: -v.ndim)] + [home, images[None]])
    rows, columns = mix_kernel.sizes(batch, classes)
    corrected, after = torch.empty(sets, batch, classes, device=device), torch.empty_like(past)
    for warps in (4, 8, 16) if batch == 32 else ():

        def kernel(warps: int = warps) -> None:
            mix_kernel.mix_kernel[(sets,)](
                x, y, shares, images, window.faded, home, past, corrected, after, batch, classes,
                N=rows, C=columns, num_warps=warps,
            )  # fmt: skip

        result[f"{warps}_warps_us"] = 1000 * graph_ms(lambda kernel=kernel: [kernel() for _ in range(10)]) / 10
    return result


def graph_ms(function: Callable[[], object]) -> float:
    """Milliseconds of a graph's replay."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(41)]
    for mark in marks:
        mark.record()
        graph.replay()
    torch.cuda.synchronize()
    return statistics.median(one.elapsed_time(two) for one, two in pairwise(marks))


if __name__ == "__main__":
    main()
