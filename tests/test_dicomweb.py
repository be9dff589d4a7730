"""STOW-RS into the node of a service, its status and metrics, and pulls that are refused."""

import io
from collections.abc import Iterator
from pathlib import Path

import httpx
import pydicom
import pytest
from dicomweb_client import DICOMwebClient
from pydicom.uid import RawDataStorage

from benching import pool_on_disk
from dicom_nodes import mr_image, send, wait_until
from dicoms import SECRET, written
from mergestream.runtime.errors import InputError
from mergestream.serving.dicom_network.node import open_node
from mergestream.serving.options import ServeOptions
from services import LocalService

RULES = """
callers: [SCANNER]
rules:
  - {stream: scanner, calling: SCANNER, modality: MR}
  - {stream: web, calling: STOW-RS, modality: MR}
sources:
  archive: {url: "http://127.0.0.1:9/dicom-web"}
"""
TYPE = 'multipart/related; type="application/dicom"; boundary=cut'


pool = pool_on_disk


@pytest.fixture(scope="module")
def service(pool: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    folder = tmp_path_factory.mktemp("service")
    (folder / "rules.yaml").write_text(RULES)
    options = {"dicom_port": 0, "ae_title": "TESTNODE", "dicom_rules": folder / "rules.yaml"}
    with LocalService(pool, folder / "state", **options) as running:
        yield running


def related(*files: bytes) -> bytes:
    parts = (b"--cut\r\nContent-Type: application/dicom\r\n\r\n" + file + b"\r\n" for file in files)
    return b"".join(parts) + b"--cut--\r\n"


def steps(service: LocalService, stream: str) -> int:
    return sum(line["body"]["stream"] == stream for line in service.lines("step"))


def test_objects_of_both_doors_are_answered_and_nothing_names_the_patient(service: LocalService) -> None:
    with service.client() as client:
        port = client.get("/v1/dicom").json()["port"]
        image = pydicom.dcmread(io.BytesIO(written(mr_image(1))))
        stored = DICOMwebClient(f"{service.url}/dicomweb").store_instances([image])
        assert len(stored.ReferencedSOPSequence) == 1
        assert send(port, mr_image(2))[0].Status == 0
        wait_until(lambda: steps(service, "web") and steps(service, "scanner"))
        wait_until(lambda: client.get("/v1/dicom").json()["objects_answered"] == 2)
        metrics = client.get("/metrics").text
        assert "mergestream_dicom_objects_answered 2.0" in metrics
        assert client.get("/readyz").status_code == 200
        everything = metrics + client.get("/v1/dicom").text + client.get("/v1/overview").text
    assert SECRET not in everything + service.words() + service.log.read_text()


def test_the_response_says_what_was_refused_and_why(service: LocalService) -> None:
    good, wrong = mr_image(3), mr_image(4, Modality="CT")
    raw = written(mr_image(5, SOPClassUID=RawDataStorage))
    with service.client(headers={"Content-Type": TYPE}) as client:
        answer = client.post("/dicomweb/studies", content=related(written(good), written(wrong), b"nonsense", raw))
        assert answer.status_code == 202
        assert answer.headers["content-type"] == "application/dicom+json"
        failed = answer.json()["00081198"]["Value"]
        assert [item["00081197"]["Value"][0] for item in failed] == [0xC001, 0xC000, 0x0122]
        assert failed[0]["00081155"]["Value"] == [wrong.SOPInstanceUID]
        assert answer.json()["00081199"]["Value"][0]["00081155"]["Value"] == [good.SOPInstanceUID]
        assert client.post("/dicomweb/studies", content=related(written(wrong))).status_code == 409


def test_bodies_that_are_no_multipart_are_problems(service: LocalService) -> None:
    with service.client() as client:
        for kind, body, code in (
            ("application/dicom", b"x", "unsupported_media_type"),
            ('multipart/related; type="application/dicom+json"; boundary=cut', b"x", "unsupported_media_type"),
            (TYPE, related(b"x")[:-12], "malformed_multipart"),
            (TYPE.replace("; boundary=cut", ""), b"x", "malformed_multipart"),
        ):
            answer = client.post("/dicomweb/studies", content=body, headers={"Content-Type": kind})
            assert (answer.json()["code"], code in answer.text) == (code, True)


def test_only_sources_of_the_rules_file_are_asked(service: LocalService) -> None:
    def pull(client: httpx.Client, **asked: str) -> str:
        return str(client.post("/v1/dicom/pull", json=asked).json()["code"])

    with service.client() as client:
        assert pull(client, source="http://127.0.0.1", study="1.2") == "unknown_source"
        assert pull(client, source="archive", study="../x") == "invalid_request"
        assert pull(client, source="archive", study="1.2", url="http://127.0.0.1") == "invalid_request"
        assert pull(client, source="archive", study="1.2") == "source_failed"
    assert [line["body"]["change"] for line in service.lines("change_asked")] == ["pull_study"]


def test_a_node_that_failed_is_not_ready_and_http_goes_on(pool: Path, tmp_path: Path) -> None:
    with (
        LocalService(pool, tmp_path, dicom_port=0) as running,
        running.client() as client,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setattr("mergestream.serving.dicom_network.inbox_worker.InboxWorker.failed", True)
        assert client.get("/readyz").json()["code"] == "node_failed"
        assert client.get("/v1/dicom").json()["failed"] is True
        assert client.get("/v1/streams").status_code == 200


def test_without_a_node_there_is_nothing_to_show(pool: Path, tmp_path: Path) -> None:
    with LocalService(pool, tmp_path) as running, running.client() as client:
        assert client.get("/v1/dicom").json()["code"] == "no_node"
        answer = client.post("/dicomweb/studies", content=related(b"x"), headers={"Content-Type": TYPE})
        assert answer.json()["code"] == "no_node"


def test_options_that_are_unsafe_or_wrong_are_refused(pool: Path, tmp_path: Path) -> None:
    for options, sentence in (
        ({"dicom_host": "0.0.0.0"}, "Everyone who can reach 0.0.0.0"),
        ({"ae_title": "A" * 17}, "1 to 16 printable"),
        ({"dicom_tls_cert": tmp_path / "cert.pem"}, "takes both"),
        ({"dicom_tls_ca": tmp_path / "ca.pem"}, "takes both"),
        ({"dicom_rules": tmp_path / "none.yaml"}, "cannot be read"),
    ):
        with pytest.raises(InputError, match=sentence):
            open_node(ServeOptions(pool, state=tmp_path, dicom_port=0, **options))  # type: ignore[arg-type]
    assert open_node(ServeOptions(pool, state=tmp_path)) is None
