"""675 small MR objects sent by dcmtk's storescu: received by the DICOM node and by dcmtk's storescp, in turn.

    python3 benchmarks/dicom_node.py --json benchmarks/results/dicom_node.json

Two ways of sending: 'stock', as Debian installs dcmtk, where storescu and storescp wait for delayed acknowledgements of
TCP (Nagle's algorithm), and 'no delay' (TCP_NODELAY=1 for both), where they do not. Two ways of flushing: before the
status of each object, and before the release of the association. storescp flushes nothing. The node runs inside a real
`mergestream serve`, with a rule for series that answers nothing meanwhile. Times are of the whole storescu process.
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
from collections.abc import Iterator
from contextlib import contextmanager
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
    for name, delayed in (("no delay", False), ("stock", True)):
        environment = {name: value for name, value in os.environ.items() if name != "TCP_NODELAY"}
        environment |= {} if delayed else {"TCP_NODELAY": "1"}
        taken = seconds[name] = {"storescp": [], **{f"node, flush: {each}": [] for each in FLUSHES}}
        with (
            storescp(folder / f"storescp {name}", environment) as rival,
            node(folder, name, "object") as each,
            node(folder, name, "association") as together,
        ):
            rounds = 1 if delayed else repeats
            for receivers in ((rival, None, together), (None, each, None)):  # many flushes would disturb the others
                for _ in range(rounds):
                    sent = written(folder / "sent", objects)
                    for receiver, port in zip(taken, receivers, strict=True):
                        if port is not None:
                            taken[receiver].append(timed(sent, port, environment))
        for flush in FLUSHES:
            inbox = list((folder / f"{name} {flush}" / "dicom" / "inbox").glob("*.dcm"))
            assert len(inbox) == objects * (1 if delayed else repeats), "objects are missing"
    medians = {name: {who: statistics.median(values) for who, values in each.items()} for name, each in seconds.items()}
    # Each time is compared with that of storescp in the same round: other work on the machine comes and goes.
    ratios = {
        name: {
            who: round(statistics.median(own / rival for own, rival in zip(values, each["storescp"], strict=True)), 3)
            for who, values in each.items()
            if who != "storescp"
        }
        for name, each in seconds.items()
    }
    fastest = {name: {who: min(values) for who, values in each.items()} for name, each in seconds.items()}
    about = {"objects": objects, "pixels": [SIZE, SIZE], "bits": 16, "target": TARGET, "fsync_ms": fsync_ms(folder)}
    return {
        **about,
        "load": os.getloadavg()[0],
        "seconds": seconds,
        "medians": medians,
        "fastest": fastest,
        "times_storescp": ratios,
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
        port, said = 0, ""
        while not said.startswith("Ready: "):
            said = process.stderr.readline()
            assert said, "the service did not start"
            if said.startswith("DICOM node: "):
                port = int(said.split("port ")[1].rstrip(".\n"))
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
