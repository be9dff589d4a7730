"""The audit log: nothing in it can be changed unseen, and nothing is said to be written that is not."""

import fcntl
import hashlib
import json
import math
import os
import shutil
import stat
import subprocess
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from mergestream.cli.app import app
from mergestream.runtime.errors import InputError, MergestreamError, OutputError
from mergestream.serving.audit import lines as log_lines
from mergestream.serving.audit.keys import PrivateKey, create_key, read_private_key, read_public_key
from mergestream.serving.audit.lines import (
    BEGINNING,
    AuditError,
    Encoded,
    canonical,
    encoded_body,
    link_of,
    parse,
    seal,
)
from mergestream.serving.audit.log_verification import VerificationReport, head, in_words, read_anchor, verify
from mergestream.serving.audit.log_writer import AuditLog


def key_from(seed: bytes) -> PrivateKey:
    return PrivateKey(Ed25519PrivateKey.from_private_bytes(seed))


SECRET = key_from(bytes(range(32)))
LINES = 30
SCHEMA = jsonschema.Draft202012Validator(
    json.loads((Path(__file__).parent.parent / "docs" / "schemas" / "audit.schema.json").read_text())
)


def write_log(path: Path, signer: PrivateKey | None = SECRET, lines: int = LINES, rotate_bytes: int = 3000) -> None:
    with AuditLog(path, signer, rotate_bytes=rotate_bytes) as log:
        log.append("start", {"version": "1"})
        for number in range(lines - 1):
            log.append("step", {"stream": "ward", "step": number, "predictions": [number % 3, 1]})


def all_lines(path: Path) -> list[tuple[Path, bytes]]:
    """Every line with the file it lies in, newline and all."""
    files = [*sorted(path.parent.glob(f"{path.name}.0*[0-9]")), path]
    return [(file, line) for file in files for line in file.read_bytes().splitlines(keepends=True)]


def put_lines(path: Path, lines: list[tuple[Path, bytes]]) -> None:
    for file in {file for file, _ in all_lines(path)} | {file for file, _ in lines}:
        file.write_bytes(b"".join(line for where, line in lines if where == file))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "audit.jsonl"
    write_log(path)
    return path


def tampered(original: Path, change: Callable[[list[tuple[Path, bytes]]], list[tuple[Path, bytes]]]) -> Path:
    """A copy of the log with its lines changed."""
    folder = original.parent.with_name("tampered")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original.parent, folder)
    path = folder / original.name
    put_lines(path, change(all_lines(path)))
    return path


def found(report: VerificationReport) -> bool:
    return not report.sound or report.torn is not None


# --- writing and reading back ---


@pytest.mark.parametrize("is_signed", [False, True])
def test_a_log_is_sound_over_all_its_files(tmp_path: Path, is_signed: bool) -> None:
    path, private, public = tmp_path / "audit.jsonl", None, None
    if is_signed:
        files = create_key(tmp_path / "site.key")
        private, public = read_private_key(files[0]), read_public_key(files[1])
    write_log(path, private)
    lines = all_lines(path)
    assert len({file for file, _ in lines}) > 3
    report = verify(path, public)
    assert report.sound
    assert report.torn is None
    assert report.lines == len(lines)
    assert any("not signed" in note for note in report.notes) == (not is_signed)
    parsed = [parse_line(line) for line in lines]
    assert [line["sequence"] for line in parsed] == list(range(len(lines)))
    for line in parsed:
        SCHEMA.validate(line)
    steps = [line["body"]["step"] for line in parsed if line["kind"] == "step"]
    assert steps == list(range(LINES - 1))


def parse_line(line: tuple[Path, bytes]) -> dict:
    return parse(line[1].removesuffix(b"\n"))


def test_a_line_can_be_checked_without_this_library(tmp_path: Path) -> None:
    """The format as documented: sha-256 of the JSON without hash and signature; Ed25519 over that, in ten lines."""
    public = Ed25519PrivateKey.from_private_bytes(bytes(range(32))).public_key()
    path = tmp_path / "audit.jsonl"
    write_log(path, rotate_bytes=10**6)
    previous = "0" * 64
    for text in path.read_text().splitlines():
        line = json.loads(text)
        rest = {k: v for k, v in line.items() if k not in ("hash", "signature")}
        spelt = json.dumps(rest, sort_keys=True, separators=(",", ":"))
        assert line["hash"] == hashlib.sha256(spelt.encode()).hexdigest()
        signed = b"mergestream audit line\n" + line["hash"].encode()
        public.verify(bytes.fromhex(line["signature"]), signed)
        assert line["previous"] == previous
        previous = line["hash"]


def test_openssl_verifies_an_ed25519_line(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on this machine")
    private, public = create_key(tmp_path / "site.key")
    with AuditLog(tmp_path / "a", read_private_key(private)) as log:
        line = log.append("start", {})
    (tmp_path / "message").write_bytes(b"mergestream audit line\n" + line["hash"].encode())
    (tmp_path / "signature").write_bytes(bytes.fromhex(line["signature"]))
    arguments = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", public, "-rawin"]
    arguments += ["-in", tmp_path / "message", "-sigfile", tmp_path / "signature"]
    assert b"Successfully" in subprocess.run(arguments, capture_output=True, check=True).stdout


def test_append_returns_the_line_that_is_on_the_disk(tmp_path: Path) -> None:
    body = {"b": [1.5, -0.0, 1e-300, None, True], "a": {"ü": "\ud800 \n"}}
    with AuditLog(tmp_path / "audit.jsonl", SECRET) as log:
        line = log.append("configuration", body)
        assert json.loads((tmp_path / "audit.jsonl").read_bytes().splitlines()[1]) == line
    assert line["body"] == body
    assert line["time"].endswith("Z")
    assert len(line["time"]) == len("2026-01-01T00:00:00.000000Z")


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(st.dictionaries(st.text(), values, max_size=5))
def test_a_sealed_line_is_read_back_and_spelt_the_same(body: dict) -> None:
    text, link = seal("step", encoded_body(body), BEGINNING, SECRET)
    line = parse(text.encode())
    assert line["body"] == body
    assert canonical(line) == text
    assert link_of(link) == link_of(line) == {"sequence": 0, "hash": line["hash"]}
    assert link["time"] == line["time"]


@given(st.dictionaries(st.text(), values, max_size=5))
def test_a_part_encoded_before_gives_the_same_line(body: dict) -> None:
    parts = {name: Encoded(canonical(value)) for name, value in body.items()}
    assert encoded_body(parts) == encoded_body(body) == canonical(body)


@pytest.mark.parametrize(
    "body",
    [{"a": math.nan}, {"a": math.inf}, {"a": {10: 1, 9: 2}}, {"a": b"x"}, ["a"], "a", None, {"a": object()}],
)
def test_a_body_that_is_not_json_is_refused_and_leaves_no_trace(tmp_path: Path, body: object) -> None:
    with AuditLog(tmp_path / "audit.jsonl") as log:
        with pytest.raises(InputError, match="body of an audit line"):
            log.append("step", body)
        log.append("step", {})
    assert verify(tmp_path / "audit.jsonl").lines == 2  # opened, step


@pytest.mark.parametrize("kind", ["", "Step", "a b", "opened", "rotation", "recovered", "resumed", "x" * 41])
def test_a_kind_is_a_word_that_the_log_does_not_use_itself(tmp_path: Path, kind: str) -> None:
    with AuditLog(tmp_path / "audit.jsonl") as log, pytest.raises(InputError, match="kind"):
        log.append(kind, {})


def test_bodies_too_deep_or_too_long_are_refused(tmp_path: Path) -> None:
    deep: dict = {}
    for _ in range(100_000):
        deep = {"a": deep}
    with AuditLog(tmp_path / "audit.jsonl") as log:
        for body in (deep, {"a": "x" * 17_000_000}):
            with pytest.raises(InputError):
                log.append("step", body)


# --- tampering ---


@settings(max_examples=150)
@given(data=st.data())
def test_any_changed_byte_is_found(original: Path, data: st.DataObject) -> None:
    lines = all_lines(original)
    number = data.draw(st.integers(0, len(lines) - 1))
    line = lines[number][1]
    at = data.draw(st.integers(0, len(line) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda value: value != line[at]))
    changed = line[:at] + bytes([byte]) + line[at + 1 :]
    path = tampered(original, lambda lines: [*lines[:number], (lines[number][0], changed), *lines[number + 1 :]])
    for verifier in (SECRET, None):
        report = verify(path, verifier)
        signature = json.loads(line)["signature"].encode()
        if verifier or changed.count(signature):  # without the key, another signature is as good as this one
            assert found(report), changed


@settings(max_examples=100)
@given(data=st.data())
def test_any_line_removed_swapped_repeated_or_inserted_is_found_and_named(original: Path, data: st.DataObject) -> None:
    count = len(all_lines(original))
    what = data.draw(st.sampled_from(["remove", "swap", "repeat", "insert", "move"]))
    one, other = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))

    def change(lines: list[tuple[Path, bytes]]) -> list[tuple[Path, bytes]]:
        lines = list(lines)
        if what == "remove":
            del lines[min(one, count - 2)]  # the last one is a cut tail
        elif what == "swap":
            lines[one], lines[other] = (lines[one][0], lines[other][1]), (lines[other][0], lines[one][1])
        elif what == "repeat":
            lines.insert(one, lines[one])
        elif what == "insert":
            lines.insert(other, (lines[other][0], lines[one][1]))
        else:
            lines.insert(other, lines.pop(one))
        # A line that went to another file lies among those of its new neighbours.
        places = [file for file, _ in all_lines(original)]
        names = [file.name for file in places] + [places[-1].name] * (len(lines) - len(places))
        return [(lines[0][0].with_name(name), line) for name, (_, line) in zip(names, lines, strict=False)]

    path = tampered(original, change)
    report = verify(path, SECRET)
    assert not report.sound
    before = [line for _, line in all_lines(original)]
    after = all_lines(path)
    first = next(i for i, (a, b) in enumerate(zip([*before, b""], [line for _, line in after], strict=False)) if a != b)
    file = after[first][0]
    place = 1 + sum(1 for each, _ in after[:first] if each == file)
    assert (report.problems[0].file, report.problems[0].line) == (file.name, place)
    assert f"{file.name}, line {place}: " in in_words(report)[0]


def forge(path: Path, signer: PrivateKey | None, change: Callable[[dict], dict], key: str | None = None) -> None:
    """Rewrite the whole history with sound hashes, as someone who knows the format would."""
    link, lines = BEGINNING, []
    for file, text in all_lines(path):
        line = json.loads(text)
        sealed, link = seal(line["kind"], canonical(change(line["body"])), link, signer)
        if key is not None:
            forged = {**json.loads(sealed), "key": key}
            rest = {name: value for name, value in forged.items() if name not in ("hash", "signature")}
            forged["hash"] = hashlib.sha256(canonical(rest).encode()).hexdigest()
            link = link_of(forged)
            sealed = canonical(forged)
        lines.append((file, f"{sealed}\n".encode()))
    put_lines(path, lines)


def test_a_forged_history_is_found_by_its_signatures(tmp_path: Path) -> None:
    files = create_key(tmp_path / "site.key")
    path, signer, verifier = tmp_path / "audit.jsonl", read_private_key(files[0]), read_public_key(files[-1])
    write_log(path, signer, lines=8)
    same = {"step": lambda body: {**body, "predictions": [0, 0]}}["step"]
    forge(path, signer, same)
    assert verify(path, verifier).sound  # whoever has the key can
    count = len(all_lines(path))
    for attacker, key in ((key_from(b"x" * 32), None), (None, None), (key_from(b"x" * 32), signer.id)):
        forge(path, attacker, same, key)
        report = verify(path, verifier)
        assert report.problem_count == count
        assert verify(path).sound  # the chain alone cannot tell, and says so
    assert "not checked" in " ".join(verify(path).notes)


def test_one_line_signed_again_with_another_key_is_found(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    write_log(path, lines=6, rotate_bytes=10**6)
    lines = all_lines(path)
    last = json.loads(lines[-1][1])
    sealed, _ = seal(
        "step",
        canonical({"forged": 1}),
        {"sequence": last["sequence"] - 1, "hash": last["previous"]},
        key_from(b"y" * 32),
    )
    put_lines(path, [*lines[:-1], (path, f"{sealed}\n".encode())])
    for verifier in (SECRET, None):
        (problem,) = verify(path, verifier).problems
        assert problem.line == 7
        assert "key" in problem.what


def test_a_cut_tail_is_found_with_an_anchor_only(original: Path) -> None:
    anchor = head(original)
    assert verify(original, SECRET, anchor).anchor_checked
    for cut in (1, 3, 20):
        path = tampered(original, lambda lines, cut=cut: lines[:-cut])
        without = verify(path, SECRET)
        assert without.sound
        assert "not noticed" in " ".join(without.notes)
        report = verify(path, SECRET, anchor)
        assert not report.sound
        assert "tail was cut" in report.problems[-1].what
        assert "not noticed" not in " ".join(report.notes)


def test_an_anchor_finds_a_history_rewritten_with_the_key(original: Path) -> None:
    anchor = head(original)
    path = tampered(original, lambda lines: lines)
    forge(path, SECRET, lambda body: {**body, "more": 1})
    assert verify(path, SECRET).sound
    (problem,) = verify(path, SECRET, anchor).problems
    assert "rewritten" in problem.what


def test_a_log_that_went_on_still_fits_its_old_anchor(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    write_log(path, lines=5)
    anchor = head(path)
    write_log(path, lines=5)
    report = verify(path, SECRET, anchor)
    assert report.sound
    assert report.anchor_checked
    assert report.head.sequence > anchor.sequence


def test_an_anchor_signed_by_another_is_not_trusted(original: Path, tmp_path: Path) -> None:
    write_log(tmp_path / "other.jsonl", key_from(b"z" * 32))
    report = verify(original, SECRET, head(tmp_path / "other.jsonl"))
    assert "the anchor: was not signed" in str(report.problems[-1]) + str(report.problems[-2])


@pytest.mark.parametrize("which", [1, 2, -1])
def test_a_missing_file_is_found(original: Path, which: int) -> None:
    path = tampered(original, lambda lines: lines)
    rotated = sorted(path.parent.glob("audit.jsonl.0*[0-9]"))
    gone = rotated[which if which < 0 else which - 1]
    gone.unlink()
    words = "\n".join(in_words(verify(path, SECRET)))
    assert "NOT sound" in words
    assert gone.name in words or which == -1
    assert "removed or moved" in words


def test_a_log_without_its_newest_file_is_told_of(original: Path) -> None:
    path = tampered(original, lambda lines: lines)
    path.unlink()
    report = verify(path, SECRET)
    assert "itself is not there" in " ".join(report.notes)
    assert not verify(path, SECRET, head(original)).sound


def test_many_problems_are_counted_but_not_all_listed(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_bytes(b"x\n" * 5000)
    report = verify(path)
    assert report.problem_count == 5000
    assert len(report.problems) == 100
    assert "4900 more" in "\n".join(in_words(report))


@settings(max_examples=100)
@given(st.lists(st.binary(max_size=60) | st.sampled_from([b"{}", b"[[[", b'{"body":{}}', b"\xff", b"1" * 5000])))
def test_any_bytes_can_be_verified(tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.jsonl"
    path.write_bytes(b"\n".join(pieces))
    report = verify(path, SECRET)
    assert found(report) or report.lines == 0
    json.dumps(report.to_json())


def test_verification_needs_the_memory_of_one_line(tmp_path: Path) -> None:
    path, noise = tmp_path / "audit.jsonl", tmp_path / "noise.jsonl"
    with AuditLog(path, rotate_bytes=10_000_000) as log:
        for _ in range(40):
            log.append("step", {"a": "x" * 1_000_000})
    noise.write_bytes(b"x" * 100_000_000)  # no newline anywhere
    for file, sound, most in ((path, True, 10e6), (noise, False, 60e6)):
        tracemalloc.start()
        report, peak = verify(file), tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert report.sound is sound
        assert peak < most


# --- many writers, other writers ---


def test_eight_threads_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with AuditLog(path, SECRET, rotate_bytes=50_000) as log, ThreadPoolExecutor(8) as threads:

        def work(thread: int) -> list[dict]:
            return [log.append("step", {"thread": thread, "number": number}) for number in range(200)]

        returned = [line for lines in threads.map(work, range(8)) for line in lines]
    written = [parse_line(line) for line in all_lines(path)]
    assert [line["sequence"] for line in written] == list(range(len(written)))
    steps = [line for line in written if line["kind"] == "step"]
    assert sorted(steps, key=lambda line: line["sequence"]) == sorted(returned, key=lambda line: line["sequence"])
    for thread in range(8):
        assert [s["body"]["number"] for s in steps if s["body"]["thread"] == thread] == list(range(200))
    assert verify(path, SECRET).sound


def test_threads_that_wait_share_one_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line is synced before its append returns, and far fewer syncs than lines are needed."""
    real, syncs, synced = os.fdatasync, [], {}

    def slow(handle: int) -> None:
        threading.Event().wait(0.005)
        real(handle)
        syncs.append(handle)
        synced["size"] = os.fstat(handle).st_size

    monkeypatch.setattr(os, "fdatasync", slow)
    path = tmp_path / "audit.jsonl"
    with AuditLog(path) as log, ThreadPoolExecutor(16) as threads:

        def work(_: int) -> bool:
            line = log.append("step", {})
            return path.read_bytes()[: synced["size"]].count(line["hash"].encode()) >= 1

        assert all(threads.map(work, range(160)))
    assert len(syncs) <= 40


def test_two_services_never_write_one_log(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with AuditLog(path) as log:
        with pytest.raises(AuditError, match="Another process writes"):
            AuditLog(path)
        log.append("start", {})
    with AuditLog(path) as log:
        log.append("start", {})
    with pytest.raises(AuditError, match="closed"):
        log.append("start", {})


def test_a_log_moved_away_under_the_service_swallows_nothing(tmp_path: Path) -> None:
    path, elsewhere = tmp_path / "audit.jsonl", tmp_path / "moved"
    with AuditLog(path) as log:
        log.append("start", {})
        path.rename(elsewhere)
        with pytest.raises(AuditError, match="moved or replaced"):
            log.append("step", {})
        path.write_bytes(b"")
        with pytest.raises(AuditError, match="moved or replaced"):
            log.append("step", {})
        assert log.failing
        elsewhere.replace(path)
        log.append("step", {})
        assert log.failing is None
        path.write_bytes(path.read_bytes() + b"more\n")
        with pytest.raises(AuditError, match="changed by someone else"):
            log.append("step", {})
    kinds = [json.loads(line)["kind"] for line in path.read_bytes().splitlines()[:-1]]
    assert kinds == ["opened", "start", "resumed", "step"]


def test_an_interrupt_in_the_middle_of_a_write_closes_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    log.append("start", {})

    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            log.append("step", {})
    with pytest.raises(AuditError, match="closed"):
        log.append("step", {})
    with AuditLog(path) as again:
        again.append("step", {})
    assert verify(path).lines == 3


def test_verification_of_a_log_that_is_being_written_and_rotated(tmp_path: Path) -> None:
    path, done = tmp_path / "audit.jsonl", threading.Event()
    with AuditLog(path, rotate_bytes=2000) as log:
        log.append("start", {})

        def write() -> None:
            while not done.is_set():
                log.append("step", {})

        writer = threading.Thread(target=write)
        writer.start()
        try:
            seen = [verify(path) for _ in range(40)]
            anchors = [head(path) for _ in range(40)]
        finally:
            done.set()
            writer.join()
    assert all(report.sound for report in seen), [in_words(r) for r in seen if not r.sound][:1]
    assert all(verify(path, anchor=anchor).anchor_checked for anchor in anchors[::10])


def test_the_head_of_a_log_that_is_rotated_for_the_first_time_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "audit.jsonl"
    write_log(path, lines=4, rotate_bytes=10**6)
    expected = head(path)
    listed = log_lines.rotated_numbers

    def list_then_rotate(log: Path) -> list[int]:
        numbers = listed(log)
        if log.is_file():
            log.rename(log_lines.rotated_file(log, 1))
        return numbers

    monkeypatch.setattr(log_lines, "rotated_numbers", list_then_rotate)
    assert head(path) == expected


# --- opening what is there ---


@pytest.mark.parametrize("torn", [b"{", b'{"body":{"st', b'{"body":{}}', b"\x00" * 300, b"\x00\x00\n", b"not json\n"])
def test_a_torn_end_is_put_aside_told_of_and_the_chain_goes_on(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "audit.jsonl"
    write_log(path, lines=4, rotate_bytes=10**6)
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    report = verify(path, SECRET)
    assert report.torn is not None or torn.endswith(b"\n")
    assert report.sound or torn.endswith(b"\n")
    write_log(path, lines=2, rotate_bytes=10**6)
    assert path.read_bytes().startswith(whole)
    report = verify(path, SECRET)
    assert report.sound
    assert report.lines == 8
    event = json.loads(path.read_bytes().splitlines()[5])
    assert event["kind"] == "recovered"
    assert event["body"] == {"torn_bytes": len(torn), "torn_sha256": hashlib.sha256(torn).hexdigest()}
    assert (tmp_path / f"audit.jsonl.{event['sequence']}.torn").read_bytes() == torn
    assert f"torn end of {len(torn)} bytes" in " ".join(report.notes)


def test_a_torn_first_line_is_recovered_too(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_bytes(b'{"bo')
    write_log(path, lines=2)
    assert verify(path, SECRET).lines == 4


@pytest.mark.parametrize("cut", range(0, 700, 97))
def test_a_log_cut_at_any_byte_goes_on(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "audit.jsonl"
    write_log(path, lines=3, rotate_bytes=1)
    path.write_bytes(path.read_bytes()[:cut])
    write_log(path, lines=2, rotate_bytes=10**6)
    assert verify(path, SECRET).sound


def test_a_writer_killed_between_the_two_halves_of_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    write_log(path, lines=3, rotate_bytes=10**6)
    path.rename(tmp_path / "audit.jsonl.000001")
    assert verify(path, SECRET).sound
    assert head(path).sequence == 3
    write_log(path, lines=2, rotate_bytes=10**6)
    assert [json.loads(line)["kind"] for line in path.read_bytes().splitlines()] == ["rotation", "start", "step"]
    assert verify(path, SECRET).lines == 7


@pytest.mark.parametrize("content", [b"a text\n", b"one word", b'{"a":1}\n{"a":2}\n', b"\x89PNG\n\x00", b"{}", b"a\nb"])
def test_another_file_is_never_touched(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(MergestreamError):
        AuditLog(path)
    assert path.read_bytes() == content
    assert sorted(each.name for each in tmp_path.iterdir()) == [".notes.txt.lock", "notes.txt"]


def test_a_changed_last_line_is_not_built_upon(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    write_log(path, lines=3, rotate_bytes=10**6)
    path.write_bytes(path.read_bytes().replace(b'"step":1', b'"step":7'))
    before = path.read_bytes()
    with pytest.raises(AuditError, match="was changed"):
        AuditLog(path, SECRET)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("first", "second"), [(SECRET, None), (None, SECRET), (SECRET, key_from(b"k" * 32))])
def test_one_log_has_one_key(tmp_path: Path, first: PrivateKey | None, second: PrivateKey | None) -> None:
    write_log(tmp_path / "audit.jsonl", first, lines=2)
    with pytest.raises(InputError, match="One log has one key"):
        AuditLog(tmp_path / "audit.jsonl", second)


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "folder", tmp_path / "file" / "audit.jsonl"):
        with pytest.raises(OutputError):
            AuditLog(place)
    with pytest.raises(InputError, match="rotate_bytes"):
        AuditLog(tmp_path / "audit.jsonl", rotate_bytes=0)


def test_a_rotated_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with AuditLog(path, rotate_bytes=1) as log:
        log.append("start", {})
        (tmp_path / "audit.jsonl.000001").write_text("precious")
        with pytest.raises(AuditError, match="in the way"):
            log.append("step", {})
        assert (tmp_path / "audit.jsonl.000001").read_text() == "precious"
        (tmp_path / "audit.jsonl.000001").unlink()
        log.append("step", {})
    assert verify(path).lines == 5  # opened, start; rotation, resumed, step


# --- keys ---


def test_a_key_is_private_and_never_overwritten(tmp_path: Path) -> None:
    files = create_key(tmp_path / "site.key")
    assert stat.S_IMODE(files[0].stat().st_mode) == 0o600
    before = [file.read_bytes() for file in files]
    for taken in files:
        with pytest.raises(OutputError, match="exists"):
            create_key(taken)
    assert [file.read_bytes() for file in files] == before
    assert read_private_key(files[0]).id == read_public_key(files[-1]).id
    files[0].chmod(0o604)
    with pytest.raises(InputError, match="chmod 600"):
        read_private_key(files[0])


def test_a_key_is_not_half_written_over_an_old_public_one(tmp_path: Path) -> None:
    (tmp_path / "site.key.pub").write_text("old")
    with pytest.raises(OutputError, match="exists"):
        create_key(tmp_path / "site.key")
    assert not (tmp_path / "site.key").exists()


def test_files_that_are_no_key_are_refused(tmp_path: Path) -> None:
    private, public = create_key(tmp_path / "site.key")
    rsa = ["openssl", "genpkey", "-algorithm", "x25519", "-out", str(tmp_path / "x")]
    if shutil.which("openssl"):
        subprocess.run(rsa, check=True, capture_output=True)
        with pytest.raises(InputError, match="not an Ed25519"):
            read_private_key(tmp_path / "x")
    public.chmod(0o600)
    with pytest.raises(InputError, match="public key, which cannot sign"):
        read_private_key(public)
    with pytest.raises(InputError, match="private key, which should not leave"):
        read_public_key(private)
    for content in (b"", b"abcd", b"zz" * 40, b"\xff" * 64, b"-----BEGIN nothing", b"-----BEGIN PUBLIC KEY-----\nAAAA"):
        file = tmp_path / "bad"
        file.write_bytes(content)
        file.chmod(0o600)
        for read in (read_private_key, read_public_key):
            with pytest.raises(InputError):
                read(file)
    for read in (read_private_key, read_public_key):
        with pytest.raises(InputError, match="cannot be read"):
            read(tmp_path / "absent")


@given(st.text(), st.booleans())
def test_no_text_passes_for_a_signature(signature: str, capital: bool) -> None:
    good = SECRET.sign("0" * 64)
    assert SECRET.fits("0" * 64, good)
    assert not SECRET.fits("1" * 64, good)
    assert not SECRET.fits("0" * 64, good.upper() if capital else f"{good[:2]} {good[2:]}")
    assert not SECRET.fits("0" * 64, signature)


def test_a_log_signed_with_a_key_of_another_kind_is_not_sound(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    write_log(path, lines=3, rotate_bytes=10**6)
    forge(path, SECRET, lambda body: body, key="hmac-sha256:0011223344556677")
    report = verify(path, SECRET)
    assert not report.sound
    assert "signed with the key hmac-sha256:0011223344556677, not signed with the key ed25519:" in str(
        report.problems[0]
    )
    with pytest.raises(InputError, match="was signed with hmac-sha256:0011223344556677, not with ed25519:"):
        AuditLog(path, SECRET)
    secret = tmp_path / "old.key"
    secret.write_text("ab" * 32)
    secret.chmod(0o600)
    with pytest.raises(InputError, match=r"is not a PEM key\. Make a key pair with 'mergestream audit key'"):
        read_private_key(secret)


# --- the command line ---


def audit(*arguments: str) -> Result:
    """A command in this process; MergestreamErrors come through as exceptions."""
    return CliRunner().invoke(app, ["audit", *arguments])


def test_the_commands_from_key_to_anchor(tmp_path: Path) -> None:
    key, path, anchor = tmp_path / "site.key", tmp_path / "audit.jsonl", tmp_path / "anchor.json"
    assert audit("key", str(key)).stdout.split() == [str(key), f"{key}.pub"]
    assert isinstance(audit("key", str(key)).exception, OutputError)
    write_log(path, read_private_key(key))
    anchor.write_text(audit("head", str(path)).stdout)
    assert read_anchor(anchor) == head(path)
    arguments = ("verify", str(path), "--key", f"{key}.pub", "--anchor", str(anchor))
    good = audit(*arguments)
    assert good.exit_code == 0
    assert good.stdout.endswith(f"Sound: {len(all_lines(path))} lines.\n")
    put_lines(path, all_lines(path)[:-2])
    cut = audit(*arguments, "--json")
    assert cut.exit_code == 1
    assert json.loads(cut.stdout)["sound"] is False
    assert audit(*arguments[:4]).exit_code == 0  # without the anchor: not seen, and said so
    assert "the tail was cut" in audit(*arguments).stdout


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"schema_version": 1}', '{"schema_version": 2}', "\ud800"])
def test_a_file_that_is_no_anchor_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "anchor.json"
    file.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(MergestreamError):
        read_anchor(file)
    good = {"schema_version": 1, "sequence": 0, "hash": "0" * 64, "time": "", "key": None, "signature": None}
    for field, value in (("sequence", "0"), ("hash", "x"), ("hash", 3), ("time", None), ("key", 5)):
        file.write_text(json.dumps({**good, field: value}))
        with pytest.raises(MergestreamError):
            read_anchor(file)


def test_a_missing_log_is_an_input_error(tmp_path: Path) -> None:
    for name in ("verify", "head"):
        assert isinstance(audit(name, str(tmp_path / "absent")).exception, InputError)


def test_the_lock_lets_go_when_the_log_is_closed(tmp_path: Path) -> None:
    with AuditLog(tmp_path / "audit.jsonl"):
        pass
    with (tmp_path / ".audit.jsonl.lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
