"""The engine in a process of its own: the plain engine's answers, and what a death of either process costs."""

import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import mergestream as ms
from benching import pool_on_disk
from engines import Service as PlainService
from engines import batch
from live_service import engine_of
from mergestream.runtime.errors import InputError, PoolError
from mergestream.serving.answer_queue import OverloadedError
from mergestream.serving.audit.chain import sound_lines
from mergestream.serving.audit.log_verification import verify
from mergestream.serving.engine.answers import Answer
from mergestream.serving.options import ServeOptions
from mergestream.serving.replicas.engine_process import EngineProcess
from mergestream.serving.replicas.replicated_engine import ReplicatedEngine
from services import RunningService, form, png

pool = pool_on_disk
MOVING = {"momentum": 0.7}


def opened(options: ServeOptions) -> ReplicatedEngine:
    process = EngineProcess(options, calls=3)
    try:
        return ReplicatedEngine([process], silence=math.inf, on_close=process.close)
    except BaseException:
        process.close()
        raise


def options_for(pool: Path, state: Path) -> ServeOptions:
    guards = {"guards": ["fallback=none"], "abstain_on": "none"}
    return ServeOptions(pool, state=state, options=["momentum=0.7"], device="cpu", **guards)


def wait_until(so: Callable[[], bool], within: float = 60.0) -> None:
    ends = time.monotonic() + within
    while not so():
        assert time.monotonic() < ends
        time.sleep(0.1)


def without_times(answer: Answer) -> Answer:
    return replace(answer, audit={}, seconds=0, begun=tuple(replace(alarm, since="") for alarm in answer.begun))


@pytest.mark.slow
def test_answers_are_the_plain_engines_and_a_killed_process_goes_on_from_its_log(pool: Path, tmp_path: Path) -> None:
    options, folder = options_for(pool, tmp_path / "state"), tmp_path / "plain"
    folder.mkdir()
    engine = opened(options)
    with PlainService(folder, ms.ExpertPool.load(pool), options=MOVING) as plain:
        for number in range(3):
            answer, expected = engine.answer("lyon", batch(number)), plain.engine.answer("lyon", batch(number))
            assert without_times(answer) == without_times(expected)
        with pytest.raises(InputError):
            engine.answer("../lyon", batch(1))
        with pytest.raises(InputError, match="1 to 256 pictures"):
            engine.answer("lyon", [])
        os.kill(engine.processes()[0], signal.SIGKILL)
        with pytest.raises(OverloadedError, match="is being restarted"):
            engine.answer("lyon", batch(3))
        assert "restarted" in (engine.failing or "")
        wait_until(lambda: engine.failing is None)
        answer, expected = engine.answer("lyon", batch(3)), plain.engine.answer("lyon", batch(3))
        assert without_times(answer) == without_times(expected)
    assert [(each["stream"], each["steps"]) for each in engine.streams()] == [("lyon", 4)]
    engine.close()
    log = options.state / "audit.jsonl"
    assert verify(log).sound
    steps = [line["body"]["step"] for line in sound_lines(log) if line["kind"] == "step"]
    assert steps == [0, 1, 2, 3]  # none is lost, none is doubled
    again = opened(options)  # the locks are free
    assert [each["steps"] for each in again.streams()] == [4]
    again.close()


def test_why_an_engine_does_not_open_is_its_own_sentence(tmp_path: Path) -> None:
    with pytest.raises((InputError, PoolError), match="nowhere"):
        opened(options_for(tmp_path / "nowhere", tmp_path / "state"))


@pytest.mark.slow
def test_a_killed_service_takes_its_engine_along_and_a_killed_engine_is_replaced(pool: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    with RunningService(pool, state) as service, service.client() as client:
        assert post(client, 0) == (200, 0)
        os.kill(engine_of(service.process.pid), signal.SIGKILL)
        wait_until(lambda: post(client, 1) == (200, 1))  # until then 503, and no step is taken
        assert client.get("/readyz").status_code == 200
        engine = engine_of(service.process.pid)
        service.process.kill()
        wait_until(lambda: not Path(f"/proc/{engine}/fd").exists() or not any(Path(f"/proc/{engine}/fd").iterdir()))
    with RunningService(pool, state) as service, service.client() as client:
        assert post(client, 2) == (200, 2)
        assert service.stop() == 0, service.words()
    assert [line["body"]["step"] for line in service.lines("step")] == [0, 1, 2]
    assert verify(service.log).sound


def post(client: object, seed: int) -> tuple[int, int | None]:
    response = client.post("/v1/streams/ward/batches", files=form(png(seed)))  # type: ignore[attr-defined]
    return response.status_code, response.json().get("step")
