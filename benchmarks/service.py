"""The service under load, in turns with direct calls and with other servers around the same method.

    python3 benchmarks/service.py --requests 20000 --json service.json

A real `mergestream serve` over a pool of micro ViTs with random weights; clients in another process, each with one
connection, post PNGs of the phantom hospitals one at a time to a few streams and wait for each answer. Afterwards
every answer is looked up in the audit log. In every round these take turns: `method.step` alone in a loop, on pictures
decoded already, in batches of the size that the service had; the service; a bare FastAPI endpoint; LitServe, where it
is installed. Ratios are of one round; their median is reported. A last short run shows where the milliseconds go.

Single images share a step here (--no-single-image-answers), as direct batched calls do; `--alone` measures the
service's default, one step per image, beside direct calls of one image.
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from provenance import provenance

import mergestream as ms
from mergestream.bench.demo import MICRO
from mergestream.networks.architecture import create_network
from mergestream.pool.checkpoint import write_expert
from mergestream.pool.expert_card import BASE, ExpertCard
from mergestream.serving.audit.lines import raw_lines
from mergestream.serving.audit.log_verification import verify

HERE = Path(__file__).parent
PICTURES = 512
EXPERTS = ("lyon", "brest", "turin")
NETWORK = "vit_tiny_patch16_224"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=20_000, help="in all rounds together")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch, in every process")
    parser.add_argument("--network", help="one of timm, as large as it is, instead of the micro ViT")
    parser.add_argument("--alone", action="store_true", help="one step per image, the service's default")
    parser.add_argument("--no-rivals", action="store_true")
    parser.add_argument("--serve", action="append", default=[], help="one more word for `mergestream serve`")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(given.threads)  # for the servers
    torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory() as folder:
        record = circumstances(given) | measured(given, Path(folder))
    print(json.dumps({key: value for key, value in record.items() if key not in ("command", "machine")}, indent=1))
    if given.json:
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    if record["errors"] or record["answers_not_in_the_log"] or not record["log_verifies"]:
        sys.exit(1)


def circumstances(given: argparse.Namespace) -> dict[str, Any]:
    names = ("clients", "requests", "rounds", "streams", "threads", "alone", "serve")
    about = {name: getattr(given, name) for name in names}
    load = round(os.getloadavg()[0], 1)
    about |= {"network": given.network or f"{NETWORK} {MICRO}", "experts": len(EXPERTS)}
    about |= {"load_before": load, "cores": os.cpu_count()}
    return about | provenance()


def measured(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    images = phantom_pictures()
    np.save(folder / "pictures.npy", images)
    write_pool(folder / "pool", ms.load_dataset("phantom").classes, given.network)
    words = ["--single-image-answers" if given.alone else "--no-single-image-answers", *given.serve]
    rounds, memory = list[dict[str, Any]](), dict[str, float]()
    with ExitStack() as stack:
        url, server = stack.enter_context(served(folder, words))
        others = {} if given.no_rivals else rivals(stack, folder)
        each = given.requests // given.rounds
        under_load(given, folder, url, stream_paths(given), min(each, 500))  # until everything is warm
        memory["start"] = resident(server.pid)
        for number in range(given.rounds):
            rounds.append(one_round(given, folder, images, url, server, others, each))
            memory[f"after {each * (number + 1)}"] = resident(server.pid)
            say(json.dumps({key: value for key, value in rounds[-1].items() if key != "answered"}))
    answered = [answer for each in rounds for answer in each.pop("answered")]
    return {
        "errors": given.rounds * each - len(answered),
        **summary(rounds, answered),
        "rounds_measured": rounds,
        "rss_mib": memory,
        "stages_ms": stages(given, folder, words),
        **looked_up(folder / "state" / "audit.jsonl", answered),
    }


def one_round(given: Any, folder: Path, images: Any, url: str, server: Any, others: Any, count: int) -> dict[str, Any]:
    """The service, direct calls at its batch size, and the rivals, one after the other."""
    before = processor_seconds(server.pid)
    load = under_load(given, folder, url, stream_paths(given), count)
    used = processor_seconds(server.pid) - before
    batch = max(1, round(statistics.mean(answer["batch_size"] for answer in load["answered"])))
    rate = len(load["answered"]) / load["seconds"]
    result = {
        "requests_per_second": rate,
        "mean_batch": batch,
        "server_cpu_ms": 1000 * used / count,
        "client_cpu_ms": 1000 * load["cpu_seconds"] / count,
        **directly(folder / "pool", images, batch),
        "answered": load["answered"],
    }
    result["ratio_to_direct"] = rate / result["direct"]
    for name, address in others.items():
        load = under_load(given, folder, address, ["/answer"], max(64, count // 5))
        result[name] = len(load["answered"]) / load["seconds"]
        result[f"{name}_p99_ms"] = percentiles([each["ms"] for each in load["answered"]])["p99"]
        result[f"ratio_to_{name}"] = rate / result[name]
    return result


def summary(rounds: list[dict[str, Any]], answered: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the rounds."""
    names = [name for name in rounds[0] if name != "answered"]
    medians = {name: statistics.median(each[name] for each in rounds) for name in names}
    return {"latency_ms": percentiles([answer["ms"] for answer in answered]), **medians}


def directly(pool: Path, images: np.ndarray, batch: int, seconds: float = 4.0) -> dict[str, float]:
    """Images per second of `method.step` alone, on decoded pictures, and processor time per image."""
    method = ms.create_method("entropy_adaptive", ms.ExpertPool.load(pool))
    batches = [each for each in torch.from_numpy(images).split(batch) if len(each) == batch]
    for each in batches[:5]:
        method.step(each)
    done, began, processor = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        method.step(batches[done % len(batches)])
        done += 1
    rate = done * batch / (time.perf_counter() - began)
    return {"direct": rate, "direct_cpu_ms": 1000 * (time.process_time() - processor) / (done * batch)}


# --- servers ------------------------------------------------------------------------------------------------


def phantom_pictures() -> np.ndarray:
    """Pictures [N,3,H,W] of all phantom hospitals in turn."""
    data = ms.load_dataset("phantom")
    each = -(-PICTURES // len(data.domains))
    return np.concatenate([data[name].batch(range(each)).numpy() for name in data.domains])[:PICTURES]


def write_pool(folder: Path, classes: tuple[str, ...], name_of_network: str | None = None) -> None:
    options = {} if name_of_network else MICRO
    for seed, name in enumerate((BASE, *EXPERTS)):
        torch.manual_seed(seed)
        network = create_network(name_of_network or NETWORK, num_classes=len(classes), **options)
        write_expert(folder / name, network.module.state_dict(), ExpertCard.for_network(name, network, classes))


@contextmanager
def served(
    folder: Path, more: list[str], program: tuple[str, ...] = ("-m", "mergestream"), state: str = "state"
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`mergestream serve` in a process of its own, ended as an operator would."""
    line = [sys.executable, *program, "serve", str(folder / "pool"), "--port", "0", "--rate", "0"]
    line += ["--state", str(folder / state), "--guard", "fallback=none", "--abstain-on", "none", *more]
    log = folder / f"{state}.log"
    with log.open("w") as errors:
        server = subprocess.Popen(line, stderr=errors, text=True)
    try:
        yield ready(log, server), server
        server.send_signal(signal.SIGTERM)
        if server.wait(60) != 0:
            raise SystemExit(f"The service ended with {server.returncode}: {log.read_text()[-2000:]}")
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


def rivals(stack: ExitStack, folder: Path) -> dict[str, str]:
    """Start the other servers; their addresses by name."""
    names = ["fastapi"]
    if find_spec("litserve"):
        names.append("litserve")
    else:
        say("LitServe is not installed and therefore left out: pip install litserve.")
    return {name: stack.enter_context(rival(name, folder)) for name in names}


@contextmanager
def rival(name: str, folder: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    line = [sys.executable, str(HERE / "service_rivals.py"), name, str(folder / "pool"), str(port)]
    server = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    url, ends = f"http://127.0.0.1:{port}", time.monotonic() + 120
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/openapi.json", timeout=5).close()
                break
            except OSError as error:
                if time.monotonic() > ends or server.poll() is not None:
                    raise SystemExit(f"{name} did not start.") from error
                time.sleep(0.2)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def stream_paths(given: argparse.Namespace) -> list[str]:
    return [f"/v1/streams/site-{number}/images" for number in range(given.streams)]


def under_load(given: Any, folder: Path, url: str, paths: list[str], requests: int) -> dict[str, Any]:
    """What the clients were told, and how long it took."""
    line = [sys.executable, str(HERE / "service_client.py"), url, str(folder / "pictures.npy")]
    line += ["--clients", str(given.clients), "--requests", str(requests)]
    line += [word for path in paths for word in ("--path", path)]
    result: dict[str, Any] = json.loads(subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True).stdout)
    if result["errors"]:
        say(f"{url}: {result['errors']}")
    return result


def stages(given: Any, folder: Path, words: list[str]) -> dict[str, float]:
    """Mean milliseconds of each stage: of a request, and of a step, which answers several requests."""
    file, count = folder / "stages.json", min(2000, given.requests)
    program = (str(HERE / "service_stages.py"), str(file))
    with served(folder, words, program, "staged") as (url, _):
        under_load(given, folder, url, stream_paths(given), count)
    means = {name: 1000 * total / number for name, (total, number) in json.loads(file.read_text()).items()}
    named = {f"request: {name}": means[name] for name in ("body", "decode", "respond")}
    named["request: wait and step"] = means["request"] - sum(named.values())
    of_step = {f"step: {name}": means[name] for name in ("model", "audit", "save")}
    of_step["step: guards, hashes, record, wait for the device"] = means["step"] - sum(of_step.values())
    return {"request": means["request"], **named, "step": means["step"], **of_step}


# --- numbers ------------------------------------------------------------------------------------------------


def children(process: int) -> list[int]:
    return [int(word) for file in Path(f"/proc/{process}/task").glob("*/children") for word in file.read_text().split()]


def resident(process: int) -> float:
    """MiB in memory, of a process and its children: the engine and the decoders."""
    lines = [
        line for each in (process, *children(process)) for line in Path(f"/proc/{each}/status").read_text().splitlines()
    ]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def processor_seconds(process: int) -> float:
    """Of a process and its children: the engine and the decoders."""
    ticks = 0
    for each in (process, *children(process)):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 95, 99)} | {"max": max(values)}


def looked_up(log: Path, answered: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether the log is sound, and which answers it does not hold: by number, hash, stream, step and prediction."""
    lines = {line["sequence"]: line for line in (json.loads(raw.text) for raw in raw_lines(log))}
    missing = 0
    for answer in answered:
        line = lines.get(answer["sequence"], {"hash": None})
        body = line.get("body", {})
        place = (body.get("stream"), body.get("step"))
        as_told = line["hash"] == answer["hash"] and place == (answer["stream"], answer["step"])
        missing += not (as_told and body["predictions"][answer["position"]] == answer["class"])
    steps = [line["body"] for line in lines.values() if line["kind"] == "step"]
    report = verify(log)
    return {
        "answers_not_in_the_log": missing,
        "steps_in_the_log": len(steps),
        "pictures_in_the_log": sum(len(body["inputs"]) for body in steps),
        "log_verifies": report.sound and report.torn is None,
        "log_mib": sum(file.stat().st_size for file in log.parent.glob(f"{log.name}*")) / 2**20,
    }


def say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
