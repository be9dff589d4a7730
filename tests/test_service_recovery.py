"""A running service and its folder: a second instance, a clock that goes back, damaged states, changed cards."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benching import CLASSES, pool_on_disk
from mergestream.cli.app import app
from mergestream.serving.audit import lines
from mergestream.serving.audit.log_verification import verify
from services import STREAMS, LocalService, form, png

pool = pool_on_disk


def send(service: LocalService, *seeds: int, stream: str = "ward") -> dict[str, Any]:
    with service.client() as client:
        response = client.post(f"{STREAMS}/{stream}/batches", files=form(*map(png, seeds)))
    assert response.status_code == 200, response.text
    return response.json()


def test_a_second_service_on_one_folder_is_refused_and_the_first_goes_on(pool: Path, tmp_path: Path) -> None:
    with LocalService(pool, tmp_path / "state") as first:
        send(first, 1)
        with pytest.raises(AssertionError, match="Another process writes the audit log"):
            LocalService(pool, tmp_path / "state")
        with pytest.raises(AssertionError, match="Another service keeps its streams in"):
            LocalService(pool, tmp_path / "state", audit=tmp_path / "other.jsonl")
        assert send(first, 2)["step"] == 1
    assert verify(first.log).sound
    assert [line["body"]["step"] for line in first.lines("step")] == [0, 1]


def test_a_clock_that_goes_back_loses_nothing_and_is_reported(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LocalService(pool, tmp_path) as service:
        send(service, 1)
        monkeypatch.setattr(lines, "now", lambda: "2001-01-01T00:00:00.000000Z")
        assert send(service, 2)["step"] == 1
    with LocalService(pool, tmp_path) as service:
        assert send(service, 3)["step"] == 2
    report = verify(service.log)
    assert report.sound
    assert "1 time(s) the clock was set back between two lines." in report.notes


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\xfe\x00", b"[]", b'{"schema_version": 1, "content": {}}'])
def test_a_damaged_state_is_named_and_restored_from_the_log(pool: Path, tmp_path: Path, damage: bytes) -> None:
    with LocalService(pool, tmp_path) as service:
        send(service, 1, 2)
        send(service, 3, 4, stream="desk")
    (service.state / "streams" / "ward.json").write_bytes(damage)
    with LocalService(pool, tmp_path) as service:
        assert "a stream's state is left out" in service.words()
        assert {name: send(service, 5, stream=name)["step"] for name in ("ward", "desk")} == {"ward": 1, "desk": 1}
    first, second = (each["body"] for each in service.lines("step") if each["body"]["stream"] == "ward")
    assert second["state_before"] == first["state_after"]


def test_a_damaged_file_of_the_service_is_named(pool: Path, tmp_path: Path) -> None:
    with LocalService(pool, tmp_path) as service:
        send(service, 1)
    (service.state / "streams" / ".service.json").write_bytes(b"{")
    with pytest.raises(AssertionError, match=r"\.service\.json is not readable JSON"):
        LocalService(pool, tmp_path)


# --- a changed card changes answers, so it is another pool ---

PROBABILITIES = dict(zip(CLASSES, (0.7, *[0.3 / (len(CLASSES) - 1)] * (len(CLASSES) - 1)), strict=True))
CHANGES: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 2.0},
    "mean_probability": {"metrics": {"validation": {"mean_probability": PROBABILITIES}}},
    "accuracy": {"metrics": {"validation": {"accuracy": 1.0}}},
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_card_is_reloaded_as_another_pool_and_refused_by_replay(
    pool: Path, tmp_path: Path, field: str
) -> None:
    used, images = shutil.copytree(pool, tmp_path / "pool"), tmp_path / "images"
    images.mkdir()
    for seed in (1, 2):
        (images / f"{seed}.png").write_bytes(png(seed))
    counts = {name: 3 + place for place, name in enumerate(CLASSES)}
    for card in used.glob("*/expert.json"):  # what the changed fields are about
        about = {"class_counts": counts, "temperature": 0.7}
        card.write_text(json.dumps({**json.loads(card.read_text()), **about}))
    before = shutil.copytree(used, tmp_path / "before")
    chosen = {"method": "merge_and_fit", "options": ["temperature=card"]}
    with LocalService(used, tmp_path / "state", **chosen) as service, service.client() as client:
        send(service, 1, 2)
        assert client.post("/v1/pool/reload").json()["changed"] is False
        card = used / "lyon" / "expert.json"
        card.write_text(json.dumps({**json.loads(card.read_text()), **CHANGES[field]}))
        reloaded = client.post("/v1/pool/reload").json()
        assert (reloaded["changed"], reloaded["restarted"]) == (True, ["ward"])
        assert "average_restarted" in [each["code"] for each in send(service, 1, 2)["findings"]]
    for folder, sequence, outcome in ((before, 0, "exact"), (used, 0, "failed"), (used, 1, "exact")):
        step = str(service.lines("step")[sequence]["sequence"])
        arguments = ["audit", "replay", str(service.log), "--images", str(images), "--pool", str(folder)]
        done = CliRunner().invoke(app, [*arguments, "--step", step, "--json"])
        assert json.loads(done.stdout)["outcomes"] == {outcome: 1}, done.stdout
        assert done.exit_code == (outcome != "exact")
        assert outcome != "failed" or "Give the folder of the pool as it was then" in done.stdout
