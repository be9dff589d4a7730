"""Replay: a logged step is computed again from its images, bit by bit, and whatever differs is named."""

import hashlib
import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

import engines
import mergestream as ms
from benching import SITES, command, write_pool
from conftest import make_pool
from mergestream.bench.records import step_record
from mergestream.cli.app import app
from mergestream.data.intake.input_files import read_uploads
from mergestream.data.intake.limits import Limits
from mergestream.runtime.errors import InputError
from mergestream.serving.audit.keys import PrivateKey
from mergestream.serving.audit.lines import AuditError
from mergestream.serving.audit.log_verification import verify
from mergestream.serving.audit.log_writer import AuditLog
from mergestream.serving.audit.replay import Recompute, compare, files_by_hash, in_words, replay
from mergestream.serving.engine.engine import Engine
from mergestream.serving.engine.recomputation import Reproducer

SECRET = PrivateKey(Ed25519PrivateKey.from_private_bytes(b"s" * 32))
STEPS, BATCH = 5, 3


def png(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def decode(content: bytes) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.open(io.BytesIO(content)))).permute(2, 0, 1).contiguous()


def input_of(content: bytes) -> dict[str, str]:
    pixels = hashlib.sha256(decode(content).numpy().tobytes()).hexdigest()
    return {"sha256": hashlib.sha256(content).hexdigest(), "pixels_sha256": pixels}


def answer(method: ms.Method, number: int, contents: list[bytes]) -> dict[str, Any]:
    """What a service would log of a step: its record, its inputs, the merged weights."""
    step = method.step(torch.stack([decode(content) for content in contents]))
    weights = hashlib.sha256(method.merged_weights().numpy().tobytes()).hexdigest()
    record = step_record(number, replace(step, seconds=0.0), np.arange(len(contents)))
    return {**record, "inputs": [input_of(content) for content in contents], "weights_sha256": weights}


def as_json(state: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def recomputer(pool: ms.ExpertPool) -> Recompute:
    def recompute(body: Mapping[str, Any], files: Mapping[str, bytes], /) -> dict[str, Any]:
        method = ms.create_method(body["method"], pool)
        state = {k: torch.tensor(v) if isinstance(v, list) else v for k, v in body["state"].items()}
        method.load_state_dict({**method.provenance, "state": state})
        return answer(method, body["step"], [files[image["sha256"]] for image in body["inputs"]])

    return recompute


@pytest.fixture(scope="module")
def pool() -> ms.ExpertPool:
    return make_pool("vit")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, pool: ms.ExpertPool) -> Path:
    """A folder with the log of two streams that ran side by side, over several files, and their images."""
    folder = tmp_path_factory.mktemp("served")
    (folder / "images" / "deeper").mkdir(parents=True)
    methods = {stream: ms.create_method("entropy_adaptive", pool) for stream in ("ward", "clinic")}
    with AuditLog(folder / "audit.jsonl", SECRET, rotate_bytes=4000) as log:
        log.append("start", {})
        for number in range(2 * STEPS):
            stream = ("ward", "clinic")[number % 2]
            contents = [png(BATCH * number + i) for i in range(BATCH)]
            before = as_json(methods[stream].state_dict()["state"])
            body = answer(methods[stream], number // 2, contents)
            log.append("step", {**body, "stream": stream, "method": "entropy_adaptive", "state": before})
            for i, content in enumerate(contents):
                (folder / "images" / ("deeper" if i else ".") / f"{number} {i}").write_bytes(content)
        log.append("stop", {})
    assert verify(folder / "audit.jsonl", SECRET).sound
    return folder


def test_every_step_comes_out_bit_for_bit(served: Path, pool: ms.ExpertPool) -> None:
    report = replay(served / "audit.jsonl", served / "images", recomputer(pool))
    assert report.outcomes == {"exact": 2 * STEPS}
    assert report.reproduced
    assert in_words(report) == [f"Reproduced: {2 * STEPS} exact."]


def test_one_step_is_recomputed_alone_from_its_own_images(served: Path, pool: ms.ExpertPool, tmp_path: Path) -> None:
    lines = [json.loads(line) for file in sorted(served.glob("audit.jsonl*")) for line in file.read_text().splitlines()]
    line = next(line for line in lines if line["kind"] == "step" and line["body"]["step"] == STEPS - 1)
    digests = {image["sha256"] for image in line["body"]["inputs"]}
    for digest, path in files_by_hash(served / "images").items():
        if digest in digests:
            shutil.copy(path, tmp_path / digest)
    report = replay(served / "audit.jsonl", tmp_path, recomputer(pool), sequence=line["sequence"])
    assert report.outcomes == {"exact": 1}
    report = replay(served / "audit.jsonl", tmp_path, recomputer(pool))
    assert report.outcomes == {"exact": 1, "missing": 2 * STEPS - 1}
    assert not report.reproduced
    assert "3 of the step's 3 files are not in the folder" in in_words(report)[0]
    with pytest.raises(InputError, match="no step with sequence number 0"):
        replay(served / "audit.jsonl", tmp_path, recomputer(pool), sequence=0)


def test_other_weights_are_seen_in_every_number(served: Path) -> None:
    report = replay(served / "audit.jsonl", served / "images", recomputer(make_pool("vit", seed=1)))
    assert report.outcomes == {"different": 2 * STEPS}
    fields = {difference.field for step in report.steps for difference in step.differences}
    assert {"entropy", "encoder_coefficients", "weights_sha256"} <= fields
    assert report.largest["entropy"] > 1e-3
    assert in_words(report)[-1] == f"NOT reproduced: {2 * STEPS} different."
    json.dumps(report.to_json())


def nudged(recompute: Recompute, **changes: Any) -> Recompute:
    return lambda body, files: {**recompute(body, files), **changes}


def test_a_tolerance_is_for_numbers_only(served: Path, pool: ms.ExpertPool) -> None:
    exact = recomputer(pool)

    def other_hardware(body: Mapping[str, Any], files: Mapping[str, bytes], /) -> dict[str, Any]:
        step = dict(exact(body, files))
        return {**step, "entropy": [value + 1e-6 for value in step["entropy"]], "weights_sha256": "other"}

    run = (served / "audit.jsonl", served / "images")
    assert replay(*run, other_hardware).outcomes == {"different": 2 * STEPS}
    near = replay(*run, other_hardware, tolerance=1e-5)
    assert near.outcomes == {"close": 2 * STEPS}
    assert near.reproduced
    assert near.largest["entropy"] == pytest.approx(1e-6, rel=1e-3)
    assert replay(*run, other_hardware, tolerance=1e-7).outcomes == {"different": 2 * STEPS}
    assert not replay(*run, nudged(exact, predictions=[9, 9, 9]), tolerance=10).reproduced
    assert not replay(*run, nudged(exact, inputs=[]), tolerance=10).reproduced
    for wrong in (-1.0, float("nan")):
        with pytest.raises(InputError, match="tolerance"):
            replay(*run, exact, tolerance=wrong)


def test_a_step_that_cannot_be_recomputed_is_told_of_and_the_rest_go_on(served: Path, pool: ms.ExpertPool) -> None:
    exact = recomputer(pool)

    def sometimes(body: Mapping[str, Any], files: Mapping[str, bytes], /) -> Mapping[str, Any]:
        if body["step"] == 0:
            raise InputError("The pool is another one.")
        return exact(body, files)

    report = replay(served / "audit.jsonl", served / "images", sometimes)
    assert report.outcomes == {"failed": 2, "exact": 2 * STEPS - 2}
    assert "The pool is another one." in in_words(report)[0]


def test_a_changed_log_is_not_replayed(served: Path, pool: ms.ExpertPool, tmp_path: Path) -> None:
    shutil.copytree(served, tmp_path / "copy")
    file = tmp_path / "copy" / "audit.jsonl.000001"
    file.write_text(file.read_text().replace('"step":0', '"step":1', 1))
    with pytest.raises(AuditError, match=r"audit\.jsonl\.000001, line \d was changed"):
        replay(tmp_path / "copy" / "audit.jsonl", served / "images", recomputer(pool))


def test_bad_folders_and_lines_without_inputs(tmp_path: Path, pool: ms.ExpertPool) -> None:
    path = tmp_path / "audit.jsonl"
    with AuditLog(path) as log:
        for body in ({}, {"inputs": None}, {"inputs": [1]}, {"inputs": [{}]}, {"inputs": []}):
            log.append("step", body)
    with pytest.raises(InputError, match="not a folder"):
        replay(path, tmp_path / "absent", recomputer(pool))
    assert replay(path, tmp_path, recomputer(pool)).outcomes == {"failed": 5}
    with AuditLog(tmp_path / "empty") as log:
        log.append("start", {})
    assert not replay(tmp_path / "empty", tmp_path, recomputer(pool)).reproduced


# --- the service's own steps ---


def serve(folder: Path, uploads: list[list[bytes]], method: str = "entropy_adaptive") -> None:
    """What the service does with batches of files: decode, step, log. One expert is switched off on the way."""
    write_pool(folder / "pool")
    with AuditLog(folder / "audit.jsonl", SECRET, rotate_bytes=20_000) as log:
        pool = ms.ExpertPool.load(folder / "pool")
        more = {"state_folder": folder / "state", **engines.around(pool, folder)}
        engine = Engine(pool, method, {}, audit=log, **more)
        for number, files in enumerate(uploads):
            engine.answer("ward", read_uploads(files, Limits()))
            if number == 2:
                engine.switch(SITES[1], on=False)
    (folder / "images").mkdir()
    for number, content in enumerate({file for files in uploads for file in files}):
        (folder / "images" / str(number)).write_bytes(content)


def array(seed: int, count: int) -> bytes:
    file = io.BytesIO()
    np.save(file, np.random.default_rng(seed).integers(0, 256, (count, 16, 16, 3), dtype=np.uint8))
    return file.getvalue()


def test_the_command_recomputes_what_the_engine_logged(tmp_path: Path) -> None:
    """PNG files and arrays of several images, states that move, an expert switched off: all of it bit for bit."""
    serve(tmp_path, [[png(1), png(2)], [array(3, 4)], [png(1), array(5, 2), png(1)], [png(4), png(6)], [array(7, 3)]])
    line = ["audit", "replay", str(tmp_path / "audit.jsonl"), "--images", str(tmp_path / "images")]
    line += ["--pool", str(tmp_path / "pool")]
    good = CliRunner().invoke(app, line)
    assert good.exit_code == 0, good.output
    assert "Reproduced: 5 exact." in good.stdout
    real = command(*line, "--json")
    assert real.returncode == 0, real.stderr
    assert json.loads(real.stdout) == {"reproduced": True, "outcomes": {"exact": 5}, "largest": {}, "steps": []}
    for path in (tmp_path / "images").iterdir():
        path.unlink()
    bad = CliRunner().invoke(app, [*line, "--json"])
    assert bad.exit_code == 1
    assert json.loads(bad.stdout)["outcomes"] == {"missing": 5}


def test_another_pool_is_told_of(tmp_path: Path) -> None:
    serve(tmp_path, [[png(1)]])
    write_pool(tmp_path / "other", seed=1)
    report = replay(tmp_path / "audit.jsonl", tmp_path / "images", Reproducer(ms.ExpertPool.load(tmp_path / "other")))
    assert report.outcomes == {"failed": 1}
    assert "pool" in in_words(report)[0]


def test_a_logged_number_that_was_never_computed_is_found(tmp_path: Path) -> None:
    """Whoever holds the key can log what they like, soundly signed: only computing it again shows it."""
    serve(tmp_path, [[png(1), png(2)]])
    path, lied = tmp_path / "audit.jsonl", tmp_path / "lied.jsonl"
    lines = [json.loads(text) for text in path.read_text().splitlines()[1:]]
    with AuditLog(lied, SECRET) as log:
        for line in lines:
            if line["kind"] == "step":
                line["body"]["predictions"][1] = (line["body"]["predictions"][1] + 1) % 5
            log.append(line["kind"], line["body"])
    assert verify(lied, SECRET).sound
    report = replay(lied, tmp_path / "images", Reproducer(ms.ExpertPool.load(tmp_path / "pool")))
    assert [difference.field for difference in report.steps[0].differences] == ["predictions"]
    assert "predictions differs in 1 of 2 values" in in_words(report)[0]


numbers = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6)


@given(numbers, st.data())
def test_the_largest_difference_is_found_wherever_it_is(values: list[float], data: st.DataObject) -> None:
    others = data.draw(st.lists(st.floats(-1e6, 1e6), min_size=len(values), max_size=len(values)))
    differences = compare({"scores": [values, [0.0]]}, {"scores": (others, (0.0,))})
    expected = max(abs(a - b) for a, b in zip(values, others, strict=True))
    assert [each.largest for each in differences] == ([] if values == others else [expected])


def test_what_is_absent_or_of_another_shape_is_a_difference() -> None:
    def told(logged: dict, computed: dict) -> list[str]:
        return [str(difference) for difference in compare(logged, computed)]

    assert told({"entropy": [1.0]}, {}) == ["entropy was not computed again"]
    assert told({}, {"entropy": None}) == ["entropy is not in the log"]
    assert told({"seconds": 1.0}, {}) == []
    assert told({"entropy": None}, {"entropy": None}) == []
    for one, other in (([1.0], [1.0, 2.0]), (None, [1.0]), ([None], [1.0]), ([1.0], [float("nan")]), ("a", "b")):
        (difference,) = compare({"entropy": one}, {"entropy": other})
        assert difference.largest is None
        assert not difference.within(1e9)
