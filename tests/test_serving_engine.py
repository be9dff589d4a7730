"""The engine: answers equal the Python API's, streams are independent, nothing is answered that is not in the log."""

import hashlib
import io
import json
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import mergestream as ms
from benching import write_pool
from conftest import make_pool
from engines import Service, batch, picture, small_pool, tensor_of
from mergestream.data.intake.input_files import read_upload
from mergestream.data.intake.limits import Limits
from mergestream.methods.state import COEFFICIENTS, OF_ALL_EXPERTS, PER_EXPERT, State, for_experts
from mergestream.pool import runner
from mergestream.pool.expert_pool import sha256_of_tensor
from mergestream.runtime.errors import InputError, MergestreamError, OutputError, PoolError, UnknownNameError
from mergestream.runtime.files import sha256_of_json
from mergestream.serving.audit.lines import AuditError
from mergestream.serving.audit.replay import compare, replay
from mergestream.serving.engine import stream_state
from mergestream.serving.engine.lineup import Lineup
from mergestream.serving.engine.persistence import StateFolder
from mergestream.serving.engine.recomputation import LastStates, Reproducer, recompute_step
from mergestream.serving.engine.registry import NAME, TooManyStreamsError, require_name
from mergestream.serving.engine.stream_state import StreamState, decoded, encoded
from mergestream.serving.guards.findings import GuardSettings

MOVING = {"momentum": 0.7}


@pytest.fixture(scope="module")
def pool() -> ms.ExpertPool:
    return small_pool()


def same_as_step(answer: Any, step: ms.Step) -> None:
    """Bit for bit: an answer carries 32-bit numbers whole."""
    assert answer.probabilities == tuple(map(tuple, torch.softmax(step.logits.cpu(), dim=-1).tolist()))
    for name in ("encoder_coefficients", "head_coefficients", "entropy", "consistency"):
        numbers, expected = getattr(answer, name), getattr(step, name)
        assert (numbers and list(numbers.values())) == (None if expected is None else expected.tolist()), name
    assert answer.head_expert == step.head_expert


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("entropy_adaptive", {}),
        ("entropy_adaptive", MOVING),
        ("entropy_adaptive", {**MOVING, "refresh_every": 3, "refresh_drift": 0.01}),
        ("entropy_adaptive", {"temperature": [1.0, 2.0, 0.5], "recalibrate_bn": True}),
        ("mean", {"coefficients": [0.5, 0.3, 0.2]}),
        ("ensemble", {}),
        ("select_expert", {}),
        ("single_expert", {"expert": "brest"}),
        ("adamerging", {"learning_rate": 0.05}),
        ("tent", {"learning_rate": 0.05}),
        ("surgery", {}),
        ("regmean", {"statistics": "target"}),
    ],
)
def test_answers_equal_the_python_api_step_by_step(
    name: str, options: dict[str, Any], pool: ms.ExpertPool, tmp_path: Path
) -> None:
    method = ms.create_method(name, pool, **options)
    with Service(tmp_path, pool, name, options=options) as service:
        for number in range(5):
            pictures = batch(number, 3 + number)
            answer, step = service.engine.answer("lyon", pictures), method.step(tensor_of(pictures))
            same_as_step(answer, step)
            assert answer.step == number
            weights = method.merged_weights()
            if weights is not None and step.encoder_coefficients is not None:
                assert answer.weights_sha256 == hashlib.sha256(weights.numpy().tobytes()).hexdigest()
            body = service.steps()[-1]
            assert body["predictions"] == step.logits.argmax(dim=-1).tolist()
            assert body["inputs"][0] == {"sha256": pictures[0].sha256, "pixels_sha256": pictures[0].pixels_sha256}
            assert body["pool_sha256"] == answer.pool_sha256 == pool.fingerprint()


def test_streams_are_independent(pool: ms.ExpertPool, tmp_path: Path) -> None:
    alone = {name: ms.create_method("entropy_adaptive", pool, **MOVING) for name in "abcd"}
    with Service(tmp_path, pool, options=MOVING) as service:
        for number, name in enumerate("abcdabdcaabbccdd"):
            pictures = batch(number)
            same_as_step(service.engine.answer(name, pictures), alone[name].step(tensor_of(pictures)))
        assert [stream["stream"] for stream in service.engine.streams()] == list("abcd")
        assert [stream["steps"] for stream in service.engine.streams()] == [4, 4, 4, 4]


def test_sixteen_threads_on_four_streams(pool: ms.ExpertPool, tmp_path: Path) -> None:
    pictures = {each.sha256: each for number in range(16 * 6) for each in batch(number, 2)}
    answers, failures = [], []

    def hammer(thread: int) -> None:
        try:
            for i in range(6):
                answers.append(service.engine.answer(f"site{(thread + i) % 4}", batch(6 * thread + i, 2)))
        except BaseException as error:
            failures.append(error)

    with Service(tmp_path, pool, options=MOVING) as service:
        threads = [threading.Thread(target=hammer, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        lines = service.lines("step")
    assert not failures
    assert len(lines) == len(answers) == 96
    by_step = {(answer.stream, answer.step): answer for answer in answers}
    methods = {f"site{n}": ms.create_method("entropy_adaptive", pool, **MOVING) for n in range(4)}
    steps: dict[str, int] = defaultdict(int)
    last: dict[str, Any] = {}
    for line in lines:
        body = line["body"]
        name = body["stream"]
        assert body["step"] == steps[name]
        assert last.get(name, body["state_before"]) == body["state_before"]
        steps[name], last[name] = steps[name] + 1, body["state_after"]
        answer = by_step[name, body["step"]]
        assert answer.audit == {"sequence": line["sequence"], "hash": line["hash"]}
        same_as_step(answer, methods[name].step(tensor_of([pictures[each["sha256"]] for each in body["inputs"]])))


class Failing:
    """A log whose disk is full from time to time."""

    def __init__(self, audit: Any) -> None:
        self.audit, self.full = audit, False
        self.last = audit.last

    def append(self, kind: str, body: Any) -> dict[str, Any]:
        if self.full:
            raise AuditError("The disk is full.")
        return self.audit.append(kind, body)

    def append_all(self, kind: str, bodies: Any) -> list[dict[str, Any]]:
        return [self.append(kind, body) for body in bodies]

    def close(self) -> None:
        self.audit.close()


def test_a_step_that_cannot_be_logged_did_not_happen(pool: ms.ExpertPool, tmp_path: Path) -> None:
    method = ms.create_method("entropy_adaptive", pool, **MOVING)
    with Service(tmp_path, pool, options=MOVING) as service:
        engine = service.engine
        engine.audit = failing = Failing(service.audit)
        failing.full = True
        with pytest.raises(AuditError, match="full"):
            engine.answer("lyon", batch(0))
        assert engine.streams() == []
        for number in range(4):
            failing.full = False
            same_as_step(engine.answer("lyon", batch(number)), method.step(tensor_of(batch(number))))
            failing.full = True
            with pytest.raises(AuditError):
                engine.answer("lyon", batch(99))
            with pytest.raises(AuditError):
                engine.reset("lyon")
            with pytest.raises(AuditError):
                engine.delete("lyon")
            with pytest.raises(AuditError):
                engine.switch("brest", on=False)
            assert engine.lineup.off == ()
        assert [stream["steps"] for stream in engine.streams()] == [4]


def test_a_batch_that_is_refused_leaves_no_trace(pool: ms.ExpertPool, tmp_path: Path) -> None:
    method = ms.create_method("entropy_adaptive", pool, **MOVING)
    with Service(tmp_path, pool, options=MOVING) as service:
        same_as_step(service.engine.answer("lyon", batch(0)), method.step(tensor_of(batch(0))))
        for bad in ([], [picture(0)] * 257):
            with pytest.raises(InputError, match="1 to 256"):
                service.engine.answer("lyon", bad)
        same_as_step(service.engine.answer("lyon", batch(1)), method.step(tensor_of(batch(1))))
        assert len(service.steps()) == 2


def test_pictures_of_different_sizes_make_one_batch(pool: ms.ExpertPool, tmp_path: Path) -> None:
    pictures = [picture(0), picture(1, 40), picture(2, 23)]
    alone = torch.cat([pool.prepare(tensor_of([each])) for each in pictures])
    with Service(tmp_path, pool) as service:
        same_as_step(service.engine.answer("lyon", pictures), ms.create_method("entropy_adaptive", pool).step(alone))


@pytest.mark.parametrize("name", ["entropy_adaptive", "adamerging"])
def test_states_survive_a_restart_exactly(name: str, pool: ms.ExpertPool, tmp_path: Path) -> None:
    options = MOVING if name == "entropy_adaptive" else {"learning_rate": 0.05}
    methods = {stream: ms.create_method(name, pool, **options) for stream in "ab"}
    for round_number in range(4):
        # From the log, from the files alone, from both.
        recent = {} if round_number != 2 else {"recent": ()}
        with Service(tmp_path, pool, name, options=options, **recent) as service:
            for stream in "ab":
                pictures = batch(10 * round_number + ord(stream))
                answer = service.engine.answer(stream, pictures)
                same_as_step(answer, methods[stream].step(tensor_of(pictures)))
                assert answer.step == round_number
            started = service.lines("service_started")[-1]["body"]
            assert started["method"] == name
            assert [each["restarted"] for each in started["streams"]] == [None] * (2 if round_number else 0)


def test_another_pool_or_option_begins_again_and_says_so(pool: ms.ExpertPool, tmp_path: Path) -> None:
    with Service(tmp_path, pool, options=MOVING) as service:
        service.engine.answer("lyon", batch(0))
    for other, options in ((pool, {"momentum": 0.2}), (make_pool("hand_written", seed=3), {"momentum": 0.2})):
        with Service(tmp_path, other, options=options) as service:
            answer = service.engine.answer("lyon", batch(1))
            same_as_step(answer, ms.create_method("entropy_adaptive", other, **options).step(tensor_of(batch(1))))
            assert "average_restarted" in [finding.code for finding in answer.findings]
            assert service.steps()[-1]["restarted"]
            again = service.engine.answer("lyon", batch(2))
            assert "average_restarted" not in [finding.code for finding in again.findings]


def test_reset_and_delete_are_events_and_survive(pool: ms.ExpertPool, tmp_path: Path) -> None:
    fresh = ms.create_method("entropy_adaptive", pool, **MOVING).step(tensor_of(batch(7)))
    with Service(tmp_path, pool, options=MOVING) as service:
        for stream in "abc":
            service.engine.answer(stream, batch(0))
        service.engine.reset("a")
        service.engine.delete("b")
        same_as_step(service.engine.answer("a", batch(7)), fresh)
        service.engine.reset("a")
        with pytest.raises(UnknownNameError):
            service.engine.reset("b")
        kinds = [line["kind"] for line in service.lines()]
        assert kinds[-4:] == ["stream_reset", "stream_deleted", "step", "stream_reset"]
    with Service(tmp_path, pool, options=MOVING) as service:
        assert {each["stream"]: each["steps"] for each in service.engine.streams()} == {"a": 2, "c": 1}
        answers = [service.engine.answer("a", batch(7)), service.engine.answer("b", batch(7))]
        for answer in answers:
            same_as_step(answer, fresh)
        assert [answer.step for answer in answers] == [2, 0]


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
import torch
torch.set_num_threads(1)
from engines import Service, batch, small_pool
service = Service(Path({folder!r}), small_pool(), options={options!r})
save, die_at = service.engine._folder.save, {die_at!r}
def saving(about, state, **more):
    if about["steps"] == die_at:
        os.kill(os.getpid(), signal.SIGKILL)
    save(about, state, **more)
service.engine._folder.save = saving
first = next((each["steps"] for each in service.engine.streams()), 0)
for number in range(first, 100000):
    answer = service.engine.answer("lyon", batch(number, 2))
    print(answer.step, flush=True)
"""


def killed_service(folder: Path, die_at: int | None, seconds: float = 0.0) -> list[int]:
    """Steps that a process answered before it was killed: between a step's line and its file, or at any time."""
    script = KILLED.format(tests=str(Path(__file__).parent), folder=str(folder), options=MOVING, die_at=die_at)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = []
    if die_at is None:
        output = [process.stdout.readline()]
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
    output += process.stdout.read().splitlines()
    assert process.wait() == -signal.SIGKILL
    return [int(line) for line in output if line.strip()]


@pytest.mark.parametrize("die_at", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4)), None])
def test_kill_9_loses_nothing_that_the_log_holds(die_at: int | None, tmp_path: Path) -> None:
    pool = small_pool()
    answered = killed_service(tmp_path, die_at, seconds=0.2)
    with Service(tmp_path, pool, options=MOVING) as service:
        logged = len(service.steps())
        assert answered == list(range(len(answered)))
        assert len(answered) <= logged <= len(answered) + 1
        if die_at:  # it was in the log, and nobody was told
            assert (len(answered), logged) == (die_at - 1, die_at)
        assert [stream["steps"] for stream in service.engine.streams()] == [logged]
        method = ms.create_method("entropy_adaptive", pool, **MOVING)
        for number in range(logged):
            method.step(tensor_of(batch(number, 2)))
        answer = service.engine.answer("lyon", batch(logged, 2))
        same_as_step(answer, method.step(tensor_of(batch(logged, 2))))
        bodies = service.steps()
        assert [body["step"] for body in bodies] == list(range(logged + 1))
        for before, after in pairwise(bodies):
            assert before["state_after"] == after["state_before"]


LEARNING = {"statistics": "target"}  # of `regmean`: Gram matrices in its state


@pytest.fixture
def large_states(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_state, "MOST_NUMBERS", 100)


def learning(folder: Path, pool: ms.ExpertPool) -> Service:
    return Service(folder, pool, "regmean", options=LEARNING)


def large_file(folder: Path) -> Path:
    (file,) = (folder / "state").glob("*.safetensors")
    return file


def goes_on(folder: Path, pool: ms.ExpertPool, steps: int) -> None:
    """The next answer of a stream that took some steps is that of a method that took them in one go."""
    method = ms.create_method("regmean", pool, **LEARNING)
    for number in range(steps):
        method.step(tensor_of(batch(number)))
    with learning(folder, pool) as service:
        answer = service.engine.answer("lyon", batch(steps))
        assert (answer.step, service.steps()[-1]["restarted"]) == (steps, None)
        same_as_step(answer, method.step(tensor_of(batch(steps))))


@pytest.mark.usefixtures("large_states")
def test_a_state_too_large_for_a_line_is_a_binary_file(pool: ms.ExpertPool, tmp_path: Path) -> None:
    with learning(tmp_path, pool) as service:
        for number in range(2):
            service.engine.answer("lyon", batch(number))
            logged, file = service.steps()[-1]["state_after"], large_file(tmp_path)  # one, that of the last step
            assert file.name == f"lyon.{logged['content_sha256'][:16]}.safetensors"
            assert "base64" not in (tmp_path / "state" / "lyon.json").read_text()
    goes_on(tmp_path, pool, 2)
    with learning(tmp_path, pool) as service:
        with pytest.raises(InputError, match="too large for its line"):
            recompute_step(service.steps()[-1], batch(1), pool)
        service.engine.reset("lyon")
        assert not list((tmp_path / "state").glob("*.safetensors"))
        service.engine.answer("lyon", batch(0))
        service.engine.delete("lyon")
        assert not list((tmp_path / "state").glob("lyon*"))


@pytest.mark.usefixtures("large_states")
@pytest.mark.parametrize("damage", [b"", b"torn", None], ids=["empty", "torn", "missing"])
def test_a_large_state_needs_its_own_file_only(pool: ms.ExpertPool, tmp_path: Path, damage: bytes | None) -> None:
    with learning(tmp_path, pool) as service:
        service.engine.answer("lyon", batch(0))
    (tmp_path / "state" / "lyon.json").write_text("torn")
    goes_on(tmp_path, pool, 1)
    file = large_file(tmp_path)
    if damage is None:
        file.unlink()
    else:
        file.write_bytes(damage)
    with learning(tmp_path, pool) as service:
        assert not list((tmp_path / "state").glob("*.safetensors"))
        answer = service.engine.answer("lyon", batch(2))
        same_as_step(answer, ms.create_method("regmean", pool, **LEARNING).step(tensor_of(batch(2))))
        assert answer.findings[0].code == "average_restarted"
        why = "before its last state was on disk" if damage is None else "changed or torn"
        assert why in service.steps()[-1]["restarted"]
        assert answer.step == 2


@pytest.mark.usefixtures("large_states")
def test_a_start_with_another_method_keeps_a_large_state_until_the_next_step(
    pool: ms.ExpertPool, tmp_path: Path
) -> None:
    with learning(tmp_path, pool) as service:
        service.engine.answer("lyon", batch(0))
    with Service(tmp_path, pool, "mean"):
        pass
    goes_on(tmp_path, pool, 1)
    with Service(tmp_path, pool, "mean") as service:
        service.engine.answer("lyon", batch(2))
        assert not list((tmp_path / "state").glob("*.safetensors"))


@pytest.mark.usefixtures("large_states")
def test_refused_steps_leave_one_large_file_and_a_full_disk_no_part_of_one(
    pool: ms.ExpertPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with learning(tmp_path, pool) as service:
        service.engine.answer("lyon", batch(0))
        kept = large_file(tmp_path)
        with monkeypatch.context() as broken:
            broken.setattr(service.audit, "append_all", lambda *_: (_ for _ in ()).throw(AuditError("no space")))
            for number in range(1, 4):
                with pytest.raises(AuditError):
                    service.engine.answer("lyon", batch(number))
        assert kept in (files := set((tmp_path / "state").glob("*.safetensors")))
        assert len(files) == 2
        with monkeypatch.context() as full:
            full.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            service.engine.answer("lyon", batch(4))
        assert not list((tmp_path / "state").glob("*.new"))
    with learning(tmp_path, pool) as service:  # the log knows of the step, and says what is lost
        service.engine.answer("lyon", batch(2))
        assert "before its last state was on disk" in service.steps()[-1]["restarted"]


@pytest.mark.usefixtures("large_states")
def test_what_a_killed_process_left_of_a_file_goes(pool: ms.ExpertPool, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "lyon.new").write_bytes(b"torn")
    (tmp_path / "state" / f"brest.{'0' * 16}.safetensors").write_bytes(b"of a step that was not logged")
    with learning(tmp_path, pool):
        assert not list((tmp_path / "state").glob("*.new"))
        assert not list((tmp_path / "state").glob("*.safetensors"))


@pytest.mark.usefixtures("large_states")
def test_another_large_state_under_the_same_name_is_refused(pool: ms.ExpertPool, tmp_path: Path) -> None:
    with learning(tmp_path, pool) as service:
        service.engine.answer("lyon", batch(0))
        service.engine.answer("brest", batch(1))
    own, other = (next((tmp_path / "state").glob(f"{name}.*.safetensors")) for name in ("lyon", "brest"))
    own.write_bytes(other.read_bytes())
    with learning(tmp_path, pool) as service:
        service.engine.answer("lyon", batch(2))
        assert "changed or torn" in service.steps()[-1]["restarted"]


@pytest.mark.usefixtures("large_states")
@pytest.mark.parametrize(("killed_at", "steps"), [("save", 2), ("append_all", 1)])
def test_a_kill_around_a_line_costs_no_large_state(
    pool: ms.ExpertPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed_at: str, steps: int
) -> None:
    """Before the line the step did not happen; after it the state is there though the stream's file is not."""
    with learning(tmp_path, pool) as service:
        service.engine.answer("lyon", batch(0))
        where = service.engine._folder if killed_at == "save" else service.audit
        monkeypatch.setattr(where, killed_at, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            service.engine.answer("lyon", batch(1))
        assert len(list((tmp_path / "state").glob("*.safetensors"))) == 2
    goes_on(tmp_path, pool, steps)
    assert large_file(tmp_path)


@pytest.mark.usefixtures("large_states")
def test_a_large_state_of_version_0_1_goes_on_and_its_lines_are_computed_again(
    pool: ms.ExpertPool, tmp_path: Path
) -> None:
    """It is whole in the stream's JSON, and lines hold the hash of that."""

    def save(folder: StateFolder, about: dict[str, Any], state: StreamState | None, **_: Any) -> None:
        content = {**about, "state": None if state is None else encoded(state.content)}
        saved = {"content": content, "schema_version": 1, "sha256": sha256_of_json(content)}
        (folder.folder / f"{about['stream']}.json").write_text(json.dumps(saved))

    def in_line(state: StreamState) -> dict[str, Any]:
        whole = encoded(state.content)
        return {"sha256": sha256_of_json(whole)} if state.is_large else whole

    with pytest.MonkeyPatch.context() as old:
        old.setattr(StreamState, "in_line", property(in_line))
        old.setattr(StateFolder, "save", save)
        old.setattr(StateFolder, "save_large", lambda *_: None)
        with learning(tmp_path, pool) as service:
            for number in range(2):
                service.engine.answer("lyon", batch(number))
    for _ in range(2):  # the second start finds the file of the first beside the old line
        with learning(tmp_path, pool):
            pass
    goes_on(tmp_path, pool, 2)
    with learning(tmp_path, pool) as service:
        steps = service.steps()
    assert [list(step["state_after"]) for step in steps] == [["sha256"], ["sha256"], ["content_sha256"]]
    last = LastStates()
    for number, step in enumerate(steps):
        again = json.loads(json.dumps(recompute_step(step, batch(number), pool, last)))
        assert not compare(step, again)


def test_a_state_file_that_cannot_be_written_costs_no_answer(pool: ms.ExpertPool, tmp_path: Path) -> None:
    method = ms.create_method("entropy_adaptive", pool, **MOVING)
    with Service(tmp_path, pool, options=MOVING) as service:
        (tmp_path / "state" / "lyon.new").mkdir()
        for number in range(2):
            same_as_step(service.engine.answer("lyon", batch(number)), method.step(tensor_of(batch(number))))
        assert not (tmp_path / "state" / "lyon.json").exists()
    with Service(tmp_path, pool, options=MOVING) as service:
        same_as_step(service.engine.answer("lyon", batch(2)), method.step(tensor_of(batch(2))))


def test_one_service_a_folder(pool: ms.ExpertPool, tmp_path: Path) -> None:
    with Service(tmp_path, pool), pytest.raises(OutputError, match="Another service"):
        StateFolder(tmp_path / "state")


# --- the switch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("expert", ["lyon", "brest", "turin"])
@pytest.mark.parametrize(
    ("name", "options", "without"),
    [
        ("entropy_adaptive", {}, {}),
        ("entropy_adaptive", {"head": "select", "temperature": [1.0, 2.0, 0.5]}, {"head": "select"}),
        ("mean", {}, {}),
        ("ensemble", {}, {}),
        ("select_expert", {}, {}),
        ("task_arithmetic", {"lambda": [0.5, 0.3, 0.1]}, {}),
    ],
)
def test_an_expert_that_is_off_is_as_one_that_is_not_there(
    expert: str, name: str, options: dict, without: dict, pool: ms.ExpertPool, tmp_path: Path
) -> None:
    others = [k for k, each in enumerate(pool.names) if each != expert]
    lists = {key: [value[k] for k in others] for key, value in options.items() if isinstance(value, list)}
    step = ms.create_method(name, pool.without(expert), **without, **lists).step(tensor_of(batch(1)))
    with Service(tmp_path, pool, name, options=options) as service:
        service.engine.answer("lyon", batch(0))
        assert service.engine.switch(expert, on=False) == (expert,)
        answer = service.engine.answer("lyon", batch(1))
        assert answer.switched_off == (expert,)
        assert answer.probabilities == tuple(map(tuple, torch.softmax(step.logits, dim=-1).tolist()))
        for field, absent in (("encoder_coefficients", 0.0), ("head_coefficients", 0.0), ("entropy", None)):
            values, expected = getattr(answer, field), getattr(step, field)
            assert values is None if expected is None else [values[pool.names[k]] for k in others] == expected.tolist()
            assert values is None or values[expert] == absent
        service.engine.switch(expert, on=True)
        same_as_step(
            service.engine.answer("lyon", batch(2)), ms.create_method(name, pool, **options).step(tensor_of(batch(2)))
        )


def test_the_switch_renormalises_averages_is_logged_and_survives(pool: ms.ExpertPool, tmp_path: Path) -> None:
    with Service(tmp_path, pool, options=MOVING) as service:
        service.engine.answer("lyon", batch(0))
        before = torch.tensor(service.steps()[-1]["state_after"]["method"]["encoder"]["values"])
        service.engine.switch("brest", on=False)
    with Service(tmp_path, pool, options=MOVING) as service:
        assert service.engine.lineup.off == ("brest",)
        event = service.lines("expert_switched")[-1]["body"]
        assert (event["expert"], event["on"], event["switched_off"]) == ("brest", False, ["brest"])
        method = ms.create_method("entropy_adaptive", pool.without("brest"), **MOVING)
        renormalised = before[[0, 2]] / before[[0, 2]].sum()
        now = method.step(tensor_of(batch(1))).encoder_coefficients  # its first average is uniform
        expected = 0.7 * renormalised + (now - 0.7 * 0.5)
        answer = service.engine.answer("lyon", batch(1))
        coefficients = torch.tensor(list(answer.encoder_coefficients.values()))
        assert float(coefficients[1]) == 0
        torch.testing.assert_close(coefficients[[0, 2]], expected)
        assert float(coefficients.sum()) == pytest.approx(1)
        service.engine.switch("lyon", on=False)
        with pytest.raises(PoolError, match="last expert"):
            service.engine.switch("turin", on=False)
        with pytest.raises(UnknownNameError):
            service.engine.switch("nobody", on=False)
        alone = {"lyon": 0.0, "brest": 0.0, "turin": 1.0}
        assert service.engine.answer("lyon", batch(2)).encoder_coefficients == alone


def test_a_method_that_cannot_do_without_refuses_or_begins_again(pool: ms.ExpertPool, tmp_path: Path) -> None:
    with Service(tmp_path / "one", pool, "single_expert", options={"expert": "brest"}) as service:
        with pytest.raises(InputError, match="'brest' alone"):
            service.engine.switch("brest", on=False)
        assert service.engine.switch("lyon", on=False) == ("lyon",)
    with Service(tmp_path / "two", pool, "adamerging") as service:
        service.engine.answer("lyon", batch(0))
        service.engine.switch("brest", on=False)
        answer = service.engine.answer("lyon", batch(1))
        assert answer.findings[0].code == "average_restarted"
        expected = ms.create_method("adamerging", pool.without("brest")).step(tensor_of(batch(1)))
        assert answer.probabilities == tuple(map(tuple, torch.softmax(expected.logits, dim=-1).tolist()))


def test_a_method_that_looks_at_the_whole_target_first_cannot_be_served(pool: ms.ExpertPool, tmp_path: Path) -> None:
    for method, options in (("dawin", {"transductive": True}), ("lame", {"base": "dawin(transductive=True)"})):
        with pytest.raises(InputError, match="cannot answer a live stream"):
            Service(tmp_path / method, pool, method, options=options)


@dataclass(frozen=True)
class CarriedState(State):
    """One field of every kind."""

    batches: int
    shares: torch.Tensor = field(metadata=COEFFICIENTS)
    rows: torch.Tensor = field(metadata=PER_EXPERT)
    counts: torch.Tensor = field()
    sums: torch.Tensor = field(metadata=OF_ALL_EXPERTS)


shares = st.lists(st.floats(0, 1, width=32), min_size=4, max_size=4).filter(lambda v: sum(v) > 1e-3)


@given(shares, st.permutations("abcd"), st.integers(1, 4))
def test_carried_over_averages_stay_on_the_simplex(values: list[float], order: list[str], count: int) -> None:
    def state(shares: torch.Tensor, rows: torch.Tensor, number: float) -> CarriedState:
        return CarriedState(3, shares, rows, torch.full((2,), number), torch.full((2,), number))

    average = torch.tensor(values) / sum(values)
    rows, after = torch.arange(8.0).view(4, 2), tuple(order[:count])
    everyone, whole = tuple("abcd"), state(average, rows, 1.0)
    carried = for_experts(whole, everyone, state(torch.full((count,), 1 / count), rows[:count], 0.0), after)
    assert carried is not None
    if after == everyone:
        assert carried is whole
        return
    assert carried.batches == 3
    assert float(carried.counts.sum()) == 2
    assert float(carried.sums.sum()) == 0  # or who left would go on answering
    assert float(carried.shares.sum()) == pytest.approx(1, abs=1e-5)
    left = average[["abcd".index(name) for name in after]]
    own = rows[["abcd".index(name) for name in after]]
    assert torch.equal(carried.rows, own)
    if float(left.sum()) > 0:
        torch.testing.assert_close(carried.shares * left.sum(), left)
    back = for_experts(carried, after, whole, everyone)
    assert back is not None
    assert all(float(back.shares["abcd".index(name)]) == 0 for name in set("abcd") - set(after))
    for name in "abcd":
        expected = rows["abcd".index(name)] if name in after else own.mean(dim=0)
        torch.testing.assert_close(back.rows["abcd".index(name)], expected)


def test_what_was_learnt_from_all_experts_together_is_not_carried_over(pool: ms.ExpertPool) -> None:
    method = ms.create_method("adamerging", pool)
    assert for_experts(method.state, pool.names, method.start(), pool.names[:2]) is None


# --- the pool loaded again --------------------------------------------------------------------------------------------


def test_a_card_that_changes_answers_counts_as_a_changed_pool(tmp_path: Path) -> None:
    """The weights are the same, and so is the pool's hash."""
    pools = [small_pool()]
    pools.append(pools[0].annotate("lyon", temperature=0.5, metrics={"validation": {"accuracy": 1.0}}))
    metrics = {"validation": {"mean_probability": dict(zip(pools[0].classes, (0.6, 0.1, 0.1, 0.1, 0.1), strict=True))}}
    pools.append(pools[0].annotate("lyon", metrics=metrics))
    with Service(tmp_path, pools[0], "merge_and_fit", load_pool=pools.pop) as service:
        service.engine.answer("lyon", batch(0))
        body = service.engine.reload()
        assert body["changed"] is True
        assert body["before"] == body["after"]
        answer = service.engine.answer("lyon", batch(1))
        assert answer.findings[0].code == "average_restarted"
        again = recompute_step(service.steps()[-1], batch(1), service.engine.lineup.pool)
        assert again["logits_sha256"] == service.steps()[-1]["logits_sha256"]
        with pytest.raises(InputError, match="cards or the method have changed"):
            recompute_step(service.steps()[-1], batch(1), pools[0])


def test_reload_swaps_the_pool_or_leaves_the_old_one(tmp_path: Path) -> None:
    folder = tmp_path / "pool"
    write_pool(folder)
    load = lambda: ms.ExpertPool.load(folder)  # noqa: E731
    old = load()
    with Service(tmp_path, old, options=MOVING, load_pool=load) as service:
        engine, method = service.engine, ms.create_method("entropy_adaptive", old, **MOVING)
        same_as_step(engine.answer("lyon", batch(0)), method.step(tensor_of(batch(0))))
        assert engine.reload()["changed"] is False
        same_as_step(engine.answer("lyon", batch(1)), method.step(tensor_of(batch(1))))
        weights = folder / old.names[0] / "weights.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[:-1])
        with pytest.raises(MergestreamError, match="sha-256"):
            engine.reload()
        same_as_step(engine.answer("lyon", batch(2)), method.step(tensor_of(batch(2))))
        write_pool(folder, seed=5)
        body = engine.reload()
        assert body["changed"] is True
        assert body["restarted"] == ["lyon"]
        assert service.lines("pool_reloaded")[-1]["body"] == body
        answer = engine.answer("lyon", batch(3))
        same_as_step(answer, ms.create_method("entropy_adaptive", load(), **MOVING).step(tensor_of(batch(3))))
        assert answer.findings[0].code == "average_restarted"
        assert answer.pool_sha256 == load().fingerprint() != old.fingerprint()
        write_pool(folder, classes=("one", "other"))
        with pytest.raises(PoolError, match="classes"):
            engine.reload()
        assert engine.answer("lyon", batch(4)).pool_sha256 == answer.pool_sha256


# --- names, limits, states --------------------------------------------------------------------------------------------


@given(st.from_regex(NAME, fullmatch=True))
def test_a_name_is_one_plain_file(name: str) -> None:
    assert require_name(name) == name
    assert Path(f"{name}.json").name == f"{name}.json"
    assert name == name.lower()
    assert name.isascii()


@given(st.text(min_size=3, max_size=80).filter(lambda name: not NAME.fullmatch(name)))
def test_any_other_name_is_refused_and_not_repeated(name: str) -> None:
    with pytest.raises(InputError) as refused:
        require_name(name)
    assert name not in str(refused.value)


@pytest.mark.parametrize("name", ["", "..", "a/b", ".lock", "A", "a" * 65, "a\n", "é", "a.json", None, 3])
def test_bad_names(name: Any, pool: ms.ExpertPool, tmp_path: Path) -> None:
    with Service(tmp_path, pool) as service:
        with pytest.raises(InputError, match="stream's name"):
            service.engine.answer(name, batch(0))
        assert service.steps() == []


def test_no_more_streams_than_allowed(pool: ms.ExpertPool, tmp_path: Path) -> None:
    with Service(tmp_path, pool, most_streams=2) as service:
        service.engine.answer("a", batch(0))
        service.engine.answer("b", batch(0))
        with pytest.raises(TooManyStreamsError):
            service.engine.answer("c", batch(0))
        service.engine.delete("a")
        service.engine.answer("c", batch(0))


numbers = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(st.lists(numbers, min_size=1, max_size=300), st.integers(0, 9))
def test_states_are_read_back_bit_for_bit(values: list[float], count: int) -> None:

    plain = {
        "batches": count,
        "encoder": torch.tensor(values),
        "more": [{"double": torch.tensor(values[:1]).double()}],
    }
    back = decoded(json.loads(json.dumps(encoded(plain))))
    assert torch.equal(back["encoder"].view(torch.int32), plain["encoder"].view(torch.int32))
    assert torch.equal(back["more"][0]["double"], plain["more"][0]["double"])
    assert back["batches"] == count


# --- replay -----------------------------------------------------------------------------------------------------------


def png(seed: int, size: int = 16) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)).save(file, "png")
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "forwards"),
    # Of the experts: on the batch and on its view; on the batch for the guard rails alone; on the batch for both.
    [("entropy_adaptive", 6), ("mean", 3), ("ensemble", 3), ("select_expert", 3)],
)
def test_the_guard_rails_look_at_what_the_step_computed(
    name: str, forwards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, runs = small_pool(), []
    run = ms.ExpertPool._run
    monkeypatch.setattr(
        ms.ExpertPool, "_run", lambda self, owner, *rest: (runs.append(owner), run(self, owner, *rest))[1]
    )
    with Service(tmp_path, pool, name, guards=GuardSettings()) as service:
        service.engine.answer("lyon", batch(0))
        experts = [owner for owner in runs if owner.startswith("Expert")]
        assert sorted(experts) == sorted([f"Expert '{each}'" for each in pool.names] * (forwards // 3))


def test_a_batch_is_prepared_once_and_its_state_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(owner: Any, name: str) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given: (calls.append(name), original(*given))[1])

    with Service(tmp_path, small_pool(), options=MOVING, guards=GuardSettings()) as service:
        service.engine.answer("lyon", batch(0))
        counted(runner, "network_input")
        counted(stream_state, "to_plain")
        service.engine.answer("lyon", batch(1))
    assert sorted(calls) == ["network_input", "to_plain"]


def test_an_expert_that_the_guard_rails_alone_ask_may_refuse_and_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = small_pool()
    with Service(tmp_path, pool, "adamerging", guards=GuardSettings()) as service:
        service.engine.answer("lyon", batch(0))
        logits = ms.ExpertPool.logits_of_views
        refused = lambda self, batch: (_ for _ in ()).throw(InputError("not finite"))  # noqa: E731
        monkeypatch.setattr(ms.ExpertPool, "logits_of_views", refused)
        with pytest.raises(InputError, match="not finite"):
            service.engine.answer("lyon", batch(1))
        monkeypatch.setattr(ms.ExpertPool, "logits_of_views", logits)
        service.engine.answer("lyon", batch(2))
        first, second = service.steps()
    assert second["state_before"] == first["state_after"]
    assert recompute_step(second, batch(2), pool)["logits_sha256"] == second["logits_sha256"]


@pytest.mark.parametrize("fallback", ["none", "ensemble", "uniform", "expert:brest"])
@pytest.mark.parametrize("name", ["entropy_adaptive", "merge_and_fit", "mean", "adamerging", "sar", "surgery"])
@pytest.mark.parametrize("most_numbers", [4096, 100], ids=["whole states", "large states as hashes"])
def test_a_logged_step_is_computed_again_bit_for_bit(
    name: str, fallback: str, most_numbers: int, pool: ms.ExpertPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mergestream.serving.engine.stream_state.MOST_NUMBERS", most_numbers)
    options = MOVING if name == "entropy_adaptive" else {}
    always = GuardSettings(
        fallback=fallback, fallback_on=("structureless_pictures",), window=8, fewest=2, drift_after=2
    )
    files = [[png(10 * number + i, 16 + i) for i in range(3)] for number in range(6)]
    (tmp_path / "images").mkdir()
    with Service(tmp_path, pool, name, options=options, guards=always) as service:
        for number, each in enumerate(files):
            pictures = [read_upload(data, Limits())[0] for data in each]
            service.engine.answer("lyon", pictures)
            for i, data in enumerate(each):
                (tmp_path / "images" / f"{number}-{i}").write_bytes(data)
            if number == 3:
                service.engine.switch("turin", on=False)
    report = replay(tmp_path / "audit.jsonl", tmp_path / "images", Reproducer(pool))
    assert report.outcomes == {"exact": 6}, report.steps
    assert report.reproduced


def test_what_a_replay_refuses_and_finds(pool: ms.ExpertPool, tmp_path: Path) -> None:
    with Service(tmp_path, pool, options=MOVING) as service:
        service.engine.answer("lyon", batch(0))
        service.engine.answer("lyon", batch(1))
        body = service.steps()[-1]
    assert recompute_step(body, batch(1), pool)["logits_sha256"] == body["logits_sha256"]
    assert recompute_step(body, batch(2), pool)["logits_sha256"] != body["logits_sha256"]
    forged = {**body, "options": {**body["options"], "momentum": 0.6}}
    with pytest.raises(InputError, match="cards or the method have changed"):
        recompute_step(forged, batch(1), pool)
    with pytest.raises(InputError, match="as it was then"):
        recompute_step(body, batch(1), pool.without("lyon"))
    for missing in ("method", "guards", "state_before", "inputs", "provenance"):
        with pytest.raises(InputError, match="not the line of a step"):
            Reproducer(pool)({k: v for k, v in body.items() if k != missing}, {})


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("entropy_adaptive", {}),
        ("merge_and_fit", {}),
        ("surgery", {}),
        ("tent", {"recalibrate_bn": False}),
        ("mean", {}),
        ("corrected", {"base": "entropy_adaptive"}),
    ],
)
def test_a_state_names_the_same_model_by_the_same_hash(
    name: str, options: dict[str, Any], pool: ms.ExpertPool, tmp_path: Path
) -> None:
    with Service(tmp_path, pool, name, options=options, weights_hash="state") as service:
        engine, method = service.engine, ms.create_method(name, pool, **options)
        named: dict[str, set[str]] = defaultdict(set)  # hashes of the state by those of the weights
        for stream, numbers in (("a", (0, 1, 2)), ("b", (0, 1)), ("c", (2,))):
            method.reset()
            for number in numbers:
                answer = engine.answer(stream, batch(number))
                method.step(tensor_of(batch(number)))
                weights = method.merged_weights()
                assert weights is not None
                assert answer.weights_sha256 is not None
                assert answer.weights_sha256.startswith("state:")
                named[answer.weights_sha256].add(sha256_of_tensor(weights))
    assert all(len(weights) == 1 for weights in named.values())  # one name, one model
    assert len(named) == (1 if name == "mean" else 4)  # the streams a and b begin alike


@pytest.mark.parametrize("hashed", ["weights", "state"])
def test_one_expert_that_answers_is_named(hashed: str, pool: ms.ExpertPool, tmp_path: Path) -> None:
    with Service(tmp_path, pool, "select_expert", weights_hash=hashed) as service:
        answers = [service.engine.answer(str(number), batch(number, 1)) for number in range(30)]
    named = {(answer.weights_sha256, str(answer.encoder_coefficients)) for answer in answers}
    assert len(named) == len({name for name, _ in named}) == len({experts for _, experts in named}) > 1


def test_several_models_that_answer_have_no_name(pool: ms.ExpertPool, tmp_path: Path) -> None:
    with Service(tmp_path, pool, "dawin") as service:
        answer = service.engine.answer("a", batch(0))
    assert answer.weights_sha256 is None


@pytest.mark.parametrize("base", ["entropy_adaptive(recalibrate_bn=true)", "tent"])
def test_models_with_statistics_of_their_batch_are_hashed_themselves(
    base: str, pool: ms.ExpertPool, tmp_path: Path
) -> None:
    with Service(tmp_path, pool, "corrected", options={"base": base}, weights_hash="state") as service:
        assert ":" not in (service.engine.answer("a", batch(0)).weights_sha256 or ":")


def test_a_fallback_is_named_by_its_coefficients(pool: ms.ExpertPool, tmp_path: Path) -> None:
    always = GuardSettings(fallback="uniform", fallback_on=("structureless_pictures",))
    with Service(tmp_path, pool, guards=always, weights_hash="state") as service:
        names = {service.engine.answer("a", batch(number)).weights_sha256 or "" for number in range(2)}
    (name,) = names
    assert name.startswith("recipe:")


def test_a_line_of_version_0_1_with_a_recipe_is_computed_again(pool: ms.ExpertPool, tmp_path: Path) -> None:
    for name, prefix in (("entropy_adaptive", "recipe:"), ("merge_and_fit", "")):
        (folder := tmp_path / name).mkdir()
        with Service(folder, pool, name, weights_hash="recipe") as service:
            answer = service.engine.answer("a", batch(0))
            (body,) = service.steps()
        assert answer.weights_sha256 is not None
        about = {key: body[key] for key in ("method", "options", "pool_sha256")}
        shares = [list((share or {}).values()) for share in (answer.encoder_coefficients, answer.head_coefficients)]
        recipe = f"recipe:{sha256_of_json([about, body['switched_off'], shares])}"
        assert (answer.weights_sha256 == recipe) == bool(prefix)
        assert not compare(body, json.loads(json.dumps(recompute_step(body, batch(0), pool))))


def test_a_line_up_knows_its_pool(pool: ms.ExpertPool) -> None:
    lineup = Lineup(pool, "mean", {"coefficients": [0.5, 0.3, 0.2]}, ["brest"])
    assert lineup.active.names == ("lyon", "turin")
    assert lineup.spread(torch.tensor([0.25, 0.75]), 0.0) == [0.25, 0.0, 0.75]
    method = lineup.active_method
    torch.testing.assert_close(torch.tensor(method.options()["coefficients"]), torch.tensor([5 / 7, 2 / 7]))


@pytest.mark.usefixtures("graphs_here")
def test_steps_that_came_from_graphs_are_replayed_from_the_same(tmp_path: Path) -> None:
    """Eager, recorded and padded ones: each has its own last bits."""
    pool = make_pool("vit", base=True)
    sizes = (6, 6, 6, 4, 2, 6, 4)
    with Service(tmp_path, pool, options=MOVING, guards=GuardSettings()) as service:
        for number, size in enumerate(sizes):
            service.engine.answer("lyon", batch(number, size))
        bodies = service.steps()
    assert [body["graph"] for body in bodies] == [None, 6, 6, 6, 6, 6, 4]
    for number, body in enumerate(bodies):
        again = recompute_step(body, batch(number, sizes[number]), pool)
        assert not compare(body, json.loads(json.dumps(again))), number
    eagerly = [recompute_step({**body, "graph": None}, batch(n, sizes[n]), pool) for n, body in enumerate(bodies)]
    assert any(again["logits_sha256"] != body["logits_sha256"] for again, body in zip(eagerly, bodies, strict=True))
    with pytest.raises(InputError, match="cannot hold this batch of 6"):
        recompute_step({**bodies[1], "graph": 5}, batch(1, 6), pool)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_steps_from_graphs_are_replayed_exactly(tmp_path: Path, dtype: torch.dtype) -> None:
    there, sizes = make_pool("vit", base=True).to("cuda", dtype), (6, 6, 6, 4, 2, 6, 4, 8, 8)
    with Service(tmp_path, there, options=MOVING, guards=GuardSettings()) as service:
        for number, size in enumerate(sizes):
            service.engine.answer("lyon", batch(number, size))
        bodies = service.steps()
    assert {body["graph"] for body in bodies} >= {None, 6}
    for number, body in enumerate(bodies):
        again = recompute_step(body, batch(number, sizes[number]), there)
        assert not compare(body, json.loads(json.dumps(again))), (number, body["graph"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_answers_restart_and_replay_are_exact(pool: ms.ExpertPool, tmp_path: Path) -> None:
    there = pool.to("cuda")
    method = ms.create_method("entropy_adaptive", there, **MOVING)
    for number in range(3):
        with Service(tmp_path, there, options=MOVING) as service:
            same_as_step(service.engine.answer("lyon", batch(number)), method.step(tensor_of(batch(number)).cuda()))
            body = service.steps()[-1]
        again = recompute_step(body, batch(number), there)
        assert not compare(body, again)
