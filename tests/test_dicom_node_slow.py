"""The DICOM node of a real `mergestream serve` against dcmtk, hostile peers and kill -9."""

import json
import os
import shutil
import signal
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
from pydicom.dataset import Dataset
from pydicom.uid import CTImageStorage, generate_uid
from pynetdicom import AE

from benching import pool_on_disk
from dicom_nodes import Node, mr_image, rules, wait_until
from dicoms import SECRET, dataset, written
from mergestream.data.intake.input_files import read_uploads
from mergestream.data.intake.limits import Limits
from mergestream.serving.dicom_network.study_pull import SourceError, pull_study
from services import RunningService

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("storescu") is None, reason="dcmtk is not installed (Debian: apt install dcmtk)"),
]
RULES = """
callers: [STORESCU, ECHOSCU, SCANNER]
rules:
  - {stream: ward, modality: [CT, CR, MG, US, MR]}
limits: {associations: 16, object_mib: 8}
"""
CLASSES = {"CT": "2", "CR": "1", "MG": "1.2", "US": "6.1", "MR": "4"}
# How dcmtk compresses a file, and the option of storescu that proposes the transfer syntax.
COMPRESSIONS = {"dcmcjpeg +e1": "-xs", "dcmcjpls": "-xt", "dcmcrle": "-xr", "": "-xi", "cp": "-xd"}


pool = pool_on_disk


def start(pool: Path, folder: Path, *more: str) -> RunningService:
    (folder / "rules.yaml").write_text(RULES)
    return RunningService(
        pool, folder / "state", "--dicom-port", "0", "--dicom-rules", str(folder / "rules.yaml"), *more
    )


def port_of(service: RunningService) -> int:
    return int(service.words().split("DICOM node: ")[1].split("port ")[1].split(".")[0])


def status(service: RunningService) -> dict[str, int]:
    with service.client() as client:
        return dict(client.get("/v1/dicom").json())


def image(modality: str, number: int) -> Dataset:
    """A 16-bit image such as a scanner of this kind makes."""
    pixels = np.random.default_rng(number).integers(0, 4096, (48, 40), dtype=np.uint16)
    uids = {"SOPClassUID": f"1.2.840.10008.5.1.4.1.1.{CLASSES[modality]}", "SOPInstanceUID": generate_uid()}
    return dataset(pixels, **uids, Modality=modality, BitsStored=12, BodyPartExamined="BREAST", ViewPosition="CC")


def run(line: str, *more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*line.split(), *map(str, more)], capture_output=True, text=True, timeout=120, check=False)


def test_dcmtk_sends_every_kind_of_object(pool: Path, tmp_path: Path) -> None:
    hashes = []
    with start(pool, tmp_path) as service:
        port = port_of(service)
        assert run("echoscu -aec MERGESTREAM 127.0.0.1", port).returncode == 0
        for number, (compress, proposal) in enumerate(COMPRESSIONS.items()):
            folder = tmp_path / f"sent-{number}"
            folder.mkdir()
            for place, modality in enumerate(CLASSES):
                plain, file = tmp_path / "plain.dcm", folder / f"{modality}.dcm"
                plain.write_bytes(written(image(modality, 10 * number + place)))
                hashes.append(read_uploads([plain.read_bytes()], Limits())[0].pixels_sha256)
                assert run(compress or "cp", plain, file).returncode == 0
            done = run(f"storescu -aec MERGESTREAM {proposal} +sd 127.0.0.1", port, folder)
            assert done.returncode == 0, done.stderr
        wait_until(lambda: status(service)["objects_answered"] == len(hashes), 60)
        numbers = status(service)
    log = service.log.read_text()
    assert [each in log for each in hashes] == [True] * 25  # lossless: the pixels are those of the original
    assert (numbers["objects_refused"], numbers["objects_unanswerable"], numbers["objects_waiting"]) == (0, 0, 0)
    assert SECRET not in service.words() + log
    assert not list((tmp_path / "state" / "dicom" / "inbox").iterdir())


def test_tls_and_senders_without_a_certificate(pool: Path, tmp_path: Path) -> None:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    run(f"{made} -keyout", key, "-out", cert)
    key.chmod(0o600)
    options = ("--dicom-tls-cert", str(cert), "--dicom-tls-key", str(key), "--dicom-tls-ca", str(cert))
    with start(pool, tmp_path, *options) as service:
        context = ssl.create_default_context(cafile=str(cert))
        entity = AE("SCANNER")
        entity.add_requested_context(CTImageStorage)
        for with_certificate in (False, True):
            if with_certificate:
                context.load_cert_chain(cert, key)
            peer = entity.associate(
                "127.0.0.1", port_of(service), ae_title="MERGESTREAM", tls_args=(context, "localhost")
            )
            assert peer.is_established is with_certificate
            peer.release() if with_certificate else peer.abort()


@pytest.fixture(scope="module")
def service(pool: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    with start(pool, tmp_path_factory.mktemp("hostile")) as running:
        yield running


class Pulse:
    """Asks for /healthz all the time, and once after the block; `slowest` is the longest it took.

    A check that fails or hangs fails the block.
    """

    def __init__(self, url: str, seconds: float = 30.0) -> None:
        self.slowest, self._seconds, self._client = 0.0, seconds, httpx.Client(base_url=url, timeout=seconds)
        self._over, self._threads = threading.Event(), ThreadPoolExecutor(1)

    def _ask(self) -> None:
        over = False
        while not over:
            over = self._over.wait(0.02)
            began = time.monotonic()
            assert self._client.get("/healthz").status_code == 200
            self.slowest = max(self.slowest, time.monotonic() - began)

    def __enter__(self) -> "Pulse":
        self._asking = self._threads.submit(self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._threads.shutdown(wait=False)
        self._asking.result(self._seconds + 10)  # raises what ended the thread
        self._client.close()


@pytest.mark.parametrize("reply", [b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n", b"", None])
def test_a_pulse_fails_if_a_health_check_fails_or_hangs(reply: bytes | None) -> None:
    """None: it never answers; empty: the connection is closed."""
    with socket.create_server(("127.0.0.1", 0)) as listening, ExitStack() as open_sockets:

        def answer() -> None:
            with suppress(OSError):
                connection = open_sockets.enter_context(listening.accept()[0])
                connection.recv(1000)
                if reply is not None:
                    connection.sendall(reply)
                    connection.shutdown(socket.SHUT_RDWR)

        threading.Thread(target=answer, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises((AssertionError, httpx.TransportError)), Pulse(url, seconds=1.0):
            time.sleep(0.3)


def association_request(calling: bytes = b"STORESCU", called: bytes = b"MERGESTREAM") -> bytes:
    def item(kind: int, body: bytes) -> bytes:
        return struct.pack(">BxH", kind, len(body)) + body

    context = item(0x20, b"\1\0\0\0" + item(0x30, b"1.2.840.10008.5.1.4.1.1.4") + item(0x40, b"1.2.840.10008.1.2.1"))
    user = item(0x50, item(0x51, struct.pack(">I", 16384)) + item(0x52, b"1.2.3"))
    body = struct.pack(">Hxx16s16s32x", 1, called.ljust(16), calling.ljust(16))
    body += item(0x10, b"1.2.840.10008.3.1.1.1") + context + user
    return struct.pack(">BxI", 1, len(body)) + body


def connect(service: RunningService, sent: bytes = b"") -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", port_of(service)), timeout=20)
    with suppress(OSError):
        peer.sendall(sent)
    return peer


def reply(peer: socket.socket) -> int:
    """The kind of the next PDU; 0 if the connection was closed."""
    with suppress(ConnectionResetError):
        head = peer.recv(6)
        if len(head) == 6:
            peer.recv(struct.unpack(">I", head[2:])[0])
            return head[0]
    return 0


def fragment(bits: int, data: bytes) -> bytes:
    return struct.pack(">BxIIBB", 4, len(data) + 6, len(data) + 2, 1, bits) + data


def store_command(uid: bytes = b"1.2.3.4") -> bytes:
    def element(number: int, value: bytes) -> bytes:
        value += b"\0" * (len(value) % 2)
        return struct.pack("<HHI", 0, number, len(value)) + value

    numbers = {0x0100: 1, 0x0110: 7, 0x0700: 0, 0x0800: 0}
    values = {number: struct.pack("<H", value) for number, value in numbers.items()}
    values |= {0x0002: b"1.2.840.10008.5.1.4.1.1.4", 0x1000: uid}
    return b"".join(element(number, values[number]) for number in sorted(values))


def require_alive(service: RunningService, tmp_path: Path) -> None:
    file = tmp_path / "good.dcm"
    file.write_bytes(written(image("MR", 1)))
    done = run("storescu -aec MERGESTREAM 127.0.0.1", port_of(service), file)
    assert done.returncode == 0, done.stderr
    with service.client() as client:
        assert client.get("/readyz").status_code == 200


ACCEPTED, REJECTED, DATA, ABORTED = 2, 3, 4, 7


def test_wrong_titles_are_rejected(service: RunningService, tmp_path: Path) -> None:
    for request in (association_request(calling=b"STRANGER"), association_request(called=b"OTHER")):
        with connect(service, request) as peer:
            assert reply(peer) == REJECTED
    assert run("echoscu -aet STRANGER -aec MERGESTREAM 127.0.0.1", port_of(service)).returncode != 0
    require_alive(service, tmp_path)


HOSTILE = {
    "oversized PDU": struct.pack(">BxI", 4, 0xFFFFFFFF),
    "oversized fragment": struct.pack(">BxIIBB", 4, 6, 0xFFFFFFFF, 1, 3),
    "another context": struct.pack(">BxIIBB", 4, 6, 2, 9, 3),
    "data before a command": fragment(0, b"x" * 100),
    "endless command": b"".join(fragment(1, b"\0" * 8000) for _ in range(4)),
    "damaged command": fragment(3, b"\xff" * 64),
    "unknown PDU": struct.pack(">BxI", 99, 4) + b"1234",
    "second request": association_request(),
}


@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE)
def test_nonsense_aborts_its_association_only(service: RunningService, sent: bytes, tmp_path: Path) -> None:
    with connect(service, association_request()) as peer:
        assert reply(peer) == ACCEPTED
        peer.sendall(sent)
        assert reply(peer) in (0, ABORTED)
    require_alive(service, tmp_path)


def test_a_truncated_data_set_and_an_aborted_association(service: RunningService, tmp_path: Path) -> None:
    data = written(image("MR", 2))
    body = data[data.index(b"\x08\0\x16\0UI") :]
    before = status(service)
    with connect(service, association_request()) as peer:
        assert reply(peer) == ACCEPTED
        peer.sendall(fragment(3, store_command()) + fragment(2, body[:-100]))
        assert reply(peer) == DATA
        for command in (fragment(3, store_command()), fragment(3, store_command()) + fragment(0, body[:300])):
            with connect(service, association_request()) as other:  # gone in the middle of a message
                assert reply(other) == ACCEPTED
                other.sendall(command)
                other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_until(lambda: status(service)["associations"] == 0)
    assert status(service)["objects_refused"] == before["objects_refused"] + 1
    assert not list((service.state / "dicom" / "inbox").glob("*.part"))
    require_alive(service, tmp_path)


def test_a_hundred_idle_associations_leave_room(service: RunningService, tmp_path: Path) -> None:
    with Pulse(service.url) as pulse, ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(connect(service, association_request()))
        for _ in range(50):
            with suppress(OSError):
                stack.enter_context(connect(service))
        time.sleep(2)
        began = time.monotonic()
        require_alive(service, tmp_path)
        taken = time.monotonic() - began
        assert status(service)["associations"] <= 16
    assert taken < 15
    assert pulse.slowest < 2, pulse.slowest
    wait_until(lambda: status(service)["associations"] == 0, 30)


def test_an_endless_object_is_refused_and_http_stays_responsive(service: RunningService, tmp_path: Path) -> None:
    with Pulse(service.url) as pulse, connect(service, association_request()) as peer:
        assert reply(peer) == ACCEPTED
        peer.sendall(fragment(3, store_command()))
        for _ in range(600):  # 60 MB
            peer.sendall(fragment(0, b"x" * 100_000))
        peer.sendall(fragment(2, b""))
        assert reply(peer) == DATA
    assert pulse.slowest < 2, pulse.slowest
    require_alive(service, tmp_path)


def test_kill_while_200_objects_come_in_loses_none(pool: Path, tmp_path: Path) -> None:
    objects = [mr_image(number) for number in range(200)]
    hashes = [each.pixels_sha256 for each in read_uploads(map(written, objects), Limits())]
    left, kills = list(objects), 0
    while left:
        with start(pool, tmp_path) as service:
            if kills < 2:
                threading.Timer(0.5 + 0.3 * kills, os.kill, (service.process.pid, signal.SIGKILL)).start()
            left = send_until_it_dies(service, left)
            kills += 1
    with start(pool, tmp_path) as service:
        wait_until(lambda: not status(service)["objects_waiting"], 60)
    log = service.log.read_text()
    assert kills > 1
    assert [number for number, each in enumerate(hashes) if each not in log] == []
    assert not list((tmp_path / "state" / "dicom" / "refused").iterdir())


def send_until_it_dies(service: RunningService, objects: list[Dataset]) -> list[Dataset]:
    """Send over one association; what had no success must be sent again."""
    entity = AE("SCANNER")
    entity.add_requested_context(objects[0].SOPClassUID, objects[0].file_meta.TransferSyntaxUID)
    association = entity.associate("127.0.0.1", port_of(service), ae_title="MERGESTREAM")
    left = list(objects)
    with suppress(RuntimeError, ConnectionError):
        while left and association.is_established:
            answered = association.send_c_store(left[0])
            if "Status" not in answered or answered.Status != 0:
                break
            left.pop(0)
            time.sleep(0.004)
    association.release() if association.is_established else association.abort()
    return left


ORTHANC = shutil.which("Orthanc", path="/usr/sbin:/usr/bin")
PLUGINS = Path("/usr/share/orthanc/plugins")


@pytest.mark.skipif(ORTHANC is None or not PLUGINS.exists(), reason="orthanc and orthanc-dicomweb are not installed")
def test_a_study_is_pulled_from_orthanc(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    settings = {
        "StorageDirectory": str(tmp_path / "db"), "IndexDirectory": str(tmp_path / "db"), "HttpPort": port,
        "DicomServerEnabled": False, "AuthenticationEnabled": False, "Plugins": [str(PLUGINS)],
        "DicomWeb": {"Enable": True},
    }  # fmt: skip
    (tmp_path / "orthanc.json").write_text(json.dumps(settings))
    objects = [image(modality, number) for number, modality in enumerate(("CT", "MR", "US"))]
    with subprocess.Popen(
        [str(ORTHANC), str(tmp_path / "orthanc.json")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as orthanc:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: not socket.socket().connect_ex(("127.0.0.1", port)), 60)
            for each in objects:
                assert httpx.post(f"{url}/instances", content=written(each), timeout=60).status_code == 200
            sources = {"archive": {"url": f"{url}/dicom-web"}}
            chosen = rules({"stream": "ward", "calling": "archive", "modality": ["CT", "MR"]}, sources=sources)
            with Node(tmp_path / "node", chosen, receives=False) as node:
                stored = pull_study(
                    node.node.rules.sources["archive"], objects[0].StudyInstanceUID, node.node.reception
                )
                assert sorted(each.status.code for each in stored) == [0, 0, 0xC001]
                wait_until(lambda: node.status()["objects_answered"] == 2, 30)
                with pytest.raises(SourceError):
                    pull_study(node.node.rules.sources["archive"], "1.2.3", node.node.reception)
        finally:
            orthanc.terminate()
    answered = {result.images[0].picture.pixels_sha256 for result in node.results}
    assert answered == {each.pixels_sha256 for each in read_uploads(map(written, objects[:2]), Limits())}
