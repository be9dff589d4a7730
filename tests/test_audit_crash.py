"""The audit log under kill -9 and on a full disk: what was acknowledged is there, what was not is never said to be."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from mergestream.serving.audit.keys import PrivateKey
from mergestream.serving.audit.lines import parse, raw_lines
from mergestream.serving.audit.log_verification import verify
from mergestream.serving.audit.log_writer import AuditLog

SECRET = PrivateKey(Ed25519PrivateKey.from_private_bytes(b"s" * 32))

# Loads the log without torch: a child must start in a fraction of a second. Acknowledges on stdout what returned.
WRITER = """
import itertools, os, sys, threading, types
package = types.ModuleType("mergestream"); package.__path__ = [sys.argv[1]]; sys.modules["mergestream"] = package
from pathlib import Path
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from mergestream.serving.audit.keys import PrivateKey
from mergestream.serving.audit.log_writer import AuditLog
key = PrivateKey(Ed25519PrivateKey.from_private_bytes(b"s" * 32))
log = AuditLog(Path(sys.argv[2]), key, rotate_bytes=int(sys.argv[3]))
os.write(1, b"open\\n")
def work(thread):
    for number in itertools.count():
        line = log.append("step", {"thread": thread, "number": number, "filling": "x" * (number * 37 % 3000)})
        os.write(1, f"{line['sequence']} {line['hash']}\\n".encode())
for thread in range(int(sys.argv[4])):
    threading.Thread(target=work, args=(thread,), daemon=True).start()
threading.Event().wait()
"""


def start_writer(path: Path, *, rotate_bytes: int = 100_000, threads: int = 4) -> subprocess.Popen:
    import mergestream

    folder = str(Path(mergestream.__file__).parent)
    arguments = [folder, str(path), str(rotate_bytes), str(threads)]
    return subprocess.Popen([sys.executable, "-c", WRITER, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def killed_after(writer: subprocess.Popen, seconds: float) -> list[tuple[int, str]]:
    """Kill it in the middle of its work and return what it had acknowledged."""
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"open\n", writer.stderr.read()
    # Read on while it runs: a full pipe would only make it wait.
    os.set_blocking(writer.stdout.fileno(), False)
    output, ends = b"", time.monotonic() + seconds
    while time.monotonic() < ends:
        output += writer.stdout.read() or b""
        time.sleep(0.001)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    os.set_blocking(writer.stdout.fileno(), True)
    output += writer.stdout.read() or b""
    writer.stdout.close()
    writer.stderr.close()
    whole = output[: output.rfind(b"\n") + 1].decode().split("\n")[:-1]
    return [(int(line.split()[0]), line.split()[1]) for line in whole]


def hashes(path: Path) -> dict[int, str]:
    lines = (parse(raw.text) for raw in raw_lines(path) if not raw.torn)
    return {line["sequence"]: line["hash"] for line in lines}


def kill_in_a_loop(path: Path, times: int, **options: int) -> int:
    chance, acknowledged, torn = random.Random(0), {}, 0
    for _ in range(times):
        acknowledged.update(killed_after(start_writer(path, **options), chance.uniform(0.0, 0.15)))
        report = verify(path, SECRET)
        assert report.sound, report.problems
        torn += report.torn is not None
        written = hashes(path)
        assert acknowledged.items() <= written.items()
        assert report.lines == len(written)
    assert len(acknowledged) > 3 * times
    return torn


def test_killed_again_and_again_it_loses_nothing_and_goes_on(tmp_path: Path) -> None:
    kill_in_a_loop(tmp_path / "audit.jsonl", 3)


@pytest.mark.slow
def test_killed_while_it_rotates_at_every_line(tmp_path: Path) -> None:
    kill_in_a_loop(tmp_path / "audit.jsonl", 5, rotate_bytes=1, threads=2)


@pytest.mark.slow
def test_killed_fifty_times(tmp_path: Path) -> None:
    kill_in_a_loop(tmp_path / "one", 30, threads=8)
    kill_in_a_loop(tmp_path / "two", 20, rotate_bytes=4000, threads=3)


DISK = """
import json, os, resource, sys, threading, types
package = types.ModuleType("mergestream"); package.__path__ = [sys.argv[1]]; sys.modules["mergestream"] = package
from pathlib import Path
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from mergestream.serving.audit.keys import PrivateKey
from mergestream.serving.audit.lines import AuditError
from mergestream.serving.audit.log_writer import AuditLog
path, threads = Path(sys.argv[2]), int(sys.argv[3])
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, most))
log = AuditLog(path, PrivateKey(Ed25519PrivateKey.from_private_bytes(b"s" * 32)))
acknowledged, errors = [], []
def work():
    failures = 0
    while failures < 5:
        try:
            acknowledged.append(log.append("step", {"filling": "x" * 300}))
        except AuditError as error:
            failures += 1
            errors.append(str(error))
workers = [threading.Thread(target=work) for _ in range(threads)]
[each.start() for each in workers]
[each.join() for each in workers]
size, failing = path.stat().st_size, log.failing
ends_whole = path.read_bytes().endswith(b"\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
acknowledged.append(log.append("step", {"after": True}))
print(json.dumps({"hashes": [line["hash"] for line in acknowledged], "errors": errors, "size": size,
                  "ends_whole": ends_whole, "failing": failing, "now": log.failing}))
"""


@pytest.mark.parametrize("threads", [1, 6])
def test_a_full_disk_is_an_error_and_no_acknowledged_line_is_lost(tmp_path: Path, threads: int) -> None:
    import mergestream

    path = tmp_path / "audit.jsonl"
    arguments = [str(Path(mergestream.__file__).parent), str(path), str(threads)]
    done = subprocess.run([sys.executable, "-c", DISK, *arguments], capture_output=True, text=True, check=True)
    outcome = json.loads(done.stdout)
    assert len(outcome["errors"]) == 5 * threads
    assert all("File too large" in error and "cannot be written" in error for error in outcome["errors"])
    assert "File too large" in outcome["failing"]
    assert outcome["now"] is None
    assert outcome["ends_whole"]
    assert 10_000 < outcome["size"] <= 20_000
    report = verify(path, SECRET)
    assert report.sound
    assert report.torn is None
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    steps = [line["hash"] for line in lines if line["kind"] == "step"]
    assert sorted(steps) == sorted(outcome["hashes"])
    (resumed,) = (line for line in lines if line["kind"] == "resumed")
    assert resumed["body"] == {"failed_appends": 5 * threads, "reason": "File too large"}
    assert "could not be written for a while" in " ".join(report.notes)


FULL = """
import sys, types
package = types.ModuleType("mergestream"); package.__path__ = [sys.argv[1]]; sys.modules["mergestream"] = package
from pathlib import Path
from mergestream.serving.audit.lines import AuditError
from mergestream.serving.audit.log_verification import verify
from mergestream.serving.audit.log_writer import AuditLog
disk = Path(sys.argv[2]); path = disk / "audit.jsonl"
ballast = disk / "ballast"; ballast.write_bytes(b"x" * 200_000)
log, written, failed = AuditLog(path, rotate_bytes=100_000), 0, 0
while failed < 3:
    try:
        log.append("step", {"filling": "x" * 900}); written += 1
    except AuditError as error:
        assert "No space left" in str(error), error
        failed += 1
assert verify(path).sound and verify(path).torn is None
ballast.unlink()
log.append("step", {}); written += 1
log.close()
report = verify(path)
steps = sum(b'"kind":"step"' in line for f in disk.glob("audit.jsonl*") for line in f.read_bytes().splitlines())
assert report.sound and steps == written, (report, steps, written)
print("fine", written)
"""


def test_a_small_file_system_that_is_full_for_a_while(tmp_path: Path) -> None:
    """A real disk of one megabyte, mounted in a name space of its own."""
    import mergestream

    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f'mount -t tmpfs -o size=1m tmpfs "{disk}" && exec "$0" -c "$1" "$2" "{disk}"'
    arguments = ["unshare", "--mount", "--map-root-user", "--user", "sh", "-c", mount]
    folder = str(Path(mergestream.__file__).parent)
    try:
        done = subprocess.run([*arguments, sys.executable, FULL, folder], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("no unshare on this machine")
    if "unshare:" in done.stderr or "mount:" in done.stderr:
        pytest.skip("this machine lets nobody mount a file system")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("fine")


def test_a_sync_that_fails_is_not_an_acknowledgement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After EIO the kernel may call the pages clean: they are written anew, never just synced again."""
    path = tmp_path / "audit.jsonl"
    with AuditLog(path, SECRET) as log:
        log.append("start", {})
        before = path.read_bytes()

        def broken(_: int) -> None:
            raise OSError(5, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", broken)
            with pytest.raises(OSError, match="Input/output error"):
                log.append("step", {"lost": True})
            assert path.read_bytes() == before
            patch.setattr(os, "fsync", broken)
            patch.setattr(os, "ftruncate", lambda *_: broken(0))
            with pytest.raises(OSError, match="Input/output error"):
                log.append("step", {"lost": True})
            assert len(path.read_bytes()) > len(before)  # it could not be cut back
        log.append("step", {"lost": False})
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["kind"] for line in lines] == ["opened", "start", "resumed", "step"]
    assert lines[-1]["body"] == {"lost": False}
    assert verify(path, SECRET).sound


@pytest.mark.parametrize("failing", ["rename", "open", "fsync"])
def test_a_rotation_that_fails_is_made_good_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "audit.jsonl"
    with AuditLog(path, SECRET, rotate_bytes=1) as log:
        log.append("start", {})

        def broken(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(Path if failing == "rename" else os, failing, broken)
            for _ in range(3):
                with pytest.raises(OSError, match="No space left"):
                    log.append("step", {"lost": True})
        log.append("step", {"lost": False})
    report = verify(path, SECRET)
    assert report.sound
    bodies = [json.loads(raw.text)["body"] for raw in raw_lines(path)]
    assert {"lost": True} not in bodies
    assert {"lost": False} in bodies


def test_a_torn_end_is_told_of_even_if_the_recovery_is_killed_too(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with AuditLog(path, SECRET) as log:
        log.append("start", {})
    (tmp_path / "audit.jsonl.0123456789abcdef.unrecorded.torn").write_bytes(b'{"bo')  # put aside, then killed
    with path.open("ab") as file:
        file.write(b'{"body":')  # and its own event was torn
    AuditLog(path, SECRET).close()
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert [line["kind"] for line in lines] == ["opened", "start", "recovered", "recovered"]
    assert {line["body"]["torn_bytes"] for line in lines[2:]} == {4, 8}
    assert not list(tmp_path.glob("*.unrecorded.torn"))
    assert len(list(tmp_path.glob("*.torn"))) == 2
