"""`mergestream serve --replicas`: several engines behind one door, as an operator starts, asks and ends them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benching import command, pool_on_disk, process
from mergestream.runtime.errors import InputError, UnknownNameError
from mergestream.serving.open_engine import load_pool
from mergestream.serving.options import ServeOptions
from mergestream.serving.replicas.replicated_engine import place_of
from mergestream.serving.startup import serve
from services import STREAMS, RunningService, direct, form, pixels, png, probabilities, tensor

SITES = ("lyon", "brest", "turin", "aachen")
BATCHES = 5
# What whoever reaches the machine could try; Ray gives up after a while.
STRANGER = "import sys, ray; ray.init(address=sys.argv[1], logging_level='ERROR'); print('LET IN')"


pool = pool_on_disk


@pytest.mark.parametrize("replicas", [0, -1, True])
def test_there_is_at_least_one_engine(pool: Path, tmp_path: Path, replicas: int) -> None:
    with pytest.raises(InputError, match="'replicas' is a whole number of at least 1"):
        serve(ServeOptions(pool, state=tmp_path / "state", replicas=replicas))


def test_what_several_engines_cannot_share_is_refused_before_anything_is_loaded(pool: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="its own log"):
        serve(ServeOptions(pool, state=tmp_path / "state", audit=tmp_path / "one.jsonl", replicas=2))
    done = process("serve", str(pool), "--state", str(tmp_path / "state"), "--replicas", "0")
    assert (done.returncode, "--replicas" in done.stderr) == (2, True), done.stderr


def test_without_ray_it_says_what_to_install(pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(InputError, match=r"pip install 'mergestream\[scale-out\]'"):
        serve(ServeOptions(pool, state=tmp_path / "state", replicas=2))


def test_an_engine_computes_in_the_numbers_it_is_asked_for(pool: Path, tmp_path: Path) -> None:
    options = ServeOptions(pool, state=tmp_path / "state", device="cpu")
    assert load_pool(options).bank.dtype == torch.float32
    assert load_pool(replace(options, dtype="bfloat16")).bank.dtype == torch.bfloat16
    with pytest.raises(UnknownNameError, match="dtype"):
        replace(options, dtype="int8")


@pytest.mark.slow
def test_two_engines_behind_one_door(pool: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'mergestream[scale-out]'")
    places = {site: place_of(site, 2) for site in SITES}
    assert set(places.values()) == {0, 1}
    state, more = tmp_path / "state", ("--replicas", "2", "--option", "momentum=0.7")
    with RunningService(pool, state, *more) as service:
        stranger = knock(service)
        with ThreadPoolExecutor(len(SITES)) as clients:
            answers = dict(
                zip(SITES, clients.map(lambda site: sent(service, site, range(BATCHES)), SITES), strict=True)
            )
        for site in SITES:
            assert_as_in_python(pool, site, answers[site])
        look_around(service)
        begun = descendants(service.process.pid)
        heard = stranger.communicate(timeout=120)[0]
        assert "InvalidAuthToken" in heard, heard
        assert "LET IN" not in heard
        assert service.stop() == 0, service.words()
        assert "Traceback" not in service.words()
    # Ray's own processes end a little after the service on a busy machine; a cluster that stays fails here.
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in begun))
    for place in (0, 1):
        assert_sound(state / f"engine-{place:03d}" / "audit.jsonl", {s for s in SITES if places[s] == place})
    replay = replayed(state / "engine-000" / "audit.jsonl", pool, tmp_path / "images")
    assert replay["outcomes"] == {"exact": BATCHES * sum(place == 0 for place in places.values())}

    with RunningService(pool, state, *more) as again:
        assert [answer["step"] for answer in sent(again, "lyon", [BATCHES])] == [BATCHES]
        assert again.stop() == 0, again.words()


@pytest.mark.slow
def test_engines_that_cannot_open_their_pool_say_which_file_it_is(pool: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'mergestream[scale-out]'")
    bad = tmp_path / "pool"
    shutil.copytree(pool, bad)
    weights = bad / "lyon" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    done = process("serve", str(bad), "--port", "0", "--state", str(tmp_path / "state"), "--replicas", "2")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"mergestream: {weights} does not match the sha-256")
    assert "Ready" not in done.stderr


@pytest.mark.slow
def test_an_engine_that_says_nothing_is_not_waited_for(pool: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'mergestream[scale-out]'")
    here, there = (next(site for site in SITES if place_of(site, 2) == place) for place in (0, 1))
    with RunningService(pool, tmp_path / "state", "--replicas", "2") as service, service.client() as client:
        sent(service, there, [0])
        processes = descendants(service.process.pid)
        (silent,) = [pid for pid in processes if "mergestream-1:Replica" in command_line(pid)[0]]
        os.kill(silent, signal.SIGSTOP)
        wait_until(lambda: client.get("/readyz").status_code == 503)
        began = time.monotonic()
        refused = client.post(f"{STREAMS}/{there}/batches", files=form(*files_of(there, 1)))
        assert (refused.status_code, refused.json()["code"]) == (503, "overloaded")
        assert client.post(f"{STREAMS}/{there}/reset").status_code == 503
        assert time.monotonic() - began < 5
        sent(service, here, [0])
        os.kill(silent, signal.SIGCONT)
        wait_until(lambda: client.get("/readyz").status_code == 200)
        assert sent(service, there, [1])[0]["step"] == 1
        assert service.stop() == 0, service.words()


def wait_until(so: Callable[[], bool], within: float = 60.0) -> None:
    ends = time.monotonic() + within
    while not so():
        assert time.monotonic() < ends
        time.sleep(0.2)


def sent(service: RunningService, site: str, numbers: Sequence[int]) -> list[dict[str, Any]]:
    with service.client() as client:
        responses = [client.post(f"{STREAMS}/{site}/batches", files=form(*files_of(site, n))) for n in numbers]
    assert [response.status_code for response in responses] == [200] * len(numbers), responses[-1].text
    return [response.json() for response in responses]


def seeds(site: str, number: int) -> list[int]:
    return [1000 * SITES.index(site) + 10 * number + picture for picture in range(4)]


def files_of(site: str, number: int) -> list[bytes]:
    return [png(seed) for seed in seeds(site, number)]


def assert_as_in_python(pool: Path, site: str, answers: Sequence[dict[str, Any]]) -> None:
    method = direct(pool, momentum=0.7)
    for number, answer in enumerate(answers):
        step = method.step(tensor(*map(pixels, seeds(site, number))))
        assert answer["stream"] == site
        assert answer["step"] == number
        assert answer["probabilities"] == probabilities(step)
        assert step.encoder_coefficients is not None
        coefficients = dict(zip(method.pool.names, step.encoder_coefficients.tolist(), strict=True))
        assert answer["encoder_coefficients"] == coefficients
        assert answer["head_expert"] == step.head_expert


def look_around(service: RunningService) -> None:
    with service.client() as client:
        assert client.get("/readyz").status_code == 200
        listed = client.get(STREAMS).json()["streams"]
        assert {stream["name"]: stream["steps"] for stream in listed} == dict.fromkeys(SITES, BATCHES)
        counted = [line for line in client.get("/metrics").text.splitlines() if line.startswith("mergestream_audit")]
        assert f"mergestream_audit_lines_total {float(BATCHES * len(SITES))}" in counted
        experts = "/v1/pool/experts/lyon"
        assert client.put(experts, json={"on": False}).json()["switched_off"] == ["lyon"]
        assert [each["name"] for each in client.get("/v1/pool").json()["experts"] if not each["on"]] == ["lyon"]
        assert client.put(experts, json={"on": True}).json()["switched_off"] == []
        refused = client.post(f"{STREAMS}/lyon/batches", files=form(b"no image"))
        assert (refused.status_code, refused.json()["code"]) == (415, "unsupported_format")


def assert_sound(log: Path, sites: set[str]) -> None:
    """Each log verifies for itself and holds its engine's streams, every one of their steps, and nobody else's."""
    done = command("audit", "verify", str(log), "--json")
    assert done.returncode == 0, done.stdout
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [line["body"] for line in lines if line["kind"] == "step"]
    assert Counter(step["stream"] for step in steps) == dict.fromkeys(sites, BATCHES)
    kinds = Counter(line["kind"] for line in lines)
    assert (kinds["service_started"], kinds["expert_switched"], kinds["service_stopped"]) == (1, 2, 1)


def replayed(log: Path, pool: Path, images: Path) -> dict[str, Any]:
    images.mkdir()
    for site in SITES:
        for number in range(BATCHES):
            for place, file in enumerate(files_of(site, number)):
                (images / f"{site}-{number}-{place}.png").write_bytes(file)
    done = command("audit", "replay", str(log), "--images", str(images), "--pool", str(pool), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def knock(service: RunningService) -> subprocess.Popen[str]:
    """Somebody without the cluster's token, who wants to run code on it."""
    words = [word for pid in descendants(service.process.pid) for word in command_line(pid)]
    address = next(word.partition("=")[2] for word in words if word.startswith("--gcs-address="))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    line = [sys.executable, "-c", STRANGER, address]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def descendants(pid: int) -> list[int]:
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [each for child in children for each in (child, *descendants(child))]


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")
