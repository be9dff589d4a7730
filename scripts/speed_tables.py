"""Blocks of docs/speed.md and docs/dicom_node.md, from benchmarks/results. scripts/docs_tables.py calls them."""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
STEPS = {"ViT-B/32": "step_vit_b32", "ViT-B/16": "step_vit_b16"}
SERVICES = {"4 streams": "service", "64 streams": "service_many_streams"}


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


def curve_table(key: str, unit: str, title: str) -> str:
    record = read("step_curves")[key]
    return markdown([title, *(str(row[unit]) for row in record)], [["ms", *(f"{row['ms']:.1f}" for row in record)]])


def refresh_table() -> str:
    rows = read("refresh")["rows"]
    streams = list(dict.fromkeys(row["stream"] for row in rows))
    plain = [row for row in rows if not row.get("refresh_drift")]
    every = sorted({row["refresh_every"] for row in plain})

    def accuracy(stream: str, each: int) -> str:
        return next(f"{r['accuracy']:.1f}" for r in plain if (r["stream"], r["refresh_every"]) == (stream, each))

    body = [[stream, *(accuracy(stream, each) for each in every)] for stream in streams]
    return markdown(["`refresh_every`", *map(str, every)], body)


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


def service_table() -> str:
    rows = []
    for title, name in SERVICES.items():
        record = read(name)
        latency = [f"{record['latency_ms'][key]:,.0f}" for key in ("p50", "p95", "p99")]
        load = [f"{record['clients']}", f"{record['mean_batch']:.0f}", f"{record['requests_per_second']:.0f}"]
        rows.append([title, *load, *latency, str(record["errors"])])
    return markdown(
        ["micro ViT, two cores", "clients", "mean batch", "requests/s", "p50 ms", "p95", "p99", "errors"], rows
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


def training_table() -> str:
    rows = [
        [
            row["name"],
            f"{row['ms_per_step']:.1f}",
            f"{row['images_per_second']:,.0f}",
            f"{row['times_the_rival']:.1f} x",
        ]
        for row in read("train_speed")["steps"]
    ]
    return markdown(["training, ViT-S/14, 126 px, batch 64", "ms per step", "images/s", "gain"], rows)


def speed_blocks() -> dict[str, Callable[[], str]]:
    """Every block by its name, not drawn yet."""
    return {
        "speed-steps": step_table,
        "speed-experts": partial(curve_table, "by_experts", "experts", "experts, batches of 32"),
        "speed-images": partial(curve_table, "by_batch", "batch", "images per batch, 3 experts"),
        "speed-refresh": refresh_table,
        "speed-cpu": processor_line,
        "speed-merge": merge_line,
        "speed-load": load_line,
        "speed-service": service_table,
        "speed-training": training_table,
        "speed-dicom": dicom_table,
    }
