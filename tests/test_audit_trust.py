"""A service starts only from a log that it can trust: not from a forged, emptied, cut or exchanged one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benching import pool_on_disk
from mergestream.cli.app import app
from mergestream.runtime.errors import MergestreamError
from mergestream.serving.audit.keys import create_key, read_private_key, read_public_key
from mergestream.serving.audit.lines import BEGINNING, canonical, seal
from mergestream.serving.audit.log_verification import verify
from mergestream.serving.audit.log_writer import AuditLog
from services import STREAMS, LocalService, form, png

pool = pool_on_disk


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_key(tmp_path_factory.mktemp("keys") / "site.key")[0]


def write_state(pool: Path, state: Path, key: Path | None = None) -> None:
    """The state folder of a service that has answered four batches."""
    with LocalService(pool, state, audit_key=key) as service, service.client() as client:
        for number in range(4):
            stream = f"{STREAMS}/{('ward', 'desk')[number % 2]}/batches"
            assert client.post(stream, files=form(png(number), png(9))).status_code == 200


@pytest.fixture(scope="module")
def unsigned(pool: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = tmp_path_factory.mktemp("unsigned") / "state"
    write_state(pool, state)
    return state


@pytest.fixture(scope="module")
def signed(pool: Path, key: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    state = tmp_path_factory.mktemp("signed") / "state"
    write_state(pool, state, key)
    return state


def refusal(pool: Path, state: Path, key: Path | None = None) -> str:
    """What a service says that does not start from this folder; empty if it starts."""
    try:
        service = LocalService(pool, state, audit_key=key)
    except AssertionError as error:
        return str(error)
    service.stop()
    return ""


def edit_step(lines: list[bytes]) -> list[bytes]:
    """More images than there were, in a line that is not the last."""
    place = next(i for i, line in enumerate(lines) if b'"kind":"step"' in line)
    return [*lines[:place], lines[place].replace(b'"images_so_far":2', b'"images_so_far":7'), *lines[place + 1 :]]


def insert_step(lines: list[bytes]) -> list[bytes]:
    """A step that the chain does not hold, before the last line."""
    step = json.loads(next(line for line in reversed(lines) if b'"kind":"step"' in line))
    step["body"] |= {"step": 40, "images_so_far": 80}
    return [*lines[:-1], canonical(step).encode() + b"\n", lines[-1]]


def rewrite(lines: list[bytes]) -> list[bytes]:
    """The whole history with sound hashes, as whoever knows the format can do where nothing is signed."""
    link, forged = BEGINNING, []
    for line in edit_step(lines):
        value = json.loads(line)
        text, link = seal(value["kind"], canonical(value["body"]), link, None)
        forged.append(f"{text}\n".encode())
    return forged


MANIPULATIONS: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "edited": (edit_step, "was changed"),
    "inserted": (insert_step, "was changed"),
    "removed": (lambda lines: [*lines[:2], *lines[3:]], "removed or moved"),
    "beheaded": (lambda lines: lines[3:], "removed or moved"),
    "rewritten": (rewrite, "rewritten or exchanged"),
    "cut": (lambda lines: lines[:-2], "cut or emptied"),
    "emptied": (lambda _: [], "cut or emptied"),
}


@pytest.mark.parametrize("name", MANIPULATIONS)
def test_a_service_does_not_start_from_a_log_that_was_changed(
    pool: Path, unsigned: Path, tmp_path: Path, name: str
) -> None:
    state = shutil.copytree(unsigned, tmp_path / "state")
    log, (change, why) = state / "audit.jsonl", MANIPULATIONS[name]
    good = log.read_bytes()
    log.write_bytes(b"".join(change(good.splitlines(keepends=True))))
    changed, files = log.read_bytes(), sorted(state.rglob("*.json"))
    before = [file.read_bytes() for file in files]
    message = refusal(pool, state)
    assert why in message
    assert "start with a new --state folder" in message
    assert (log.read_bytes(), [file.read_bytes() for file in files]) == (changed, before)  # nothing was touched
    assert not verify(log).sound
    log.write_bytes(good)
    assert refusal(pool, state) == ""


def test_a_missing_log_is_an_emptied_one(pool: Path, unsigned: Path, tmp_path: Path) -> None:
    state = shutil.copytree(unsigned, tmp_path / "state")
    (state / "audit.jsonl").unlink()
    assert "cut or emptied" in refusal(pool, state)


@pytest.mark.parametrize("name", ["edited", "inserted", "removed", "beheaded", "cut"])
def test_a_signed_log_is_checked_with_the_key(pool: Path, signed: Path, key: Path, tmp_path: Path, name: str) -> None:
    state = shutil.copytree(signed, tmp_path / "state")
    log, (change, why) = state / "audit.jsonl", MANIPULATIONS[name]
    log.write_bytes(b"".join(change(log.read_bytes().splitlines(keepends=True))))
    assert why in refusal(pool, state, key)


def test_a_changed_line_in_the_file_before_the_current_one_is_found(pool: Path, unsigned: Path, tmp_path: Path) -> None:
    state = shutil.copytree(unsigned, tmp_path / "state")
    log = state / "audit.jsonl"
    with AuditLog(log, rotate_bytes=1) as opened:  # every line in a file of its own
        for number in range(3):
            opened.append("note", {"number": number})
    assert refusal(pool, state) == ""
    older = sorted(state.glob("audit.jsonl.0*"))[-1]
    older.write_bytes(older.read_bytes().replace(b'"number":1', b'"number":8'))
    assert "was changed" in refusal(pool, state)


def test_old_files_may_be_in_an_archive(pool: Path, unsigned: Path, tmp_path: Path) -> None:
    state = shutil.copytree(unsigned, tmp_path / "state")
    with AuditLog(state / "audit.jsonl", rotate_bytes=1) as opened:
        for number in range(3):
            opened.append("note", {"number": number})
    for file in sorted(state.glob("audit.jsonl.0*"))[:-1]:
        file.unlink()
    assert refusal(pool, state) == ""
    assert "is missing" in str(verify(state / "audit.jsonl").problems)


# --- logs of two replicas ---


@pytest.fixture
def replicas(pool: Path, key: Path, tmp_path: Path) -> tuple[Path, Path]:
    folders = (tmp_path / "engine-000", tmp_path / "engine-001")
    for folder in folders:
        write_state(pool, folder, key)
    return folders


def exchange(one: Path, other: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


@pytest.mark.parametrize("what", ["audit.jsonl", ""], ids=["logs", "folders"])
def test_exchanged_logs_of_two_replicas_are_found(
    pool: Path, key: Path, replicas: tuple[Path, Path], what: str
) -> None:
    public = read_public_key(key.with_name("site.key.pub"))
    assert all(verify(folder / "audit.jsonl", public).sound for folder in replicas)
    exchange(*(folder / what for folder in replicas))
    for folder in replicas:
        report = verify(folder / "audit.jsonl", public)
        assert "exchanged" in " ".join(map(str, report.problems))
        assert CliRunner().invoke(app, ["audit", "verify", str(folder / "audit.jsonl")]).exit_code == 1
        assert "exchanged" in refusal(pool, folder, key)
    exchange(*(folder / what for folder in replicas))
    assert refusal(pool, replicas[0], key) == ""


def test_two_logs_have_two_identities(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with AuditLog(tmp_path / name / "audit.jsonl") as log:
            log.append("start", {})
    first, second = (verify(tmp_path / name / "audit.jsonl") for name in ("one", "two"))
    assert first.log != second.log
    assert len(first.log or "") == len(second.log or "") == 32
    (tmp_path / "elsewhere").mkdir()
    shutil.copy(tmp_path / "one" / "audit.jsonl", tmp_path / "elsewhere")  # a copy for a regulator
    assert verify(tmp_path / "elsewhere" / "audit.jsonl").sound


def test_a_log_without_an_identity_goes_on(tmp_path: Path, key: Path) -> None:
    """A log whose oldest file is elsewhere does not begin with the line that names it."""
    private, link, lines = read_private_key(key), BEGINNING, []
    for number in range(3):
        text, link = seal("step", canonical({"number": number}), link, private)
        lines.append(f"{text}\n")
    path = tmp_path / "engine-000" / "audit.jsonl"
    path.parent.mkdir()
    path.write_text("".join(lines))
    with AuditLog(path, private) as log:
        log.append("step", {})
    assert (verify(path, private).sound, verify(path).log) == (True, None)


def test_replay_refuses_a_log_with_a_line_removed(unsigned: Path, pool: Path, tmp_path: Path) -> None:
    lines = (unsigned / "audit.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "audit.jsonl").write_bytes(b"".join([*lines[:3], *lines[4:]]))
    done = CliRunner().invoke(
        app, ["audit", "replay", str(tmp_path / "audit.jsonl"), "--images", str(tmp_path), "--pool", str(pool)]
    )
    assert isinstance(done.exception, MergestreamError)
    assert "removed or moved" in str(done.exception)
