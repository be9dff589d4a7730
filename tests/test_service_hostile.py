"""Whoever reaches the port: requests made from the OpenAPI document, lying files, raw bytes. Never a 500, never a file.

HOSTILE_REQUESTS sets how many requests the two property tests make together; 10,000 take three minutes on two cores.
"""

import json
import logging
import os
import re
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import requests
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

import mergestream
from benching import write_pool
from dicoms import dicom
from live_service import LiveService
from mergestream.serving.audit.log_verification import verify
from mergestream.serving.http.problems import MEDIA_TYPE, PROBLEMS
from test_intake import BOMBS, VALID, any_bytes, array_header, drawn, png, saved, spoilt

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install schemathesis")
pytestmark = pytest.mark.slow
REQUESTS = int(os.environ.get("HOSTILE_REQUESTS", "3000"))
AT_ONCE = 16
SECRET = "root:x:0:0"
# Written into the service's process: every path that Python opens from then on, one a line. What libraries open
# behind Python's back, and what the decoders' processes open, strace sees.
WATCHER = """
import os, sys
_opened = os.open(os.environ["OPENED_PATHS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
def _watch(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)):
        os.write(_opened, os.fsencode(arguments[0]).replace(b"\\n", b"?") + b"\\n")
sys.addaudithook(_watch)
"""


class Hostilities:
    """A service under watch, and what it answered so far."""

    def __init__(self, service: LiveService, pool: Path, opened: Path) -> None:
        self.service, self._pool, self._opened = service, pool, opened
        self.outcomes: Counter[str] = Counter()
        self._before = opened.stat().st_size

    def count(self, status: int, kind: str, body: bytes) -> None:
        """An answer, or a problem that is in the table; a fault of the service is neither."""
        assert status != 500, self.service.said.read_text()[-3000:]
        code = "answered"
        if status >= 400:
            problem = json.loads(body)
            code = problem["code"]
            assert kind == MEDIA_TYPE
            assert PROBLEMS[code].status == status == problem["status"]
        self.outcomes[f"{status} {code}"] += 1

    def held(self) -> tuple[int, int]:
        """Memory of the service and of its decoders in MiB, and open files of the service."""
        pids = [self.service.pid, *map(int, _children(self.service.pid))]
        sizes = (int(re.findall(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0]) for pid in pids)
        return sum(sizes) // 1024, len(list(Path(f"/proc/{self.service.pid}/fd").iterdir()))

    def opened_elsewhere(self) -> set[str]:
        with self._opened.open("rb") as file:
            file.seek(self._before)
            return self.elsewhere({os.fsdecode(line) for line in file.read().splitlines()})

    def elsewhere(self, paths: set[str]) -> set[str]:
        """Paths outside of the service's folders, the installation and the process's own statistics."""
        own = (self.service.state, self._pool, Path(mergestream.__file__).parents[1], sys.prefix, sys.base_prefix)
        allowed = {place for each in own for place in (Path(each), Path(each).resolve())}
        allowed |= {Path(f"/proc/{self.service.pid}"), Path("/proc/self")}
        # /dev/null is what a decoder's process gets for its errors.
        places = {path: Path(os.path.normpath(path)) for path in paths - {os.devnull}}
        return {path for path, place in places.items() if not allowed & {place, *place.parents}}


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.fixture(scope="module")
def hostilities(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hostilities]:
    folder = tmp_path_factory.mktemp("hostile")
    write_pool(folder / "pool")
    watcher = folder / "watcher"
    watcher.mkdir()
    (watcher / "sitecustomize.py").write_text(WATCHER)
    source = Path(mergestream.__file__).parents[1]
    watched = {"PYTHONPATH": f"{watcher}{os.pathsep}{source}", "OPENED_PATHS": str(folder / "opened.txt")}
    abstain = ("--abstain-on", "blank_pictures,structureless_pictures,near_uniform_entropies")  # the default
    with LiveService(folder, folder / "pool", *abstain, **watched) as service:
        yield Hostilities(service, folder / "pool", folder / "opened.txt")


def often(examples: int) -> Any:
    return settings(
        max_examples=max(1, examples),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


# --- by the document ----------------------------------------------------------------------------------------


@schemathesis.serializer("multipart/related")
def _related_parts(_: Any, value: Any) -> bytes:
    """The body of STOW-RS; schemathesis knows no such media type. Other bytes than parts are a malformed body."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", errors="replace")


def test_requests_made_from_the_openapi_document(hostilities: Hostilities) -> None:
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    schema = schemathesis.openapi.from_url(f"{hostilities.service.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 12
    session, sent = requests.Session(), 0

    def exchange(case: Any) -> None:
        nonlocal sent
        _make_known(case, sent)
        response = case.call(session=session, timeout=60)
        sent += 1
        case.validate_response(response, checks=checks)
        hostilities.count(response.status_code, response.headers.get("content-type", [""])[0], response.content)

    least = REQUESTS // 2
    for number in count():
        for operation in operations:
            for mode in schemathesis.GenerationMode:
                strategy = operation.as_strategy(generation_mode=mode)
                with suppress(Unsatisfiable):  # nothing can be wrong about GET /healthz
                    often(max(1, least // 100))(seed(number)(given(case=strategy)(exchange)))()
        if sent >= least:
            break
    _require_standing(hostilities)


def _make_known(case: Any, number: int) -> None:
    """Names made at random are never those of a stream or an expert: every other request gets one that exists."""
    names = {"stream": ("site-0", "site-1"), "expert": ("lyon", "brest", "turin")}
    for name, values in names.items():
        if number % 2 and name in (case.path_parameters or {}):
            case.path_parameters[name] = values[number // 2 % len(values)]


# --- files that lie -----------------------------------------------------------------------------------------

LIES = {
    "Rows": st.sampled_from([0, 1, 7, 9, 65535]),
    "Columns": st.sampled_from([0, 1, 8, 10, 65535]),
    "SamplesPerPixel": st.sampled_from([0, 2, 3, 4, 65535]),
    "BitsAllocated": st.sampled_from([0, 1, 7, 16, 32, 64, 65535]),
    "BitsStored": st.sampled_from([1, 5, 12, 16, 33]),
    "PixelRepresentation": st.sampled_from([1, 2, 7]),
    "NumberOfFrames": st.sampled_from(["0", "-1", "2", "999999999"]),
    "PhotometricInterpretation": st.sampled_from(["RGB", "MONOCHROME1", "PALETTE COLOR", "YBR_FULL_422", "NONE"]),
    "WindowWidth": st.sampled_from([0, -1, 1e300]),
    "RescaleSlope": st.sampled_from([0, -1, 1e300]),
    "PlanarConfiguration": st.sampled_from([1, 9]),
}


@st.composite
def lying_dicom(draw: st.DrawFn) -> bytes:
    names = draw(st.lists(st.sampled_from(sorted(LIES)), min_size=1, max_size=3, unique=True))
    header = {name: draw(LIES[name]) for name in names}
    try:
        return dicom(drawn((8, 9)), **header)
    except Exception:  # pydicom refuses to write some lies at all
        return dicom(drawn((8, 9)), Rows=65535)


@st.composite
def lying_png(draw: st.DrawFn) -> bytes:
    return png(draw(st.integers(0, 2**31 - 1)), draw(st.integers(0, 2**31 - 1)))


@st.composite
def lying_array(draw: st.DrawFn) -> bytes:
    shape = draw(st.lists(st.integers(-3, 2**40), max_size=5).map(tuple))
    kind = draw(st.sampled_from(["|u1", "<f8", "|O", "|S9", "<M8[s]", "|V4", "u1u1", "__import__('os')"]))
    order = draw(st.sampled_from(["True", "False", "None", "1"]))
    header = f"{{'descr': '{kind}', 'fortran_order': {order}, 'shape': {shape}}}"
    return array_header(header) + draw(st.binary(max_size=300))


files = st.one_of(spoilt(), spoilt(), any_bytes, lying_dicom(), lying_png(), lying_array())
names = st.sampled_from(["a.png", "../../../../etc/passwd", "/etc/passwd", "..\\x", "a\\x00b", "é" * 300, ""])
parts = st.lists(st.tuples(names, files), min_size=1, max_size=3)
upload = st.tuples(st.sampled_from(["images", "batches", "batches"]), parts)


def test_files_that_are_cut_off_changed_or_lie(hostilities: Hostilities) -> None:
    with hostilities.service.client() as client, ThreadPoolExecutor(AT_ONCE) as threads:

        def post(number_and_upload: tuple[int, tuple[str, list[tuple[str, bytes]]]]) -> httpx.Response:
            number, (door, parts) = number_and_upload
            form = [("images", part) for part in (parts[:1] if door == "images" else parts)]
            return client.post(f"/v1/streams/site-{number % 3}/{door}", files=form, params=REPORT if number % 4 else {})

        held: list[tuple[int, int]] = []

        def send(uploads: list[Any]) -> None:
            for response in threads.map(post, enumerate(uploads)):
                hostilities.count(response.status_code, response.headers["content-type"], response.content)

        strategy = st.lists(upload, min_size=AT_ONCE, max_size=AT_ONCE)
        for round_number in range(4):  # the first quarter starts all decoders and fills all caches
            often(-(-REQUESTS // 8 // AT_ONCE))(seed(round_number)(given(strategy)(send)))()
            time.sleep(1)
            held.append(hostilities.held())
    _require_standing(hostilities)
    assert held[-1][0] - held[0][0] < 150, f"memory grows, in MiB: {held}"
    assert held[-1][1] - held[0][1] < 20, f"open files grow: {held}"


REPORT = {"report": "dicom-sr"}


def test_bombs(hostilities: Hostilities) -> None:
    with hostilities.service.client() as client:
        for name, make in BOMBS.items():
            response = client.post("/v1/streams/bombs/batches", files=[("images", (name, make()))])
            hostilities.count(response.status_code, response.headers["content-type"], response.content)
            assert 400 <= response.status_code < 500, name
    _require_standing(hostilities)


# What a Python program and the libraries of the system open when a decoder's process starts.
SYSTEM = ("/lib/", "/usr/lib/", "/usr/share/locale/", "/sys/devices/system/cpu/")
STARTING = {"/etc/ld.so.cache", "/etc/localtime", "/etc/nsswitch.conf", "/etc/ssl/openssl.cnf", "/dev/urandom"}
PASSWD = "/etc/passwd"  # the C library, where a Python starts without HOME: a decoder, and nobody else


@pytest.mark.skipif(shutil.which("strace") is None, reason="no strace on this machine")
def test_no_process_of_it_opens_what_a_client_names(tmp_path: Path) -> None:
    write_pool(tmp_path / "pool")
    trace = tmp_path / "trace"
    watched = ["strace", "-f", "-qq", "-e", "trace=open,openat,openat2,creat", "-o", str(trace)]
    with LiveService(tmp_path, tmp_path / "pool", prefix=watched) as service:
        before = trace.stat().st_size
        hostilities = Hostilities(service, tmp_path / "pool", trace)
        with service.client() as client:

            @often(200)
            @seed(1)
            @given(upload)
            def send(made: tuple[str, list[tuple[str, bytes]]]) -> None:
                form = [("images", part) for part in made[1]]
                response = client.post("/v1/streams/site-0/batches", files=form)
                hostilities.count(response.status_code, response.headers["content-type"], response.content)

            send()
            decoded = client.post("/v1/streams/site-0/batches", files={"images": VALID["dicom jpeg 2000"]})
            assert decoded.status_code == 200
        text = trace.read_text(errors="replace")[before:]
    opened = re.findall(r'^(\d+) +open\w*\((?:AT_FDCWD, )?"([^"]*)".* = \d+$', text, re.MULTILINE)
    outside = hostilities.elsewhere({path for _, path in opened})
    assert {path for path in outside - STARTING - {PASSWD} if not path.startswith(SYSTEM)} == set()
    decoders = {process for process, path in opened if path.endswith("/decoder_process.py")}
    assert decoders
    assert {process for process, path in opened if path == PASSWD} <= decoders


# --- bytes that are not even requests -----------------------------------------------------------------------

PATHS = [
    "/../../../../etc/passwd", "/%2e%2e/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/dashboard.js/../../../etc/passwd",
    "/..%2f..%2f..%2fetc%2fpasswd", "/v1/streams/..%2f..%2fetc%2fpasswd", "/v1/streams/%00", "/docs/../../etc/passwd",
    "/v1/pool/experts/..%2f..%2flyon", "/v1/streams/" + "a" * 70_000, "/etc/passwd", "file:///etc/passwd", "*", "/\xff",
]  # fmt: skip
VERBS = ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "TRACE", "PATCH", "X" * 300]


def bare(url: str, data: bytes) -> bytes:
    """What comes back for bytes as they are, until the other side closes or is silent."""
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port), timeout=5) as connection:
        received = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while chunk := connection.recv(65536):
                received += chunk
        except OSError:
            pass
    return received


def test_paths_out_of_the_service(hostilities: Hostilities) -> None:
    for verb in VERBS:
        for path in PATHS:
            head = f"{verb} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
            reply = bare(hostilities.service.url, head.encode("latin-1"))
            assert SECRET.encode() not in reply
            assert not reply.startswith(b"HTTP/1.1 500")
            hostilities.outcomes[f"{reply[9:12].decode()} bare"] += 1
    _require_standing(hostilities)


FORM = "POST /v1/streams/a/batches HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=b\r\n"
PART = '--b\r\nContent-Disposition: form-data; name="images"; filename="a"\r\n\r\n'
GARBAGE: Sequence[bytes] = [
    b"", b"\0" * 5000, b"\x16\x03\x01\x02\x00\x01\x00", b"GET", b"GET / HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"A: b\r\n" * 20_000 + b"\r\n",
    f"{FORM}Content-Length: 99999999999999\r\n\r\n{PART}".encode(),
    f"{FORM}Content-Length: -1\r\n\r\n{PART}".encode(),
    f"{FORM}Content-Length: 3\r\nContent-Length: 400\r\n\r\n{PART}".encode(),
    f"{FORM}Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n{PART}".encode(),
    f"{FORM}Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{PART}".encode(),
    f"{FORM}Transfer-Encoding: chunked\r\n\r\nzz\r\n{PART}".encode(),
    f"{FORM}Content-Length: {len(PART)}\r\n\r\n{PART}".encode(),
    f"{FORM}Content-Length: 20\r\n\r\n{'--b' * 7}".encode(),
    FORM.replace("boundary=b", "boundary=" + "b" * 30_000).encode() + b"Content-Length: 2\r\n\r\n--",
    FORM.replace("boundary=b", "boundary=").encode() + b"Content-Length: 2\r\n\r\n--",
    FORM.replace("boundary=b", 'boundary="\xe9\x01"').encode("latin-1") + b"Content-Length: 2\r\n\r\n--",
    b"PUT /v1/pool/experts/lyon HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Content-Length: 4000\r\n\r\n" + b"[" * 4000,
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(GARBAGE)))
def test_bytes_that_are_no_request(hostilities: Hostilities, number: int) -> None:
    reply = bare(hostilities.service.url, GARBAGE[number])
    hostilities.outcomes[f"{reply[9:12].decode()} bare"] += 1
    assert not reply.startswith(b"HTTP/1.1 5"), reply
    _require_standing(hostilities)


def _require_standing(hostilities: Hostilities) -> None:
    """Alive, ready, still answering, its log sound, and nothing opened that is not its own."""
    service = hostilities.service
    with service.client() as client:
        assert client.get("/readyz").status_code == 200, service.said.read_text()[-3000:]
        # Hostile administrators may have taken experts away or used up the streams.
        streams = [stream["name"] for stream in client.get("/v1/streams").json()["streams"]]
        stream = streams[0] if streams else "site-0"
        picture = saved(np.asarray(drawn((24, 24, 3))), "PNG")
        answer = client.post(f"/v1/streams/{stream}/batches", files={"images": ("a.png", picture)})
        assert answer.status_code == 200, answer.text
    report = verify(service.log)
    assert report.sound, report.problems
    assert hostilities.opened_elsewhere() == set()
    logging.getLogger(__name__).info("answers so far: %s", json.dumps(dict(sorted(hostilities.outcomes.items()))))
