"""675 small MR objects sent by dcmtk's storescu: received by the DICOM node and by dcmtk's storescp, in turn.

    python3 benchmarks/dicom_node.py --json benchmarks/results/dicom_node.json

Two ways of sending: 'stock', as Debian installs dcmtk, where storescu and storescp wait for delayed acknowledgements of
TCP (Nagle's algorithm), and 'no delay' (TCP_NODELAY=1 for both), where they do not. Two ways of flushing: before the
status of each object (the default), and before the release of the association. storescp flushes nothing. Each round
sends the same objects to storescp, to the default and to the other; the disk is flushed before each, so that none waits
for what another has written. The node runs inside a real `mergestream serve`, with a rule for series that answers
nothing meanwhile. Times are of the whole storescu process.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from provenance import provenance
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import ExplicitVRLittleEndian, MRImageStorage, generate_uid
from service import write_pool

SIZE = 128
NODE_RULES = "flush: {flush}\nrules: [{{stream: mr, answer: series, idle_seconds: 3600}}]\n"
FLUSHES = ("object", "association")
TARGET = 1.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--objects", type=int, default=675)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measured = measure(Path(folder), given.objects, given.repeats)
    result = {"schema_version": 1, "provenance": provenance(), **measured}
    text = json.dumps(result, indent=2)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")


def measure(folder: Path, objects: int, repeats: int) -> dict[str, Any]:
    write_pool(folder / "pool", ("a", "b"))
    seconds: dict[str, dict[str, list[float]]] = {}
    load, flushed = os.getloadavg()[0], fsync_ms(folder)
    for name, delayed in (("no delay", False), ("stock", True)):
        environment = {name: value for name, value in os.environ.items() if name != "TCP_NODELAY"}
        environment |= {} if delayed else {"TCP_NODELAY": "1"}
        rounds = 1 if delayed else repeats
        with ExitStack() as stack:
            ports = {"storescp": stack.enter_context(storescp(folder / f"storescp {name}", environment))}
            for flush in FLUSHES:
                ports[f"node, flush: {flush}"] = stack.enter_context(node(folder, name, flush))
            seconds[name] = {receiver: [] for receiver in ports}
            for _ in range(rounds):
                sent = written(folder / "sent", objects)
                for receiver, port in ports.items():
                    os.sync()
                    seconds[name][receiver].append(timed(sent, port, environment))
        for flush in FLUSHES:
            inbox = list((folder / f"{name} {flush}" / "dicom" / "inbox").glob("*.dcm"))
            assert len(inbox) == objects * rounds, "objects are missing"
    return {
        "objects": objects,
        "pixels": [SIZE, SIZE],
        "bits": 16,
        "target": TARGET,
        "fsync_ms": flushed,
        "load": load,
        "seconds": seconds,
        **{name: each_receiver(seconds, of) for name, of in (("medians", statistics.median), ("fastest", min))},
        "times_storescp": {name: times_storescp(each) for name, each in seconds.items()},
    }


def each_receiver(seconds: dict[str, dict[str, list[float]]], of: Callable[[list[float]], float]) -> dict[str, Any]:
    return {name: {who: round(of(values), 3) for who, values in each.items()} for name, each in seconds.items()}


def times_storescp(seconds: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Ratios to storescp: of the medians, of the fastest rounds, and the median over the rounds of each round's own."""
    rival = seconds["storescp"]
    return {
        who: {
            "medians": round(statistics.median(values) / statistics.median(rival), 3),
            "fastest": round(min(values) / min(rival), 3),
            "same round": round(statistics.median(own / other for own, other in zip(values, rival, strict=True)), 3),
        }
        for who, values in seconds.items()
        if who != "storescp"
    }


def written(folder: Path, count: int) -> Path:
    """New objects of one series: the node would not store the same ones twice."""
    folder.mkdir(exist_ok=True)
    study, series, random = generate_uid(), generate_uid(), np.random.default_rng(0)
    for number in range(count):
        image = Dataset()
        image.file_meta = FileMetaDataset()
        image.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        image.SOPClassUID, image.SOPInstanceUID = MRImageStorage, generate_uid()
        image.StudyInstanceUID, image.SeriesInstanceUID, image.Modality = study, series, "MR"
        image.Rows = image.Columns = SIZE
        image.BitsAllocated, image.BitsStored, image.HighBit, image.PixelRepresentation = 16, 12, 11, 0
        image.SamplesPerPixel, image.PhotometricInterpretation = 1, "MONOCHROME2"
        image.PixelData = random.integers(0, 4096, (SIZE, SIZE), dtype=np.uint16).tobytes()
        image.save_as(folder / f"{number:04d}.dcm", enforce_file_format=True)
    return folder


def timed(sent: Path, port: int, environment: dict[str, str]) -> float:
    line = ["storescu", "-aec", "MERGESTREAM", "+sd", "127.0.0.1", str(port), str(sent)]
    began = time.perf_counter()
    subprocess.run(line, env=environment, check=True, capture_output=True)
    return round(time.perf_counter() - began, 3)


@contextmanager
def storescp(folder: Path, environment: dict[str, str]) -> Iterator[int]:
    folder.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    line = ["storescp", "-od", str(folder), str(port)]
    with subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None and socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.05)
        yield port
        process.terminate()


@contextmanager
def node(folder: Path, name: str, flush: str) -> Iterator[int]:
    state, rules = folder / f"{name} {flush}", folder / f"{name} {flush}.yaml"
    rules.write_text(NODE_RULES.format(flush=flush))
    line = [sys.executable, "-m", "mergestream", "serve", str(folder / "pool"), "--state", str(state), "--port", "0"]
    line += ["--dicom-port", "0", "--dicom-rules", str(rules)]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        port, line_read = 0, ""
        while not line_read.startswith("Ready: "):
            line_read = process.stderr.readline()
            assert line_read, "the service did not start"
            if line_read.startswith("DICOM node: "):
                port = int(line_read.split("port ")[1].rstrip(".\n"))
        yield port
        process.terminate()
        process.communicate()


def fsync_ms(folder: Path, times: int = 50) -> float:
    """What flushing one file of 32 KiB takes here."""
    taken = []
    for number in range(times):
        with (folder / f"flushed-{number}").open("wb", buffering=0) as file:
            file.write(bytes(1 << 15))
            began = time.perf_counter()
            os.fsync(file.fileno())
            taken.append(1000 * (time.perf_counter() - began))
    return round(statistics.median(taken), 3)


if __name__ == "__main__":
    main()
