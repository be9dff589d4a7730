"""Clients' files are decoded in child processes: bounded time and memory, no network, nobody waits behind a bomb."""

import asyncio
import hashlib
import os
import resource
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mergestream.data import intake
from mergestream.data.intake.input_files import read_upload, read_uploads
from mergestream.data.intake.limits import IntakeError, Limits
from mergestream.serving.decode_queue import MOST_TOGETHER, DecodeQueue
from test_intake import chunk, drawn, npy, png, refusal, saved

PNG_START = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">LLBBBBB", 9, 9, 8, 2, 0, 0, 0))
BOMBS = {
    "fill bytes": b"\xff\xd8" + b"\xff" * (3 << 20),
    "empty segments": b"\xff\xd8" + b"\xff\xe5\0\2" * (3 << 18),
    "bytes between segments": b"\xff\xd8\xff\xd9" + bytes(24 << 20),
    "empty chunks": PNG_START + chunk(b"prVt", b"") * 400_000,
}


def jpeg_of_allowed_scans(side: int) -> bytes:
    """Nothing in it is forbidden, and every scan costs a pass over the whole image."""
    whole = saved(np.zeros((side, side, 3), np.uint8), "JPEG", progressive=True)
    last = whole.rindex(b"\xff\xda")
    return whole[:-2] + whole[last:-2] * (32 - whole.count(b"\xff\xda")) + b"\xff\xd9"


def peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def child_of(limits: Limits) -> Path:
    """The /proc folder of the one idle process for these limits, which has decoded a photograph."""
    from mergestream.data.intake.decoder_pool import pool_for

    read_upload(png_of_noise(), limits)
    (process,) = pool_for(limits)._idle
    return Path(f"/proc/{process._process.pid}")


def png_of_noise() -> bytes:
    return saved(drawn(), "PNG")


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_of_structure_are_refused_at_once_and_in_little_memory(name: str) -> None:
    read_upload(png_of_noise(), Limits())
    before, start = peak_bytes(), time.monotonic()
    error = refusal(BOMBS[name])
    assert error.code == "too_large"
    assert "65,536 segments" in error.sentence
    assert time.monotonic() - start < 1.5
    assert peak_bytes() - before < 60 << 20


def test_a_photograph_has_as_much_time_as_the_limits_say() -> None:
    slow, limits = jpeg_of_allowed_scans(3000), Limits(seconds=0.1, pixels=16_000_001)
    read_upload(png_of_noise(), limits)
    start = time.monotonic()
    error = refusal(slow, limits)
    assert error.code == "too_slow"
    assert error.sentence == "Decoding the file took longer than the allowed 0.1 s."
    assert time.monotonic() - start < 5
    assert len(read_upload(png_of_noise(), limits)) == 1


def test_slow_files_do_not_make_others_wait() -> None:
    """As many slow files at once as there are cores, and two more."""
    slow, limits = jpeg_of_allowed_scans(2000), Limits(seconds=1.5, pixels=16_000_002)

    async def waits() -> list[float]:
        queue = DecodeQueue(limits)
        await queue.decode("quick", [png_of_noise()])
        slow_streams = [f"slow-{number}" for number in range(2 + (os.cpu_count() or 1))]
        busy = [asyncio.ensure_future(queue.decode(stream, [slow] * 4)) for stream in slow_streams]
        await asyncio.sleep(0.2)
        seconds = []
        for _ in range(5):
            start = time.monotonic()
            assert len(await queue.decode("quick", [png_of_noise()])) == 1
            seconds.append(time.monotonic() - start)
        assert not any(task.done() for task in busy)
        await asyncio.gather(*busy, return_exceptions=True)
        return seconds

    assert sorted(asyncio.run(waits()))[2] < 0.5


def test_small_files_that_wait_together_are_refused_one_by_one() -> None:
    files = [saved(np.full((16, 16 + n), n, np.uint8), "PNG") for n in range(2 * MOST_TOGETHER + 1)]
    broken = {3: b"GIF89a", MOST_TOGETHER: files[0][:-40], MOST_TOGETHER + 1: b""}

    async def decoded() -> list[Any]:
        queue = DecodeQueue(Limits())
        sent = [broken.get(number, file) for number, file in enumerate(files)]
        waiting = [asyncio.ensure_future(queue.decode("ward", [file])) for file in sent]
        await asyncio.sleep(0)
        waiting[5].cancel()
        return await asyncio.gather(*waiting, return_exceptions=True)

    results = asyncio.run(decoded())
    assert {n: each.code for n, each in enumerate(results) if isinstance(each, IntakeError)} == {
        3: "unsupported_format", MOST_TOGETHER: "damaged", MOST_TOGETHER + 1: "empty",
    }  # fmt: skip
    assert isinstance(results[5], asyncio.CancelledError)
    for number, pictures in enumerate(results):
        if number not in {5, *broken}:
            assert [picture.pixels.shape for picture in pictures] == [(3, 16, 16 + number)]
            assert pictures[0].sha256 == hashlib.sha256(files[number]).hexdigest()


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_the_process_that_decodes_photographs_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERGESTREAM_TOKENS", "a secret")
    limits = Limits(pixels=5_000_004)
    with socket.socket() as held_open:  # a descriptor of the parent
        os.set_inheritable(held_open.fileno(), True)
        child = child_of(limits)
    values = {line[:25].strip(): line[25:].split()[:2] for line in (child / "limits").read_text().splitlines()}
    assert values["Max address space"] == [str((1 << 30) + 3 * limits.file_bytes + 40 * limits.pixels)] * 2
    assert values["Max cpu time"] == ["2000", "2000"]
    assert values["Max open files"] == ["4", "4"]
    assert values["Max file size"] == values["Max core file size"] == ["0", "0"]
    open_files = {number.name: str(number.readlink()).partition(":")[0] for number in (child / "fd").iterdir()}
    assert open_files == {"0": "pipe", "1": "pipe", "2": "/dev/null", "3": f"{child}/statm"}
    assert b"MERGESTREAM_TOKENS" not in (child / "environ").read_bytes()
    status = dict(line.split(":\t") for line in (child / "status").read_text().splitlines() if ":\t" in line)
    assert (status["Seccomp"].strip(), status["NoNewPrivs"].strip()) == ("2", "1")


ATTEMPTS = """
import os, runpy, socket, sys

sandbox = runpy.run_path(sys.argv[1])
enter = sandbox["enter"]
assert enter(1 << 34, 60, int(sys.argv[2]))
attempts = {
    "socket": lambda: socket.socket(),
    "open": lambda: open("/etc/passwd"),
    "write": lambda: os.open("/tmp/x", os.O_CREAT | os.O_WRONLY),
    "unlink": lambda: os.unlink("/tmp/x"),
    "fork": os.fork,
    "program": lambda: os.execv("/bin/true", ["true"]),
    "signal": lambda: os.kill(os.getppid(), 0),
}
for name in sys.argv[3:] or attempts:
    try:
        attempts[name]()
        print(name, "succeeded")
    except OSError as error:
        print(name, type(error).__name__)
"""


def attempted(program: str, *arguments: str) -> dict[str, str]:
    line = [sys.executable, "-c", program, Path(intake.__file__).with_name("sandbox.py"), *arguments]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    return dict(line.split() for line in done.stdout.splitlines())


@pytest.mark.skipif(sys.platform != "linux", reason="seccomp is part of Linux")
def test_the_sandbox_allows_no_socket_file_program_or_signal() -> None:
    """With descriptors to spare: the filter alone refuses."""
    outcomes = attempted(ATTEMPTS, "100")
    assert set(outcomes.values()) == {"PermissionError"}
    assert len(outcomes) == 7


def test_without_the_filter_there_is_still_no_descriptor_for_a_socket() -> None:
    """As on systems without seccomp."""
    program = ATTEMPTS.replace("assert enter(", "enter.__globals__['_filter_system_calls'] = bool\nenter(")
    assert set(attempted(program, "3", "socket", "open", "write").values()) == {"OSError"}


def test_many_files_of_a_request_keep_their_order_and_their_positions() -> None:
    files = [saved(drawn((8, 4 + n, 3), n), "PNG" if n % 2 else "BMP") for n in range(70)]
    files[40] = npy(drawn((8, 44, 3)))
    assert [picture.pixels.shape[2] for picture in read_uploads(files, Limits())] == list(range(4, 74))
    for position in (0, 33, 69):
        with pytest.raises(IntakeError) as caught:
            read_uploads([*files[:position], png(9, 9)[:-40], *files[position + 1 :]], Limits())
        assert (caught.value.code, caught.value.position) == ("damaged", position)
    with pytest.raises(IntakeError) as caught:
        read_uploads(files, Limits(images=50))
    assert (caught.value.code, caught.value.position) == ("too_many", 50)
