"""Time and memory of the merge alone, against the published tools, in one process.

    python benchmarks/merge_cpu.py --out benchmarks/results/merge_cpu.json

Rivals that are not installed are left out, and named as such: `pip install fusion-bench==0.2.33 peft mergekit` brings
them (in an environment of their own; run it there with PYTHONPATH=src). Averages are timed with glibc's allocator kept
from returning memory, since page faults otherwise swing them tenfold; TIES, which peers run with gigabytes of
temporaries, with the default allocator. Memory is the peak beyond what was there before the call (Linux's VmHWM).
"""

import argparse
import contextlib
import ctypes
import gc
import importlib.metadata
import io
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

KEPT = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": str(1 << 28)}
LAMBDA, KEEP = 0.3, 0.2


def status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measure(work: Callable[[], object], repeats: int) -> dict[str, float]:
    """Seconds: the best of several; peak: of the first call."""
    times, peak = [], 0.0
    for repeat in range(repeats):
        if "MALLOC_TRIM_THRESHOLD_" not in os.environ:
            # What was freed but not returned would hide that the work needs it again.
            gc.collect()
            ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before, start = status("VmRSS"), time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            work()
        times.append(time.perf_counter() - start)
        peak = peak if repeat else (status("VmHWM") - before) / 2**30
    return {"seconds": round(min(times), 4), "peak_gib": round(peak, 3), "timings": [round(t, 4) for t in times]}


def models(network: str, experts: int):
    import timm
    import torch

    torch.manual_seed(0)
    base = timm.create_model(network, num_classes=7)
    modules = {}
    for k in range(experts):
        modules[f"expert{k}"] = timm.create_model(network, num_classes=7)
        state = {n: t + 0.01 * torch.randn_like(t) for n, t in base.state_dict().items()}
        modules[f"expert{k}"].load_state_dict(state)
    return base, modules


def averages(base, experts) -> dict[str, Callable[[], object]]:
    import torch

    from mergestream import ExpertPool, create_method

    states = [module.state_dict() for module in experts.values()]
    share = 1 / len(states)
    out = {name: torch.empty_like(tensor) for name, tensor in states[0].items()}
    pool = ExpertPool.from_modules(experts, base=base)
    arithmetic, mean = create_method("task_arithmetic", pool), create_method("mean", pool)
    weights = pool.new_weights()

    def plain() -> object:
        return {name: sum(share * state[name] for state in states) for name in states[0]}

    def preallocated() -> None:
        for name, target in out.items():
            torch.mul(states[0][name], share, out=target)
            for state in states[1:]:
                target.add_(state[name], alpha=share)

    merges = {
        "plain state-dict loop": plain,
        "loop into preallocated output": preallocated,
        "mergestream mean": lambda: mean._merge(weights),
        "mergestream task arithmetic": lambda: arithmetic._merge(weights),
    }
    with contextlib.suppress(ImportError):
        from copy import deepcopy

        from fusion_bench.method import SimpleAverageAlgorithm, TaskArithmeticAlgorithm

        spare = {name: deepcopy(module) for name, module in experts.items()}
        merges["fusion-bench simple average, in place"] = lambda: SimpleAverageAlgorithm(inplace=True).run(dict(spare))
        merges["fusion-bench simple average, copy"] = lambda: SimpleAverageAlgorithm(inplace=False).run(dict(experts))
        start = deepcopy(base)
        merges["fusion-bench task arithmetic"] = lambda: TaskArithmeticAlgorithm(scaling_factor=LAMBDA).run(
            {"_pretrained_": start, **experts}
        )
    return merges


def trims(base, experts) -> dict[str, Callable[[], object]]:
    import torch

    from mergestream import ExpertPool, create_method

    pool = ExpertPool.from_modules(experts, base=base)
    assert pool.base is not None
    starts = dict(base.named_parameters())
    names = list(starts)

    def ours(merge: str, scope: str = "global") -> Callable[[], object]:
        # Made anew each time: the output is part of the cost.
        return lambda: create_method("ties", pool, merge=merge, trim_scope=scope).merged_weights()

    merges: dict[str, Callable[[], object]] = {
        "mergestream ties, sum": ours("sum"),
        "mergestream ties, mean": ours("mean"),
        "mergestream ties, mean, per tensor": ours("mean", "tensor"),
    }
    with contextlib.suppress(ImportError):
        from fusion_bench.method import TiesMergingAlgorithm

        def theirs(merge: str) -> Callable[[], object]:
            return lambda: TiesMergingAlgorithm(
                scaling_factor=LAMBDA, threshold=100 * KEEP, remove_keys=[], merge_func=merge
            ).run({"_pretrained_": base, **experts})

        merges |= {"fusion-bench ties, sum": theirs("sum"), "fusion-bench ties, mean": theirs("mean")}
    with contextlib.suppress(ImportError):
        from peft.utils.merge_utils import ties

        @torch.no_grad()
        def peft() -> object:
            ones = torch.ones(len(experts))
            states = [dict(module.named_parameters()) for module in experts.values()]
            return {n: starts[n] + LAMBDA * ties([s[n] - starts[n] for s in states], ones, KEEP) for n in names}

        merges["peft ties, per tensor"] = peft
    with contextlib.suppress(ImportError):
        from mergekit.merge_methods.generalized_task_arithmetic import get_mask
        from mergekit.sparsify import SparsificationMethod, sparsify

        @torch.no_grad()
        def mergekit() -> object:
            """GeneralizedTaskArithmeticMerge.merge_group for its 'ties', on tensors in memory."""
            merged = {}
            for name in names:
                pieces = [
                    sparsify(dict_[name] - starts[name], density=KEEP, method=SparsificationMethod.magnitude)
                    for dict_ in [dict(module.named_parameters()) for module in experts.values()]
                ]
                deltas = torch.stack(pieces)
                mask = get_mask(deltas, method="sum", mask_dtype=deltas.dtype)
                divisor = mask.sum(dim=0)
                divisor[divisor == 0] = 1
                merged[name] = starts[name] + LAMBDA * (deltas * mask).sum(dim=0) / divisor
            return merged

        merges["mergekit ties, per tensor"] = mergekit
    return merges


def adamerging(network: str, experts: int) -> dict[str, float]:
    """Time and peak memory of AdaMerging steps beyond the bank and the base, for K experts."""
    import torch

    from mergestream import ExpertPool, create_method

    base, _ = models(network, 0)
    # One state for all: the bank holds K copies, and nothing else grows with K before the measurement.
    state = base.state_dict()
    pool = ExpertPool.from_state_dicts({f"expert{k}": state for k in range(experts)}, base, base=state)
    assert pool.base is not None
    images = torch.randint(0, 256, (8, 3, 224, 224), dtype=torch.uint8)
    method = create_method("adamerging", pool)
    return {"experts": experts, **measure(lambda: method.step(images), repeats=2)}


def run(part: str, options: argparse.Namespace) -> dict:
    import torch

    torch.set_num_threads(options.threads)
    if part.startswith("adamerging"):
        return adamerging(options.network, int(part.removeprefix("adamerging")))
    base, experts = models(options.network, options.experts)
    work = (averages if part == "averages" else trims)(base, experts)
    repeats = options.repeats if part == "averages" else options.ties_repeats
    return {name: measure(each, repeats) for name, each in work.items()}


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def child(part: str, environment: dict[str, str]) -> dict:
    command = [sys.executable, __file__, *sys.argv[1:], "--part", part]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="vit_base_patch32_224")
    parser.add_argument("--experts", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ties-repeats", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(run(options.part, options)))
        return
    average, trim = child("averages", KEPT), child("ties", {})
    memory = [child(f"adamerging{k}", {}) for k in (2, 4, 8)]
    floor = average["loop into preallocated output"]["seconds"]
    for value in average.values():
        value["ratio_to_preallocated_loop"] = round(value["seconds"] / floor, 2)
        del value["peak_gib"]  # meaningless where the allocator keeps what it has
    for name, value in trim.items():
        rival = trim.get(f"fusion-bench {name.removeprefix('mergestream ').removesuffix(', per tensor')}")
        if rival and name.startswith("mergestream"):
            value["times_as_fast_as_fusion_bench"] = round(rival["seconds"] / value["seconds"], 1)
    result = {
        "network": options.network,
        "experts": options.experts,
        "dtype": "float32",
        "threads": options.threads,
        "averages": average,
        "ties": trim,
        "adamerging_step": memory,
        "versions": {name: version(name) for name in ("torch", "fusion-bench", "peft", "mergekit")},
        "command": " ".join(["python", *sys.argv]),
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip(),
        "machine": f"{platform.machine()}, {platform.system()}, {os.cpu_count()} cores",
    }
    for title, rows in (("averages", average), ("ties", trim)):
        print(f"\n{title}: seconds")
        for name, value in rows.items():
            kinds = ("ratio", "times", "peak_gib")
            extra = [f"{k.replace('_', ' ')} {v}" for k, v in value.items() if k in kinds or k.startswith(kinds[:2])]
            print(f"  {name:42s} {value['seconds']:8.3f}  {', '.join(extra)}")
    print("\nadamerging, one step of 8 images: peak GiB beyond the bank and the base")
    for row in memory:
        print(f"  K={row['experts']}: {row['peak_gib']:.2f}")
    if options.out:
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
