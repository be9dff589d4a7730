"""Recall: every answer that an expert contributed to is listed, and no other."""

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import engines
from mergestream.cli.app import app
from mergestream.runtime.errors import InputError
from mergestream.serving.audit.expert_recall import contribution, touched
from mergestream.serving.audit.keys import create_key, read_private_key
from mergestream.serving.audit.lines import AuditError
from mergestream.serving.audit.log_verification import verify
from mergestream.serving.audit.log_writer import AuditLog

OLD, NEW = "a1" * 32, "b2" * 32


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["audit", "touched", *map(str, arguments)])


def body(step: int, **changes: Any) -> dict[str, Any]:
    """The part of a step's line that a recall reads."""
    image = {"sha256": f"{step:064x}", "pixels_sha256": "0" * 64}
    experts = {"experts": ["lyon", "brest"], "experts_sha256": [OLD, NEW], "switched_off": []}
    shares = {"encoder_coefficients": [0.25, 0.75], "head_coefficients": [0.0, 1.0], "lambdas": None}
    about = {"stream": "ward", "step": step, "method": "mean", "options": {}, "fallback": None}
    return {**about, **experts, **shares, "inputs": [image], "predictions": [1], "abstained": [], **changes}


def write(path: Path, *bodies: dict[str, Any], **more: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    with AuditLog(path, **more) as log:
        log.append("service_started", {"classes": ["benign", "malignant"]})
        for each in bodies:
            log.append("step", each)
    return path


@pytest.mark.parametrize(
    ("method", "options", "expected"),
    [
        ("entropy_adaptive", {}, {"share": None, "note": None}),
        ("mean", {}, {"encoder": 1 / 3, "head": 1 / 3, "note": None}),
        ("ensemble", {}, {"encoder": None, "share": 1 / 3, "note": "all experts contributed"}),
        ("corrected", {}, {"encoder": None, "share": 1 / 3, "note": "all experts contributed"}),
        ("merge_and_fit", {}, {"encoder": 1 / 3, "head": None, "share": None, "note": "all experts contributed"}),
        ("task_arithmetic", {"lambda": 0.3}, {"encoder": None, "task_vector": 0.3, "note": None}),
        ("ties", {}, {"encoder": None, "share": None, "note": "all experts contributed"}),
        ("single_expert", {"expert": "third"}, None),
        ("corrected", {"base": "ensemble", "anchor": "experts"}, {"share": 1 / 3, "note": "all experts contributed"}),
    ],
)
def test_every_kind_of_method_says_what_an_expert_gave(
    tmp_path: Path, method: str, options: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    pool = engines.small_pool()
    options = {**options, "expert": pool.names[2]} if "expert" in options else options
    with engines.Service(tmp_path, pool, method, options=options) as service:
        service.engine.answer("ward", engines.batch(0))
    recall = touched([tmp_path / "audit.jsonl"], pool.names[0])
    answers = list(recall.answers())
    if expected is None:
        assert answers == []
        return
    (answer,) = answers
    assert {name: answer[name] for name in expected} == pytest.approx(expected)
    step = service.steps()[0]
    assert [image["sha256"] for image in answer["images"]] == [image["sha256"] for image in step["inputs"]]
    predictions = [pool.classes[number] for number in step["predictions"]]
    assert [image["prediction"] for image in answer["images"]] == predictions
    if method == "entropy_adaptive":
        assert [answer["encoder"], answer["head"]] == [step["encoder_coefficients"][0], step["head_coefficients"][0]]


def test_an_expert_that_was_off_or_weighed_nothing_did_not_contribute() -> None:
    assert contribution(body(0), "lyon") is not None  # in the encoder only
    assert contribution(body(0, encoder_coefficients=[0.0, 1.0]), "lyon") is None
    assert contribution(body(0, switched_off=["lyon"], method="ensemble", encoder_coefficients=None), "lyon") is None
    assert contribution(body(0, lambdas=[0.0, 0.3], encoder_coefficients=None, head_coefficients=None), "lyon") is None
    ensemble = body(0, encoder_coefficients=None, head_coefficients=None, lambdas=[0.0, 0.3], fallback="ensemble")
    assert getattr(contribution(ensemble, "lyon"), "share", None) == 0.5
    anchored = body(0, encoder_coefficients=[0.0, 1.0], options={"base": "single_expert", "anchor": "experts"})
    assert contribution(anchored, "lyon") is not None


def test_several_logs_rotated_files_a_replaced_expert_and_a_time(tmp_path: Path) -> None:
    one = write(tmp_path / "engine-000" / "audit.jsonl", *(body(i) for i in range(20)), rotate_bytes=2000)
    late = body(0, stream="clinic", experts_sha256=[NEW, NEW], abstained=[0])
    two = write(tmp_path / "engine-001" / "audit.jsonl", late, body(1))
    rotated = sorted(one.parent.glob("audit.jsonl.0*"))
    assert rotated
    result = run(one, *rotated, two, "--expert", "lyon", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    assert [each["step"] for each in document["answers"]] == [*range(20), 0, 1]
    assert {name: total["answers"] for name, total in document["streams"].items()} == {"clinic": 1, "ward": 21}
    assert document["weights"] == {OLD: 21, NEW: 1}
    assert "--sha256" in document["notes"][0]
    assert document["answers"][20]["images"] == [{**late["inputs"][0], "prediction": "malignant", "abstained": True}]
    chosen = json.loads(run(one, two, "--expert", "lyon", "--json", "--sha256", NEW[:8].upper()).output)
    assert [each["weights_sha256"] for each in chosen["answers"]] == [NEW]
    since = json.loads(run(one, two, "--expert", "lyon", "--json", "--since", document["answers"][20]["time"]).output)
    assert len(since["answers"]) == 2
    text = run(two, "--expert", "lyon").output
    assert "stream 'clinic' step 0 (engine-001/audit.jsonl line 2): encoder 0.25, head 0\n" in text
    assert f"  {0:064x}: malignant (abstained)\n" in text
    assert text.endswith("'lyon' contributed to 2 answers about 2 images, in 4 sound lines.\n")


def test_a_log_is_verified_first_and_bad_requests_are_refused_in_a_sentence(tmp_path: Path) -> None:
    log = write(
        tmp_path / "signed" / "audit.jsonl", body(0), body(1), key=read_private_key(create_key(tmp_path / "k")[0])
    )
    public = tmp_path / "k.pub"
    assert run(log, "--expert", "lyon", "--key", public).exit_code == 0
    with pytest.raises(InputError, match="'paris': they name brest, lyon"):
        touched([log], "paris")
    with pytest.raises(InputError, match="first 8 to 64 hex digits"):
        touched([log], "lyon", sha256="a1")
    assert run(log, "--expert", "lyon", "--since", "yesterday").exit_code == 2
    assert run(log).exit_code == 2
    with pytest.raises(InputError, match="no audit log"):
        touched([tmp_path / "none.jsonl"], "lyon")
    log.write_text(log.read_text().replace("0.25", "0.24", 1))
    changed = run(log, "--expert", "brest")
    assert isinstance(changed.exception, AuditError)
    assert changed.stdout == ""  # nothing is listed from a log that was changed


def test_a_copy_without_its_oldest_file_says_so(tmp_path: Path) -> None:
    log = write(tmp_path / "site" / "audit.jsonl", *(body(i) for i in range(20)), rotate_bytes=2000)
    (tmp_path / "site" / "audit.jsonl.000001").unlink()
    recall = touched([log], "lyon")
    assert "older files are not listed" in recall.notes[0]
    assert 0 < recall.streams["ward"].answers < 20


@pytest.mark.slow
def test_a_long_log_takes_little_more_than_its_verification_and_no_memory(tmp_path: Path) -> None:
    log = write(tmp_path / "long" / "audit.jsonl")
    with AuditLog(log) as opened:
        opened.append_all("step", [body(i) for i in range(20_000)])
    started = time.process_time()
    assert verify(log).lines == 20_002
    verified = time.process_time()
    assert touched([log], "lyon").streams["ward"].answers == 20_000
    assert time.process_time() - verified < 3 * (verified - started)
    tracemalloc.start()
    touched([log], "lyon")
    assert tracemalloc.get_traced_memory()[1] < 4 * 2**20  # the answers alone are 9 MiB
    tracemalloc.stop()
