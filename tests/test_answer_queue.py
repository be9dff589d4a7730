"""The queue: streams take turns, everyone gets the own answer, in order, whatever the neighbours do."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mergestream as ms
from engines import Service, picture, small_pool, tensor_of
from mergestream.data.intake.pictures import Picture
from mergestream.runtime.errors import InputError
from mergestream.serving.answer_queue import AnswerQueue, ClosingError, OverloadedError, QueueSettings
from mergestream.serving.audit.lines import AuditError
from mergestream.serving.engine.answers import Answer


@pytest.fixture(scope="module")
def pool() -> ms.ExpertPool:
    return small_pool()


Together = partial(QueueSettings, single=False)


def pictures(count: int) -> list[Picture]:
    return [picture(number) for number in range(count)]


class Recorder:
    """Answers with what it was asked, as slowly as wanted; refuses batches that hold a picture it finds bad."""

    def __init__(self, *, bad: Sequence[Picture] = (), seconds: float = 0.0) -> None:
        self.bad, self.seconds = {each.sha256 for each in bad}, seconds
        self.batches: list[tuple[str, list[str]]] = []
        self.single: list[bool] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, stream: str, batch: Sequence[Picture], single: bool = False) -> Answer:
        self.gate.wait(10)
        time.sleep(self.seconds)
        hashes = [each.sha256 for each in batch]
        if self.bad & set(hashes):
            raise InputError("This picture cannot be used.")
        self.batches.append((stream, hashes))
        self.single.append(single)
        return answer_about(stream, hashes)


def answer_about(stream: str, hashes: list[str]) -> Answer:
    """An answer whose predictions are the pictures' own hashes."""
    rows = tuple((float(position),) for position in range(len(hashes)))
    return Answer(
        stream, 0, ("c",), tuple(hashes), rows, (), None, None, None, None, None, "", None, (), None, {}, 0.0,
        len(hashes),
    )  # fmt: skip


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(work(), 30))


def test_answers_equal_a_batch_through_the_python_api(pool: ms.ExpertPool, tmp_path: Path) -> None:
    sent, method = pictures(10), ms.create_method("entropy_adaptive", pool, momentum=0.7)

    async def work(service: Service) -> list[Answer]:
        answer = lambda stream, pictures, single: service.engine.answer(stream, pictures, single=single)  # noqa: E731
        queue = AnswerQueue(answer, Together(count=5, seconds=5))
        return await asyncio.gather(*(queue.answer("lyon", [each], one=True) for each in sent))

    with Service(tmp_path, pool, options={"momentum": 0.7}) as service:
        answers = run(lambda: work(service))
        assert [len(body["inputs"]) for body in service.steps()] == [5, 5]
    logits = torch.cat([method.step(tensor_of(sent[:5])).logits, method.step(tensor_of(sent[5:])).logits])
    expected = torch.softmax(logits, dim=-1).tolist()
    assert [list(answer.probabilities[0]) for answer in answers] == expected
    assert [answer.predictions[0] for answer in answers] == [pool.classes[c] for c in logits.argmax(-1).tolist()]
    assert [(answer.step, answer.position, answer.batch_size) for answer in answers] == [
        (i // 5, i % 5, 5) for i in range(10)
    ]


def test_by_count_at_once_and_by_time_otherwise() -> None:
    recorder = Recorder()

    async def work() -> tuple[float, float]:
        queue = AnswerQueue(recorder, Together(count=4, seconds=0.3))
        started = time.perf_counter()
        await asyncio.gather(*(queue.answer("a", [each], one=True) for each in pictures(4)))
        full = time.perf_counter() - started
        started = time.perf_counter()
        await asyncio.gather(*(queue.answer("a", [each], one=True) for each in pictures(3)))
        assert len(queue) == 0
        return full, time.perf_counter() - started

    full, waited = run(work)
    assert full < 0.25
    assert 0.29 < waited < 2
    assert [len(hashes) for _, hashes in recorder.batches] == [4, 3]


@pytest.mark.parametrize(("waiting", "early"), [(8, True), (7, False)])
def test_an_engine_that_has_just_become_idle_does_not_wait_for_a_full_group(waiting: int, early: bool) -> None:
    async def work() -> float:
        queue = AnswerQueue(Recorder(), Together(count=16, seconds=0.5))
        full = asyncio.gather(*(queue.answer("a", [each], one=True) for each in pictures(16)))
        started = time.perf_counter()
        await asyncio.gather(full, *(queue.answer("b", [each], one=True) for each in pictures(waiting)))
        return time.perf_counter() - started

    seconds = run(work)
    assert seconds < 0.4 if early else 0.49 < seconds < 2


def test_an_idle_engine_waits_for_a_full_group() -> None:
    async def work() -> float:
        queue = AnswerQueue(Recorder(), Together(count=16, seconds=0.3))
        started = time.perf_counter()
        await asyncio.gather(*(queue.answer("a", [each], one=True) for each in pictures(8)))
        return time.perf_counter() - started

    assert 0.29 < run(work) < 2


def test_a_case_that_waited_for_a_step_does_not_wait_again() -> None:
    recorder = Recorder(seconds=0.3)

    async def work() -> float:
        queue = AnswerQueue(recorder, Together(count=2, seconds=0.25))
        sent, started = pictures(3), time.perf_counter()
        await asyncio.gather(*(queue.answer("a", [each], one=True) for each in sent))
        return time.perf_counter() - started

    assert run(work) < 0.3 + 0.3 + 0.2


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=40), st.integers(1, 9), st.sets(st.integers(0, 39)))
@settings(max_examples=40)
def test_everyone_gets_the_own_answer_in_order_of_arrival(streams: list[str], count: int, bad: set[int]) -> None:
    sent = pictures(len(streams))
    rejected = [sent[i] for i in bad if i < len(sent)]
    recorder = Recorder(bad=rejected)

    async def work() -> list[Any]:
        queue = AnswerQueue(recorder, Together(count=count, seconds=0.001))
        waiting = [queue.answer(stream, [each], one=True) for stream, each in zip(streams, sent, strict=True)]
        return await asyncio.gather(*waiting, return_exceptions=True)

    for each, answer in zip(sent, run(work), strict=True):
        if each in rejected:
            assert isinstance(answer, InputError)
        else:
            assert answer.predictions == (each.sha256,)
    for name in "abc":
        arrived = [p.sha256 for s, p in zip(streams, sent, strict=True) if s == name and p not in rejected]
        assert [h for s, hashes in recorder.batches for h in hashes if s == name] == arrived
    assert all(len(hashes) <= count for _, hashes in recorder.batches)


def test_a_caller_who_gives_up_harms_nobody() -> None:
    recorder, sent = Recorder(), pictures(6)

    async def work() -> list[Any]:
        queue = AnswerQueue(recorder, Together(count=3, seconds=0.05))
        recorder.gate.clear()
        tasks = [asyncio.create_task(queue.answer("a", [each], one=True)) for each in sent]
        await asyncio.sleep(0.1)
        tasks[1].cancel()  # its batch is under way
        tasks[4].cancel()  # it still waits
        await asyncio.sleep(0)
        recorder.gate.set()
        gathered = await asyncio.gather(*tasks, return_exceptions=True)
        assert len(queue) == 0
        return gathered

    gathered = run(work)
    assert [isinstance(each, asyncio.CancelledError) for each in gathered] == [False, True, False, False, True, False]
    assert [gathered[i].predictions[0] for i in (0, 2, 3, 5)] == [sent[i].sha256 for i in (0, 2, 3, 5)]
    assert [len(hashes) for _, hashes in recorder.batches] == [3, 2]


def test_an_error_of_the_service_is_told_to_all_and_does_not_stop_the_next() -> None:
    recorder = Recorder()

    def failing(stream: str, batch: Sequence[Picture], single: bool) -> Answer:
        if not recorder.batches:
            recorder.batches.append((stream, []))
            raise AuditError("The disk is full.")
        return recorder(stream, batch)

    async def work() -> None:
        queue = AnswerQueue(failing, Together(count=3, seconds=0.01))
        gathered = await asyncio.gather(
            *(queue.answer("a", [each], one=True) for each in pictures(3)), return_exceptions=True
        )
        assert [type(each) for each in gathered] == [AuditError] * 3
        assert (await queue.answer("a", [picture(9)], one=True)).predictions == (picture(9).sha256,)

    run(work)


def test_streams_do_not_wait_for_each_other() -> None:
    recorder = Recorder()

    def stuck(stream: str, batch: Sequence[Picture], single: bool) -> Answer:
        if stream == "slow":
            recorder.gate.wait(10)
        return answer_about(stream, [each.sha256 for each in batch])

    async def work() -> None:
        recorder.gate.clear()
        with ThreadPoolExecutor(2) as executor:
            queue = AnswerQueue(stuck, Together(seconds=0), executor)
            slow = asyncio.create_task(queue.answer("slow", [picture(0)], one=True))
            for number in range(5):
                await asyncio.wait_for(queue.answer("quick", [picture(number)], one=True), 5)
            assert not slow.done()
            recorder.gate.set()
            await slow

    run(work)


def test_a_busy_stream_delays_another_one_by_a_round_at_most() -> None:
    recorder = Recorder()

    async def work() -> None:
        recorder.gate.clear()
        with ThreadPoolExecutor(1) as threads:
            queue = AnswerQueue(recorder, QueueSettings(), threads, 1)
            busy = [asyncio.create_task(queue.answer("busy", [each], one=True)) for each in pictures(500)]
            await asyncio.sleep(0.01)
            others = [asyncio.create_task(queue.answer(name, [picture(0)], one=True)) for name in ("one", "two")]
            others.append(asyncio.create_task(queue.answer("three", pictures(2))))
            await asyncio.sleep(0.01)
            recorder.gate.set()
            await asyncio.gather(*busy, *others)

    run(work)
    turns = [stream for stream, _ in recorder.batches]
    assert turns[:6] == ["busy", "busy", "one", "two", "three", "busy"]  # the second waited before the others came
    assert max(len(hashes) for _, hashes in recorder.batches) == 8
    assert sum(len(hashes) for _, hashes in recorder.batches) == 504


def test_images_that_would_wait_too_long_are_refused_by_the_measured_throughput() -> None:
    recorder = Recorder(seconds=0.02)

    async def work() -> None:
        with ThreadPoolExecutor(1) as threads:
            queue = AnswerQueue(recorder, QueueSettings(longest_wait=0.1), threads, 1)
            for number in range(3):
                await queue.answer("a", [picture(number)], one=True)
            tasks = [asyncio.create_task(queue.answer(f"s{i}", [picture(i)], one=True)) for i in range(20)]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            refused = [each for each in results if isinstance(each, OverloadedError)]
            assert 10 < len(refused) < 18
            assert all(each.retry_after == 1 and "about 0 s" in str(each) for each in refused)
            assert (await queue.answer("a", [picture(0)], one=True)).stream == "a"  # nothing waits any more

    run(work)


def test_the_queue_is_bounded_for_all_and_for_one() -> None:
    recorder = Recorder()

    async def work() -> None:
        recorder.gate.clear()
        queue = AnswerQueue(recorder, Together(count=2, seconds=0, waiting=6, per_stream=4))
        tasks = [asyncio.create_task(queue.answer("busy", [each], one=True)) for each in pictures(4)]
        await asyncio.sleep(0.05)
        with pytest.raises(OverloadedError):
            await queue.answer("busy", [picture(10)], one=True)
        tasks += [asyncio.create_task(queue.answer("other", [each], one=True)) for each in pictures(2)]
        await asyncio.sleep(0.05)
        with pytest.raises(OverloadedError):
            await queue.answer("third", [picture(11)], one=True)
        recorder.gate.set()
        assert len(await asyncio.gather(*tasks)) == 6
        await queue.answer("third", [picture(11)], one=True)
        assert queue._waiting == queue._in_progress == {}

    run(work)


def test_closing_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    recorder = Recorder(seconds=0.02)

    async def work() -> list[Answer]:
        queue = AnswerQueue(recorder, Together(count=4, seconds=60))
        tasks = [asyncio.create_task(queue.answer(s, [p], one=True)) for s in "ab" for p in pictures(7)]
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(queue.close())
        await asyncio.sleep(0)
        with pytest.raises(ClosingError):
            await queue.answer("a", [picture(99)], one=True)
        await closing
        assert all(task.done() for task in tasks)
        return await asyncio.gather(*tasks)

    assert len(run(work)) == 14


@pytest.mark.parametrize(
    "bad", [{"count": 0}, {"seconds": -1}, {"waiting": 0}, {"per_stream": 1.5}, {"longest_wait": 0}]
)
def test_bad_settings(bad: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        QueueSettings(**bad)


def test_a_bad_name_is_refused_before_it_waits() -> None:
    async def work() -> None:
        queue = AnswerQueue(Recorder(), Together(seconds=60))
        with pytest.raises(InputError, match="stream's name"):
            await queue.answer("../etc", [picture(0)], one=True)
        assert len(queue) == 0

    run(work)
