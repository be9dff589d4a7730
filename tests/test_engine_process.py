"""The engine in a process of its own: the plain engine's answers, and what a death of either process costs."""

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

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
from mergestream.serving.replicas.replica import Replica
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


class Recorded:
    """Stands for an engine: which thread opened it, answered and loaded the pool again, while an answer waits."""

    def __init__(self) -> None:
        self.opened, self.answered, self.loaded = threading.get_ident(), set[int](), 0
        self.gate, self.audit = threading.Event(), SimpleNamespace(failing=None)

    def answer(self, stream: str) -> None:
        self.gate.wait(30)
        self.answered.add(threading.get_ident())

    def reload(self) -> None:
        self.loaded = threading.get_ident()

    def describe(self) -> dict[str, Any]:
        return {}

    def streams(self) -> list[dict[str, Any]]:
        return []

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("device", "threads"), [("cpu", 1), ("cpu", 2), ("cuda", 2)])
def test_one_thread_computes_where_pytorch_has_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, threads: int
) -> None:
    """Each further one would bring OpenMP threads of its own. On a CPU the pool is loaded again beside it."""
    monkeypatch.setattr("mergestream.serving.replicas.replica.open_engine", lambda _: Recorded())
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    replica = Replica(ServeOptions(tmp_path, state=tmp_path, device=device), None)
    engine = cast(Recorded, replica._engine)
    with ThreadPoolExecutor(3) as clients:
        answers = [clients.submit(replica.call, "answer", "lyon") for _ in range(2)]
        loading = clients.submit(replica.call, "reload")
        if device == "cpu":
            loading.result(10)  # though no answer is there
        engine.gate.set()
        wait([*answers, loading], 30)
    alone = threading.get_ident()
    if threads == 1:
        assert engine.opened == alone
        assert len(engine.answered) == 2
    else:
        assert engine.answered == {engine.opened} != {alone}
        assert (engine.loaded == engine.opened) == (device == "cuda")
    replica.close()
