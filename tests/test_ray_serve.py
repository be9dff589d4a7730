"""Engines behind Ray Serve on a local cluster: pinned streams, the plain engine's answers, a sound log each."""

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mergestream as ms
from benching import write_pool
from engines import Service as PlainService
from engines import batch
from mergestream.runtime.errors import InputError, UnknownNameError
from mergestream.serving.answer_queue import OverloadedError
from mergestream.serving.audit.log_verification import verify
from mergestream.serving.engine.answers import Answer
from mergestream.serving.options import ServeOptions
from mergestream.serving.replicas.ray_cluster import start_replicas
from mergestream.serving.replicas.replicated_engine import ReplicatedEngine, place_of
from test_intake import drawn, saved

STREAMS = ("lyon", "brest", "turin", "aachen")
MOVING = {"momentum": 0.7}


@given(st.text(min_size=1), st.integers(1, 20))
def test_one_more_engine_moves_a_stream_only_to_itself(stream: str, engines: int) -> None:
    before, after = place_of(stream, engines), place_of(stream, engines + 1)
    assert 0 <= before < engines
    assert after in (before, engines)


def test_streams_are_spread_evenly() -> None:
    counts = Counter(place_of(f"site-{n}", 5) for n in range(5000))
    assert all(850 < count < 1150 for count in counts.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    write_pool(folder / "pool")
    return folder


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[ReplicatedEngine]:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'mergestream[ray]'")
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'mergestream[scale-out]'")
    ray.init(address="local", num_cpus=64, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    options, guards = ("momentum=0.7",), ("fallback=none",)
    request = ServeOptions(
        folder / "pool", state=folder / "state", options=options, guards=guards, abstain_on="none", replicas=2
    )
    try:
        yield start_replicas(request)
    finally:
        from ray import serve

        serve.shutdown()
        ray.shutdown()


def lines(folder: Path, number: int) -> list[dict[str, Any]]:
    log = folder / "state" / f"engine-{number:03d}" / "audit.jsonl"
    assert verify(log).sound
    return [json.loads(line) for line in log.read_text().splitlines()]


def without_times(answer: Answer) -> Answer:
    return replace(answer, audit={}, seconds=0, begun=tuple(replace(alarm, since="") for alarm in answer.begun))


@pytest.mark.slow
def test_streams_are_pinned_and_answers_are_the_plain_engine_s(engines: ReplicatedEngine, folder: Path) -> None:
    places = {stream: engines.place(stream) for stream in STREAMS}
    assert set(places.values()) == {0, 1}
    plain_folder = folder / "plain"
    plain_folder.mkdir()
    with PlainService(plain_folder, ms.ExpertPool.load(folder / "pool"), options=MOVING) as plain:
        for number in range(40):
            stream, pictures = STREAMS[number % 4], batch(number)
            answer, expected = engines.answer(stream, pictures), plain.engine.answer(stream, pictures)
            assert without_times(answer) == without_times(expected)
    for place in (0, 1):
        steps = [line["body"] for line in lines(folder, place) if line["kind"] == "step"]
        assert {step["stream"] for step in steps} == {stream for stream in STREAMS if places[stream] == place}
        assert Counter(step["stream"] for step in steps) == {s: 10 for s in STREAMS if places[s] == place}
    assert [(stream["stream"], stream["steps"]) for stream in engines.streams()] == [(s, 10) for s in sorted(STREAMS)]


@pytest.mark.slow
def test_alarms_are_acknowledged_by_the_engine_of_their_stream(engines: ReplicatedEngine, folder: Path) -> None:
    stream = STREAMS[0]
    engines.answer(stream, batch(49))
    engines.acknowledge(stream, name="Ann", note="the scanner is in service", by="the-administrator")
    (status,) = (each for each in engines.streams() if each["stream"] == stream)
    assert {alarm.acknowledged_by for alarm in status["alarms"]} == {"Ann"}
    own = [line for line in lines(folder, engines.place(stream)) if line["kind"] == "alarms_acknowledged"]
    assert [(line["body"]["stream"], line["body"]["name"]) for line in own] == [(stream, "Ann")]
    assert not [line for line in lines(folder, 1 - engines.place(stream)) if line["kind"] == "alarms_acknowledged"]


@pytest.mark.slow
def test_what_changes_the_service_reaches_every_engine(engines: ReplicatedEngine, folder: Path) -> None:
    assert engines.switch("lyon", on=False) == ("lyon",)
    for stream in STREAMS:
        assert engines.answer(stream, batch(50)).switched_off == ("lyon",)
    assert [each["name"] for each in engines.describe()["experts"] if not each["on"]] == ["lyon"]
    assert engines.switch("lyon", on=True) == ()
    assert not engines.reload()["changed"]
    engines.reset("lyon")
    with pytest.raises(UnknownNameError):
        engines.delete("nobody")
    with pytest.raises(InputError):
        engines.answer("../lyon", batch(1))
    assert engines.failing is None
    for place in (0, 1):
        kinds = Counter(line["kind"] for line in lines(folder, place))
        assert kinds["expert_switched"] == 2, kinds
        assert kinds["pool_reloaded"] == 1, kinds


@pytest.mark.slow
def test_the_http_service_in_front_is_the_same(engines: ReplicatedEngine) -> None:
    from mergestream.serving.http.application import create_app
    from mergestream.serving.monitoring import Metrics
    from mergestream.serving.service import Service

    def in_front(_: Metrics) -> ReplicatedEngine:
        return ReplicatedEngine(engines._handles)  # the service will close it

    async def ask() -> tuple[dict[str, Any], dict[str, Any]]:
        service = Service(in_front)
        await service.start()
        transport = httpx.ASGITransport(create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
            files = {"images": ("a.png", saved(np.asarray(drawn((24, 24, 3))), "PNG"))}
            answer = await client.post("/v1/streams/http/images", files=files)
            assert answer.status_code == 200, answer.text
            overview = (await client.get("/v1/overview")).json()
            assert (await client.get("/readyz")).status_code == 200
        await service.stop()
        return answer.json(), overview

    answer, overview = asyncio.run(ask())
    assert answer["stream"] == "http"
    assert answer["audit"]["hash"]
    assert "http" in [stream["name"] for stream in overview["streams"]]
    assert overview["pool"] == engines.describe()


@pytest.mark.slow
def test_an_engine_that_is_killed_comes_back_with_its_streams(engines: ReplicatedEngine, folder: Path) -> None:
    stream = "lyon"
    before = engines.answer(stream, batch(60))
    place = engines.place(stream)
    os.kill(engines.processes()[place], signal.SIGKILL)
    ends = time.monotonic() + 90
    while True:
        try:
            after = engines.answer(stream, batch(61))
            break
        except OverloadedError:
            assert time.monotonic() < ends, "it did not come back"
            time.sleep(0.5)
    assert after.step == before.step + 1
    while engines.failing is not None:  # until both were looked at again
        assert time.monotonic() < ends
        time.sleep(0.1)
    kinds = [line["kind"] for line in lines(folder, place)]
    assert kinds.count("service_started") == 2, Counter(kinds)
