"""The whole way with a real Orthanc: storescu -> Orthanc -> mergestream -> reports in Orthanc, also across kill -9."""

import io
import json
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pydicom
import pytest
from highdicom import sr
from pydicom.uid import generate_uid

from dicoms import SECRET, dataset, written
from services import RunningService
from test_service import pool_on_disk

PROGRAMS = ("Orthanc", "storescu", "dcmcrle", "dcmcjpeg", "dcmcjpls", "dciodvfy")
MISSING = [name for name in PROGRAMS if shutil.which(name, path="/usr/sbin:/usr/bin:/usr/local/bin") is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"scripts/install_service_tools.sh installs {', '.join(MISSING)}"),
]
PLUGINS = Path("/usr/share/orthanc/plugins")
CLASSES = {
    "CT": "1.2.840.10008.5.1.4.1.1.2",
    "CR": "1.2.840.10008.5.1.4.1.1.1",
    "MG": "1.2.840.10008.5.1.4.1.1.1.2",
    "US": "1.2.840.10008.5.1.4.1.1.6.1",
}
# Program that compresses, and the option of storescu that proposes the result.
SYNTAXES = {
    "plain": ("", "-xe"),
    "rle": ("dcmcrle", "-xr"),
    "jpeg": ("dcmcjpeg", "-xs"),
    "jpeg-ls": ("dcmcjpls", "-xt"),
}
ROUTE = """
function OnStoredInstance(instanceId, tags, metadata, origin)
  if tags['Modality'] ~= 'SR' then SendToModality(instanceId, 'mergestream') end
end
"""
STATELESS = ("--method", "mean", "--single-image-answers")  # so that the API gives the same numbers afterwards


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_for(value: Callable[[], Any], seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while not (result := value()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return result


def image(number: int, modality: str) -> bytes:
    """A small image of a modality, with a patient who must turn up nowhere but in DICOM objects."""
    random = np.random.default_rng(number)
    pixels = {
        "CT": random.integers(-1000, 1000, (32, 32), dtype=np.int16),
        "CR": random.integers(0, 256, (32, 32), dtype=np.uint8),
        "MG": random.integers(0, 4096, (32, 32), dtype=np.uint16),
        "US": random.integers(0, 256, (32, 32, 3), dtype=np.uint8),
    }[modality]
    uids = {"SOPClassUID": CLASSES[modality], "SOPInstanceUID": generate_uid()}
    uids |= {"StudyInstanceUID": generate_uid(), "SeriesInstanceUID": generate_uid()}
    about = {"Modality": modality, "StudyDate": "20260102", "StudyTime": "101112", "PatientSex": "F", "StudyID": "S1"}
    about |= {
        "AccessionNumber": f"{SECRET}-{number}",
        "PatientBirthDate": "19500101",
        "ReferringPhysicianName": f"{SECRET}^R",
    }
    return written(dataset(pixels, **uids, **about))


class Orthanc:
    """A server of its own, with free ports; `with` ends it."""

    def __init__(self, folder: Path, node_port: int, *, route: bool, password: str | None = None) -> None:
        """`password` of the user 'archive'; None: anyone may ask."""
        self.port, http = free_port(), free_port()
        folder.mkdir()
        (folder / "route.lua").write_text(ROUTE if route else "")
        settings = {
            "StorageDirectory": str(folder / "db"), "IndexDirectory": str(folder / "db"), "HttpPort": http,
            "DicomPort": self.port, "DicomAet": "ORTHANC", "RemoteAccessAllowed": False, "LuaScripts": ["route.lua"],
            "AuthenticationEnabled": password is not None, "RegisteredUsers": {"archive": password or ""},
            "DicomModalities": {"mergestream": ["MERGESTREAM", "127.0.0.1", node_port]},
            "DicomAlwaysAllowStore": True, "StableAge": 1, "Plugins": [str(PLUGINS)], "DicomWeb": {"Enable": True},
            "OverwriteInstances": False,
        }  # fmt: skip
        (folder / "orthanc.json").write_text(json.dumps(settings))
        self._log = (folder / "log").open("w")
        line = [shutil.which("Orthanc", path="/usr/sbin:/usr/bin") or "Orthanc", str(folder / "orthanc.json")]
        self.process = subprocess.Popen(line, stdout=self._log, stderr=subprocess.STDOUT)
        self.url = f"http://127.0.0.1:{http}"
        self.client = httpx.Client(base_url=self.url, timeout=60, auth=password and ("archive", password))
        wait_for(self._answers)

    def _answers(self) -> bool:
        try:
            return self.client.get("/system").status_code == 200
        except httpx.HTTPError:
            return False

    def instances(self, modality: str) -> list[str]:
        query = {"Level": "Instance", "Query": {"Modality": modality}}
        return list(self.client.post("/tools/find", json=query).json())

    def file(self, instance: str) -> bytes:
        return self.client.get(f"/instances/{instance}/file").content

    def __enter__(self) -> "Orthanc":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(30)
        self._log.close()


pool = pool_on_disk


def destinations(folder: Path, orthanc: Orthanc, *, web: bool) -> Path:
    listed = f"  - {{name: pacs, kind: c-store, host: 127.0.0.1, port: {orthanc.port}, ae_title: ORTHANC}}\n"
    listed += f"  - {{name: web, kind: stow-rs, url: '{orthanc.url}/dicom-web'}}\n" if web else ""
    file = folder / "destinations.yaml"
    file.write_text(f"destinations:\n{listed}")
    return file


def sources_of(reports: list[Any]) -> Counter[str]:
    return Counter(uid for report in reports for _, _, uid, _ in report.get_evidence())


def texts_about(service: RunningService) -> Iterator[bytes]:
    """All that the service wrote and shows, but DICOM objects."""
    for file in service.state.rglob("*"):
        objects = {"inbox", "refused", "objects"} & set(file.relative_to(service.state).parts)
        if file.is_file() and not (objects and b"DICM" in file.read_bytes()[:140]):
            yield file.read_bytes()
    with service.client() as client:
        for url in ("/metrics", "/v1/overview", "/v1/outbox", "/v1/streams", "/"):
            yield client.get(url).content
    yield service.words().encode()


def test_sixty_objects_through_orthanc_come_back_as_valid_reports(tmp_path: Path, pool: Path) -> None:
    node_port = free_port()
    with Orthanc(tmp_path / "orthanc", node_port, route=True) as orthanc:
        more = ("--dicom-port", str(node_port), *STATELESS)
        file = destinations(tmp_path, orthanc, web=True)
        with RunningService(pool, tmp_path / "state", *more, "--destinations", str(file)) as service:
            sent = send_by_storescu(tmp_path, orthanc)
            wait_for(lambda: len(orthanc.instances("SR")) >= 60)
            with service.client() as client:
                wait_for(lambda: [d["sent"] for d in client.get("/v1/outbox").json()["destinations"]] == [60, 60])
                files = [orthanc.file(instance) for instance in orthanc.instances("SR")]
                reports = [sr.srread(io.BytesIO(data)) for data in files]
                assert sources_of(reports) == Counter(sent.keys())
                for data, report in zip(files, reports, strict=True):
                    require_valid(tmp_path / "report.dcm", data)
                    ((_, _, uid, _),) = report.get_evidence()
                    require_same_numbers(client, sent[uid], report)
                    require_logged(service, report)
            for text in texts_about(service):
                assert SECRET.encode() not in text
                assert not any(uid.encode() in text for uid in sent)


def send_by_storescu(folder: Path, orthanc: Orthanc) -> dict[str, bytes]:
    """Send 60 objects of four modalities in four transfer syntaxes; by SOP instance UID."""
    sent = {}
    for place, (syntax, (program, option)) in enumerate(SYNTAXES.items()):
        own = folder / syntax
        own.mkdir()
        for number in range(15 * place, 15 * place + 15):
            file = own / f"{number}.dcm"
            file.write_bytes(image(number, [*CLASSES][number % 4]))
            if program:
                subprocess.run([program, *(["+ua"] if program == "dcmcjpeg" else []), str(file), str(file)], check=True)
            sent[str(pydicom.dcmread(file).SOPInstanceUID)] = file.read_bytes()
        to = ["-aec", "ORTHANC", "127.0.0.1", str(orthanc.port)]
        subprocess.run(["storescu", option, "+sd", *to, str(own)], check=True)
    return sent


def require_valid(file: Path, data: bytes) -> None:
    file.write_bytes(data)
    result = subprocess.run(["dciodvfy", str(file)], capture_output=True, text=True)
    assert "Error" not in result.stderr + result.stdout, result.stderr


def require_same_numbers(client: httpx.Client, source: bytes, report: Any) -> None:
    """The report belongs to the image's patient and study, and holds the numbers of the HTTP interface."""
    original = pydicom.dcmread(io.BytesIO(source))
    for keyword in ("PatientName", "PatientID", "PatientBirthDate", "StudyInstanceUID", "StudyDate", "AccessionNumber"):
        assert report.get(keyword) == original.get(keyword)
    answer = client.post("/v1/streams/check/images", files={"images": ("image", source)}).json()
    (group,) = report.content.get_image_measurement_groups()
    assert [each.value for each in group.get_measurements()] == answer["probabilities"][0]
    assert [each.name.meaning for each in group.get_measurements()] == answer["classes"]
    shown = {each.name.value: each.value.meaning for each in group.get_qualitative_evaluations()}
    assert shown["predicted"] == answer["predictions"][0]


def require_logged(service: RunningService, report: Any) -> None:
    """The report names the audit line of its step, which holds the same model."""
    (group,) = report.content.get_image_measurement_groups()
    texts = [each.value for each in group[0].ContentSequence if each.name.meaning == "Algorithm Parameters"]
    about = dict(text.split(": ", 1) for text in texts)
    (name,) = (key for key in about if key.startswith("audit line "))
    line = service.lines()[int(name.split()[-1])]
    assert line["hash"] == about[name]
    assert line["body"]["weights_sha256"] == about["model sha-256"]


def test_kill_9_with_objects_and_reports_on_their_way_loses_none_and_repeats_none(tmp_path: Path, pool: Path) -> None:
    node_port, count = free_port(), 200
    with Orthanc(tmp_path / "orthanc", node_port, route=False) as orthanc:
        more = ("--dicom-port", str(node_port), "--destinations", str(destinations(tmp_path, orthanc, web=False)))
        images = [image(number, "CR") for number in range(count)]
        ids = [orthanc.client.post("/instances", content=each).json()["ID"] for each in images]
        sending = threading.Thread(target=forward, args=(orthanc.url, ids), daemon=True)
        words, kills = [], 0
        service = RunningService(pool, tmp_path / "state", *more)
        sending.start()
        for reports in (5, 40):
            wait_for(lambda least=reports: len(orthanc.instances("SR")) >= least)
            kills += sending.is_alive()
            service.process.send_signal(signal.SIGKILL)
            service.process.wait()
            words.append(service.words())
            service = RunningService(pool, tmp_path / "state", *more)
        with service:
            sending.join(120)
            assert not sending.is_alive()
            wait_for(lambda: len(orthanc.instances("SR")) >= count)
            with service.client() as client:
                wait_for(lambda: client.get("/v1/outbox").json()["destinations"][0]["waiting"] == 0)
            time.sleep(3)  # for a report that would come twice
            files = [orthanc.file(instance) for instance in orthanc.instances("SR")]
            for text in (*texts_about(service), *(text.encode() for text in words)):
                assert SECRET.encode() not in text
    assert kills >= 1  # objects still came in when the service was killed
    assert len(files) == count
    originals = Counter(str(pydicom.dcmread(io.BytesIO(each)).SOPInstanceUID) for each in images)
    assert sources_of([sr.srread(io.BytesIO(data)) for data in files]) == originals


PULL_RULES = """
rules:
  - {{stream: pulled, calling: archive, modality: [CT, CR], answer: study, idle_seconds: 1}}
sources:
  archive: {{url: "{url}/dicom-web", token_file: token}}
  stranger: {{url: "{url}/dicom-web"}}
"""


def test_a_study_is_pulled_over_http_and_its_report_comes_back(tmp_path: Path, pool: Path) -> None:
    """WADO-RS with a password, by the route of the service; the study of two series has one report."""
    study = str(generate_uid())
    objects = [pydicom.dcmread(io.BytesIO(image(number, each))) for number, each in enumerate(("CT", "CT", "CR", "US"))]
    for each in objects:
        each.StudyInstanceUID = study
    with Orthanc(tmp_path / "orthanc", free_port(), route=False, password="geheim") as orthanc:
        for each in objects:
            assert orthanc.client.post("/instances", content=written(each)).status_code == 200
        (tmp_path / "token").write_text("archive:geheim\n")
        (tmp_path / "token").chmod(0o600)
        (tmp_path / "rules.yaml").write_text(PULL_RULES.format(url=orthanc.url))
        sent_to = ("--destinations", str(destinations(tmp_path, orthanc, web=False)))
        with RunningService(
            pool, tmp_path / "state", "--dicom-rules", str(tmp_path / "rules.yaml"), *sent_to, *STATELESS
        ) as service, service.client() as client:  # fmt: skip
            refused = client.post("/v1/dicom/pull", json={"source": "stranger", "study": study}).json()
            assert (refused["code"], refused["detail"]) == (
                "source_failed",
                "The source failed: it answered with HTTP status 401.",
            )
            unknown = client.post("/v1/dicom/pull", json={"source": "archive", "study": "1.2.3"}).json()
            assert (unknown["code"], unknown["detail"]) == ("source_failed", "The source has no such study.")
            pulled = client.post("/v1/dicom/pull", json={"source": "archive", "study": study})
            assert pulled.json() == {"received": 3, "refused": 1}  # no rule for ultrasound
            (instance,) = wait_for(lambda: orthanc.instances("SR"))
            again = client.post("/v1/dicom/pull", json={"source": "archive", "study": study}).json()
            assert again == {"received": 3, "refused": 2}  # no rule for the report, and nothing is answered twice
            time.sleep(3)
            assert orthanc.instances("SR") == [instance]
            assert client.get("/v1/dicom").json()["objects_answered"] == 3
            assert [line["body"]["change"] for line in service.lines("change_asked")] == ["pull_study"] * 4
            for text in texts_about(service):
                assert not any(each.encode() in text for each in (SECRET, study, "geheim"))
        data = orthanc.file(instance)
    require_valid(tmp_path / "report.dcm", data)
    report = sr.srread(io.BytesIO(data))
    assert sources_of([report]) == Counter(str(each.SOPInstanceUID) for each in objects[:3])
    *single, whole = report.content.get_image_measurement_groups()
    rows = [[each.value for each in group.get_measurements()] for group in single]
    assert len(rows) == 3
    mean = [sum(column) / 3 for column in zip(*rows, strict=True)]
    assert [each.value for each in whole.get_measurements()] == pytest.approx(mean)
    shown = {each.name.value: each.value.meaning for each in whole.get_qualitative_evaluations()}
    assert shown["study_answer"] == "Mean over the images of the study"


def forward(url: str, ids: list[str]) -> None:
    """Have Orthanc send one object after the other, each until it is accepted, as an archive's queue does."""
    with httpx.Client(base_url=url, timeout=60) as client:
        for instance in ids:
            while client.post("/modalities/mergestream/store", content=instance).status_code != 200:
                time.sleep(0.2)
            time.sleep(0.1)  # as a scanner does: objects come in while reports go out
