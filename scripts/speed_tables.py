"""Blocks of docs/speed.md and docs/dicom_node.md, from benchmarks/results. scripts/docs_tables.py calls them."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
STEPS = {"ViT-B/32": "step_vit_b32", "ViT-B/16": "step_vit_b16"}
KERNELS = ("product", "norm and residual", "attention", "other")


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column is text and whose others are numbers."""
    lines = [f"| {' | '.join(head)} |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def step_table() -> str:
    rows = []
    for title, name in STEPS.items():
        record = read(name)
        times = [f"{record[key]:.1f}" for key in ("naive_ms", "eager_ms", "fast_ms", "floor_ms")]
        ratio = f"{record['naive_ms'] / record['fast_ms']:.1f} x"
        rows.append([title, *times, ratio, f"{record['memory_gib']:.2f}", f"{record['images_per_second']:,.0f}"])
    head = ("ms per step", "naive loop", "eager", "captured", "floor", "gain", "GiB", "images/s")
    return markdown(head, rows)


def profile_table() -> str:
    """Where a captured step's time goes: kernels by kind overlap, so that their sum may exceed the step."""
    record = read("step_profile")
    rows, reference = [], record["steps"]["entropy_adaptive"]["ms"]
    parts = {name.partition("(ask")[0]: step for name, step in record["steps"].items()}
    parts = {name: step for name, step in parts.items() if not name.startswith(("ensemble", "mean"))}
    for title, step in parts.items():
        kinds = step["kinds"]
        row = [f"{value:.2f}" for value in (step["ms"], step["floor_ms"], *(kinds[kind]["ms"] for kind in KERNELS))]
        launches = sum(each["launches"] for each in kinds.values())
        rows.append([f"`{title}`", *row, f"{launches:.0f}", f"{step['ms'] / reference:.2f}"])
    ways = {way: [each[way]["tflops"] for each in record["products"].values()] for way in ("one by one", "eight bits")}
    spans = [f"{min(rates):.0f} to {max(rates):.0f} TFLOP/s {way}" for way, rates in ways.items()]
    head = ("ms", "step", "floor", "products", "norms", "attention", "small", "launches", "ratio")
    return f"{markdown(head, rows)}\n\nThe products alone: {', '.join(spans)}."


def variant_table() -> str:
    """What each fusion of a captured step brings, and how far its largest kernel is from the torch code."""
    record = read("step_variants")
    small, large = record["vit_base_patch32_224"], record["vit_base_patch16_224"]
    switches = list(small["merge_once(ask_first=32)"])  # new, old, without ...
    rows = []
    for method, cases in small.items():
        launches = f"{cases['old']['launches']:.0f} to {cases['new']['launches']:.0f}"
        larger = [f"{large[method][case]['ms']:.2f}" for case in ("new", "old")]
        rows.append([f"`{method.partition('(ask')[0]}`", *(f"{cases[name]['ms']:.3f}" for name in switches), launches])
        rows[-1] += larger
    head = ["ms per step, ViT-B/32", *switches, "launches", "ViT-B/16 new", "old"]
    kernels = record["mix_kernel"].values()
    fused, torch = ([kernel[key] for kernel in kernels] for key in ("whole_us", "torch_us"))
    far = max(kernel["answers_far"] for kernel in kernels)
    return (
        f"{markdown(head, rows)}\n\nThe correction alone takes {min(fused):.0f} to {max(fused):.0f} µs "
        f"in the kernel and {min(torch):.0f} to {max(torch):.0f} in torch; answers are at most {far:.0e} apart."
    )


def method_table() -> str:
    record = read("step_methods")
    ms: dict[str, list[str]] = {}
    forwards = {}
    for row in record["rows"]:
        name = row["method"].partition("(ask")[0]
        ms.setdefault(name, []).append(f"{row['ms']:.1f}")
        forwards[name] = f"{row['expert_forwards'] + row['merged_forwards']:.1f}"
    body = [[f"`{name}`", forwards[name], *times] for name, times in ms.items()]
    return markdown(["ms per step", "forwards per image", "ViT-S/14, 126 px", "ViT-B/16"], body)


def narrow_table() -> str:
    """The step on one core in bfloat16 against the naive loop in float32, with the share of equal answers."""
    titles = {
        "bfloat16_scores": "scores in bf16",
        "bfloat16": "all in bf16",
        "bfloat16_8": "and `score_images=8`",
    }
    record = read("step_narrow")
    names = [name for name in titles if name in record["rows"][0]["ratios"]]
    rows = []
    for row in record["rows"]:
        each = [f"{row['ratios'][name]:.1f} x ({100 * row['same_top_1'][name]:.1f} %)" for name in names]
        rows.append([row["network"], *each])
    return markdown(["times the naive loop", *(titles[name] for name in names)], rows)


def curve_line() -> str:
    record = read("step_curves")
    line, images = record["per_expert"], [(row["batch"], row["ms"]) for row in record["by_batch"]]
    (one, least), (most, longest) = images[0], images[-1]
    further = ""
    if record.get("by_size"):
        classes, sizes, size_line = record["by_classes"], record["by_size"], record["by_size_line"]
        further = (
            f" {classes[0]['classes']} classes take {classes[0]['ms']:.2f} ms and {classes[-1]['classes']} take "
            f"{classes[-1]['ms']:.2f}. `{sizes[0]['network']}` takes {sizes[0]['ms']:.1f} ms, `{sizes[-1]['network']}` "
            f"{sizes[-1]['ms']:.1f}: {1e6 * size_line['per_parameter_ms']:.3f} ms per million parameters, within "
            f"{100 * size_line['largest_departure']:.0f} %."
        )
    return (
        f"ViT-B/32: {line['fixed_ms']:.2f} ms and {line['per_expert_ms']:.2f} ms per expert, within "
        f"{100 * line['largest_departure']:.0f} % up to {record['by_experts'][-1]['experts']} experts; {least:.1f} ms "
        f"for {one} image and {longest:.1f} ms for {most}.{further}"
    )


def processor_line() -> str:
    """The step on one core against the naive loop, in the latest run over all networks."""
    run = max(enumerate(read("step_zoo")["runs"]), key=lambda item: (len(item[1]["rows"]), item[0]))[1]
    ratios = sorted((row["times_the_rival"], row["network"]) for row in run["rows"])
    median = ratios[len(ratios) // 2][0]
    (low, slowest), (high, fastest) = ratios[0], ratios[-1]
    return (
        f"{len(ratios)} networks, {run['experts']} experts, batches of {run['batch']}: {median:.2f} times the naive "
        f"loop's speed in the median, from {low:.2f} (`{slowest}`) to {high:.2f} (`{fastest}`)."
    )


def merge_line() -> str:
    record = read("merge_cpu")
    times = {name: 1000 * each["seconds"] for name, each in record["averages"].items()}
    ours = times.pop("mergestream mean")
    rivals = ", ".join(f"{name} {value:.0f} ms" for name, value in times.items() if "mergestream" not in name)
    name, count = record["network"], record["experts"]
    return f"Averaging {count} `{name}` on {record['threads']} cores takes {ours:.0f} ms; {rivals}."


def load_line() -> str:
    record = read("load_memory")
    ours, rival = record["mergestream"], record["safetensors_then_stack"]
    return (
        f"Loading {record['experts']} `{record['network']}` takes at most {ours['peak_ratio']:.2f} times the bank's "
        f"memory and {ours['seconds']:.1f} s; files read, then stacked: {rival['peak_ratio']:.2f} times and "
        f"{rival['seconds']:.1f} s."
    )


def service_line() -> str:
    record, larger, on_gpu = read("service"), read("service_vit_tiny"), read("engine_vit_b32")
    engine = on_gpu["entropy_adaptive, state"]
    return (
        f"`serve` over a micro ViT on {record['cores']} cores, {record['clients']} clients, {record['streams']} "
        f"streams, audit log on: {record['requests_per_second']:.0f} answers per second, "
        f"{record['ratio_to_direct']:.2f} of direct calls in batches of {record['mean_batch']:.0f}, "
        f"{record['ratio_to_fastapi']:.1f} times a bare FastAPI endpoint; p99 {record['latency_ms']['p99']:.0f} ms. "
        f"Over `{larger['network']}`, {larger['clients']} clients, {larger['threads']} PyTorch threads: "
        f"{larger['ratio_to_direct']:.2f} of direct calls. On an "
        f"{on_gpu['gpu'].removeprefix('NVIDIA ')} the engine takes {engine['engine_ms']:.0f} ms for "
        f"{on_gpu['batch']} pictures, the method {engine['method_ms']:.0f} (`{on_gpu['network']}`)."
    )


def engine_table() -> str:
    lines = [
        "| ms per batch | method alone | engine, hash of the weights | engine, hash of the state |",
        "|---|---:|---:|---:|",
    ]
    for name in ("engine_vit_b32", "engine_vit_b16"):
        record = read(name)
        for method in ("entropy_adaptive", "merge_and_fit"):
            weights, state = (record[f"{method}, {hashed}"] for hashed in ("weights", "state"))
            lines.append(
                f"| {record['network']}, `{method}` | {state['method_ms']:.1f} | {weights['engine_ms']:.1f} | "
                f"{state['engine_ms']:.1f} |"
            )
    return "\n".join(lines)


def litserve_line() -> str:
    record = read("service_litserve")
    rate, direct, theirs = (record[key] for key in ("requests_per_second", "ratio_to_direct", "litserve"))
    return (
        f"With LitServe's processes beside it, too (same method, no log, no guards): {rate:.0f} answers per second, "
        f"{direct:.2f} of direct calls; LitServe {theirs:.0f}."
    )


def dicom_table() -> str:
    record = read("dicom_node")
    titles = {"stock": "dcmtk as Debian installs it", "no delay": "dcmtk with `TCP_NODELAY=1`"}
    names = {
        "storescp": "storescp",
        "node, flush: object": "`flush: object`",
        "node, flush: association": "`flush: association`",
    }
    rows = []
    for name, title in titles.items():
        medians, fastest, ratios = (record[key][name] for key in ("medians", "fastest", "times_storescp"))
        rounds = len(record["seconds"][name]["storescp"])
        about = f"{title}, {rounds} rounds" if rounds > 1 else f"{title}, one round"
        times = [f"{medians[who]:.2f} s ({fastest[who]:.2f})" for who in names]
        rows.append([about, *times, *(f"{ratios[who]['same round']:.3g} x" for who in names if who in ratios)])
    head = (
        f"{record['objects']} MR objects: median (fastest)", *names.values(),
        *(f"{name} / storescp" for name in list(names.values())[1:]),
    )  # fmt: skip
    goal, quick = record["target"], record["times_storescp"]["no delay"]
    met = {who: "met" if max(quick[who].values()) <= goal else "not met" for who in names if who in quick}
    verdict = ", ".join(f"{names[who]} {each}" for who, each in met.items())
    about = f"Load {record['load']:.1f}, {record['fsync_ms']:.2f} ms per fsync, receivers in turn in each round."
    return f"{markdown(head, rows)}\n\n{about} Goal with `TCP_NODELAY=1`, {goal:g} times storescp: {verdict}."


def training_line() -> str:
    record = read("train_speed")
    rates = [
        f"{row['images_per_second']:,.0f} ({row['name'].removesuffix(' (ours)').replace(' (rival)', ', rival')})"
        for row in record["steps"]
    ]
    network = f"`{record['network']}`, {record['image_size']} px, batches of {record['batch_size']}"
    return f"Images per second in training ({network}, H200): {', '.join(rates)}."


def jobs_line() -> str:
    """A whole pool on one GPU with one job and with several, in turn."""
    jobs = read("train_jobs")["jobs"]
    seconds = {count: " and ".join(f"{value:.1f}" for value in values) for count, values in jobs["seconds"].items()}
    times = "; ".join(f"`--jobs {count}` {text} s" for count, text in seconds.items())
    return f"{jobs['fits']} fits of {jobs['steps']} steps on one GPU, in turn: {times}."


def speed_blocks() -> dict[str, Callable[[], str]]:
    """Every block by its name, not drawn yet."""
    return {
        "speed-steps": step_table,
        "speed-profile": profile_table,
        "speed-variants": variant_table,
        "speed-methods": method_table,
        "speed-narrow": narrow_table,
        "speed-curves": curve_line,
        "speed-cpu": processor_line,
        "speed-merge": merge_line,
        "speed-load": load_line,
        "speed-service": service_line,
        "speed-litserve": litserve_line,
        "speed-engine": engine_table,
        "speed-training": training_line,
        "speed-jobs": jobs_line,
        "speed-dicom": dicom_table,
    }
