"""The service under load, beside calling the model directly in the same run: errors, latency, throughput, memory, log.

    python3 benchmarks/service.py --clients 64 --requests 20000 --json service.json

A real `mergestream serve` over a pool of micro ViTs with random weights; clients in another process, each with one
connection, post PNGs of the phantom hospitals one at a time to a few streams and wait for each answer. Afterwards
every answer is looked up in the audit log. The rival is a loop over `method.step` on the same pictures, decoded
already, with nobody to answer and nothing to log.
"""

import argparse
import asyncio
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from provenance import provenance

import mergestream as ms
from mergestream.bench.demo import MICRO
from mergestream.networks.architecture import create_network
from mergestream.pool.checkpoint import write_expert
from mergestream.pool.expert_card import BASE, ExpertCard
from mergestream.serving.audit.lines import raw_lines
from mergestream.serving.audit.log_verification import verify

SETTLED = 2000  # requests after which memory should not grow any more
PICTURES = 512
EXPERTS = ("lyon", "brest", "turin")
NETWORK = "vit_tiny_patch16_224"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--serve", action="append", default=[], help="one more word for `mergestream serve`")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--client-of", help=argparse.SUPPRESS)
    parser.add_argument("--pictures", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client_of:
        asyncio.run(ask(given))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = about(given) | measured(given, Path(folder))
    said = {key: value for key, value in found.items() if key not in ("command", "machine")}
    print(json.dumps(said, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    if found["errors"] or found["answers_not_in_the_log"] or not found["log_verifies"]:
        sys.exit(1)


def measured(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    images = drawn()
    np.save(folder / "pictures.npy", images)
    write_pool(folder / "pool", classes=ms.load_dataset("phantom").classes)
    typical = max(1, given.clients // given.streams)
    before = directly(folder / "pool", images, typical)
    with served(folder, given.serve) as (url, server):
        say(f"{url} is ready with {resident(server.pid):.0f} MiB")
        answers, memory, seconds = under_load(given, folder, url, server.pid)
    mean_batch = statistics.mean(answer["batch_size"] for answer in answers["answered"])
    rate, batch = len(answers["answered"]) / seconds, round(mean_batch)
    rivals = {size: directly(folder / "pool", images, size) for size in sorted({1, batch, typical, 32})}
    return {
        "errors": given.requests - len(answers["answered"]),
        "error_kinds": answers["errors"],
        "latency_ms": percentiles([answer["ms"] for answer in answers["answered"]]),
        "requests_per_second": rate,
        "mean_batch": mean_batch,
        "directly_images_per_second": rivals,
        "directly_before_the_load": {typical: before},
        "ratio_to_directly_same_batch": rate / rivals[batch],
        "rss_mib": memory,
        "rss_ratio": memory["end"] / memory["settled"] if memory.get("settled") else None,
        **looked_up(folder / "state" / "audit.jsonl", answers["answered"]),
    }


# --- the service --------------------------------------------------------------------------------------------


def drawn() -> np.ndarray:
    """Pictures [N,3,H,W] of all phantom hospitals in turn."""
    data = ms.load_dataset("phantom")
    each = -(-PICTURES // len(data.domains))
    return np.concatenate([data[name].batch(range(each)).numpy() for name in data.domains])[:PICTURES]


def write_pool(folder: Path, classes: tuple[str, ...]) -> None:
    for seed, name in enumerate((BASE, *EXPERTS)):
        torch.manual_seed(seed)
        network = create_network(NETWORK, num_classes=len(classes), **MICRO)
        write_expert(folder / name, network.module.state_dict(), ExpertCard.for_network(name, network, classes))


@contextmanager
def served(folder: Path, more: list[str]) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`mergestream serve` in a process of its own, ended as an operator would."""
    line = [sys.executable, "-m", "mergestream", "serve", str(folder / "pool"), "--port", "0", "--rate", "0"]
    line += ["--state", str(folder / "state"), "--guard", "fallback=none", "--abstain-on", "none", *more]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(line, stderr=log, text=True)
    try:
        yield ready(folder / "server.log", server), server
        server.send_signal(signal.SIGTERM)
        if server.wait(60) != 0:
            raise SystemExit(
                f"The service ended with {server.returncode}: {(folder / 'server.log').read_text()[-2000:]}"
            )
    finally:
        server.kill()


def ready(log: Path, server: subprocess.Popen[str]) -> str:
    ends = time.monotonic() + 120
    while time.monotonic() < ends and server.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("Ready: "):
                return line.split()[1]
        time.sleep(0.1)
    raise SystemExit(f"The service did not start: {log.read_text()}")


def resident(process: int) -> float:
    """MiB in memory."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


# --- clients ------------------------------------------------------------------------------------------------


def under_load(
    given: argparse.Namespace, folder: Path, url: str, server: int
) -> tuple[dict[str, Any], dict[str, float], float]:
    """What the clients were told, the server's memory by request, and how long it took."""
    line = [sys.executable, __file__, "--client-of", url, "--pictures", str(folder / "pictures.npy")]
    for name in ("clients", "requests", "streams"):
        line += [f"--{name}", str(getattr(given, name))]
    memory = {"start": resident(server)}
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as clients:
        assert clients.stdout is not None
        for told in clients.stdout:
            word, _, rest = told.partition(" ")
            if word == "done":
                memory[rest.strip()] = resident(server)
                say(f"{rest.strip()} requests, server {memory[rest.strip()]:.1f} MiB")
            else:
                memory["end"] = resident(server)
                results: dict[str, Any] = json.loads(rest)
    settled = memory.get(str(SETTLED))
    return results, memory | ({"settled": settled} if settled else {}), results["seconds"]


async def ask(given: argparse.Namespace) -> None:
    """Every client asks, waits for its answer and asks again, until all requests are made."""
    import aiohttp

    files = [png(picture) for picture in np.load(given.pictures)]
    answered: list[dict[str, Any]] = []
    errors: Counter[str] = Counter()
    left = iter(range(given.requests))
    step = min(1000, max(1, given.requests // 10))

    async def client(session: aiohttp.ClientSession) -> None:
        for number in left:
            form = aiohttp.FormData()
            form.add_field("images", files[number % len(files)], filename="a.png", content_type="image/png")
            began = time.perf_counter()
            try:
                async with session.post(f"/v1/streams/site-{number % given.streams}/images", data=form) as response:
                    told = await response.json(content_type=None)
            except (aiohttp.ClientError, TimeoutError) as error:
                errors[type(error).__name__] += 1
                continue
            if response.status != 200:
                errors[f"{response.status} {told.get('code')}"] += 1
                continue
            answered.append(kept(told, 1000 * (time.perf_counter() - began)))
            if len(answered) % step == 0:
                print("done", len(answered), flush=True)

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(given.client_of, connector=connector) as session:
        began = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(given.clients)))
        seconds = time.perf_counter() - began
    print("all", json.dumps({"seconds": seconds, "errors": errors, "answered": answered}), flush=True)


def kept(told: dict[str, Any], milliseconds: float) -> dict[str, Any]:
    (prediction,) = told["predictions"]
    short = {name: told[name] for name in ("stream", "step", "position", "batch_size")}
    return {**short, **told["audit"], "class": told["classes"].index(prediction), "ms": milliseconds}


def png(picture: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture.transpose(1, 2, 0)).save(file, "PNG")
    return file.getvalue()


def percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 95, 99)} | {"max": max(values)}


# --- afterwards ---------------------------------------------------------------------------------------------


def looked_up(log: Path, answered: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether the log is sound, and which answers it does not hold: by number, hash, stream, step and prediction."""
    lines = {line["sequence"]: line for line in (json.loads(raw.text) for raw in raw_lines(log))}
    missing = 0
    for answer in answered:
        line = lines.get(answer["sequence"], {"hash": None})
        body = line.get("body", {})
        as_told = line["hash"] == answer["hash"] and (body["stream"], body["step"]) == (
            answer["stream"],
            answer["step"],
        )
        missing += not (as_told and body["predictions"][answer["position"]] == answer["class"])
    steps = [line["body"] for line in lines.values() if line["kind"] == "step"]
    report = verify(log)
    return {
        "answers_not_in_the_log": missing,
        "steps_in_the_log": len(steps),
        "steps_answered": len({answer["sequence"] for answer in answered}),
        "pictures_in_the_log": sum(len(body["inputs"]) for body in steps),
        "log_verifies": report.sound and report.torn is None,
        "log_mib": sum(file.stat().st_size for file in log.parent.glob(f"{log.name}*")) / 2**20,
    }


def directly(pool: Path, images: np.ndarray, batch: int, seconds: float = 5.0) -> float:
    """Images a second of `method.step` alone, on decoded pictures."""
    method = ms.create_method("entropy_adaptive", ms.ExpertPool.load(pool))
    batches = torch.from_numpy(images).split(batch)
    batches = [each for each in batches if len(each) == batch]
    for each in batches[:5]:
        method.step(each)
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        method.step(batches[done % len(batches)])
        done += 1
    return done * batch / (time.perf_counter() - began)


def about(given: argparse.Namespace) -> dict[str, Any]:
    return {
        "network": f"{NETWORK} {MICRO}",
        "experts": len(EXPERTS),
        "clients": given.clients,
        "requests": given.requests,
        "streams": given.streams,
        "serve": given.serve,
        "load_before": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
        **provenance(),
    }


def say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
