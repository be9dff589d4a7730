"""The DICOM node: senders, rules, statuses, series, repeated objects, restarts."""

import os
import socket
import struct
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pydicom
import pytest
from pydicom.uid import (
    CTImageStorage,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    MRImageStorage,
    RawDataStorage,
    generate_uid,
)
from pynetdicom import AE
from pynetdicom.sop_class import Verification

from dicom_nodes import Node, mr_image, rules, send, wait_until
from dicoms import SECRET, written
from mergestream.runtime.errors import InputError, OutputError
from mergestream.serving.dicom_network import association, inbox_worker
from mergestream.serving.dicom_network.inbox import Inbox, read_file_meta, read_received
from mergestream.serving.dicom_network.results import UnitResult
from mergestream.serving.dicom_network.routing_header import WINDOW
from mergestream.serving.dicom_network.rules import parse_rules, read_rules

SERIES = {"stream": "ward", "answer": "series", "idle_seconds": 0.4}
STUDY = {"stream": "ward", "answer": "study", "idle_seconds": 1.0}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = replace(inbox_worker.PACE, batch_seconds=0.05, look_seconds=0.05, retry_seconds=0.05)
    monkeypatch.setattr(inbox_worker, "PACE", quick)


@pytest.fixture
def flushes(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When the whole inbox was flushed."""
    times, real = list[float](), Inbox.flush

    def flush(self: Inbox) -> None:
        real(self)
        times.append(time.monotonic())

    monkeypatch.setattr(Inbox, "flush", flush)
    return times


def open_association(node: Node, sent: pydicom.Dataset) -> Any:
    entity = AE("SCANNER")
    entity.add_requested_context(sent.SOPClassUID, sent.file_meta.TransferSyntaxUID)
    association = entity.associate("127.0.0.1", node.port, ae_title="TESTNODE")
    assert association.send_c_store(sent).Status == 0
    return association


def test_objects_are_flushed_before_a_release_is_confirmed(
    tmp_path: Path, flushes: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(association, "UNFLUSHED_SECONDS", 60.0)
    with Node(tmp_path, rules(flush="association")) as node:
        opened = open_association(node, mr_image(1))
        assert not flushes
        opened.release()
        assert len(flushes) == 1


def test_objects_of_an_association_that_stays_open_are_flushed_soon(tmp_path: Path, flushes: list[float]) -> None:
    with Node(tmp_path, rules(flush="association")) as node:
        opened, began = open_association(node, mr_image(1)), time.monotonic()
        wait_until(lambda: flushes)
        assert flushes[0] - began < 5
        assert opened.send_c_store(mr_image(2)).Status == 0
        opened.release()
        assert len(flushes) == 2


def test_each_object_is_flushed_before_its_status_unless_the_rules_say_otherwise(
    tmp_path: Path, flushes: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, real = list[str](), os.fsync

    def fsync(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        real(handle)

    with Node(tmp_path) as node:
        monkeypatch.setattr(os, "fsync", fsync)
        opened = open_association(node, mr_image(1))
        assert [name.endswith(".dcm") or name == "inbox" for name in synced[:2]] == [True, True]
        opened.release()
    assert not flushes


@pytest.mark.parametrize("size", [16, WINDOW + 5])
def test_an_object_is_stored_whole_and_twice_at_a_time_is_one_file(tmp_path: Path, size: int) -> None:
    inbox = Inbox(tmp_path, 1 << 30, 10)
    image = mr_image(1)
    image.PixelData = bytes(range(256)) * (size // 256 + 1)
    data = written(image)
    meta, start = read_file_meta(data)
    arriving = [inbox.new_file(meta[0x0010], meta[0x0002], meta[0x0003], "SCANNER") for _ in range(3)]
    for each in arriving:
        for place in range(start, len(data), 100_000):
            each.write(data[place : place + 100_000])
    assert len([*inbox.folder.glob("*.part")]) == (3 if size > WINDOW else 0)
    arriving[2].discard()
    for each in arriving[:2]:  # both before one of them is listed
        each.keep(None)
        assert each.received().file.read_bytes()[-100:] == data[-100:]
    (stored,) = inbox.folder.iterdir()
    assert read_received(stored).size == stored.stat().st_size
    inbox.close()


def files(folder: Path, kind: str = "inbox") -> list[Path]:
    return sorted((folder / kind).glob("*.dcm"))


def test_an_object_is_answered_delivered_and_removed(tmp_path: Path) -> None:
    sent = mr_image(1)
    with Node(tmp_path) as node:
        assert [status.Status for status in send(node.port, sent)] == [0]
        wait_until(lambda: node.status()["objects_answered"])
        assert not files(tmp_path)
        status = node.status()
    (result,) = node.results
    (image,) = result.images
    assert result.summary is None
    assert result.send_to is None
    assert node.batches[0][0] == "ward"
    assert image.picture is node.batches[0][1][0]
    assert image.picture.source is not None
    assert image.picture.source.sop_instance_uid == sent.SOPInstanceUID
    assert image.picture.pixels[0].tobytes() == node.batches[0][1][0].pixels[0].tobytes()
    assert (status["objects_received"], status["objects_answered"], status["objects_waiting"]) == (1, 1, 0)
    assert SECRET not in str(status)


def test_the_file_is_a_dicom_file_with_the_data_set_as_sent(tmp_path: Path) -> None:
    seen: list[tuple[bytes, pydicom.Dataset]] = []

    def look(result: UnitResult) -> None:
        file = result.images[0].file
        seen.append((file.read_bytes(), pydicom.dcmread(file)))

    sent = {syntax: mr_image(2) for syntax in (ImplicitVRLittleEndian, ExplicitVRBigEndian)}
    for syntax, each in sent.items():
        each.file_meta.TransferSyntaxUID = syntax
        each.ReferencedImageSequence = [pydicom.Dataset()]
    with Node(tmp_path, delivery=look) as node:
        assert [status.Status for status in send(node.port, *sent.values())] == [0, 0]
        wait_until(lambda: len(seen) == 2)
    for data, read in seen:
        assert read.file_meta.SourceApplicationEntityTitle == "SCANNER"
        expected = sent[read.file_meta.TransferSyntaxUID]
        assert {each.tag: each.value for each in read} == {each.tag: each.value for each in expected}
        assert data[:132] == bytes(128) + b"DICM"


def test_echo_and_wrong_titles(tmp_path: Path) -> None:
    with Node(tmp_path, rules(callers=["SCANNER"])) as node:
        entity = AE("SCANNER")
        entity.add_requested_context(Verification)
        entity.add_requested_context(RawDataStorage)
        association = entity.associate("127.0.0.1", node.port, ae_title="TESTNODE")
        assert association.send_c_echo().Status == 0
        assert [each.abstract_syntax for each in association.rejected_contexts] == [RawDataStorage]
        association.release()
        for calling, called in (("STRANGER", "TESTNODE"), ("SCANNER", "OTHERNODE")):
            with pytest.raises(ConnectionError):
                send(node.port, mr_image(), calling=calling, called=called)
        assert node.status()["associations_rejected"] == 2


def test_an_object_without_a_rule_is_refused_with_a_comment(tmp_path: Path) -> None:
    with Node(tmp_path, rules({"stream": "ward", "modality": "CT"})) as node:
        (status,) = send(node.port, mr_image())
        assert status.Status == 0xC001
        assert status.ErrorComment == "No rule for modality MR, body part HEAD"
        (status,) = send(node.port, mr_image(Modality="CT", SOPClassUID=CTImageStorage))
        assert status.Status == 0
        assert node.status()["objects_refused"] == 1


def test_the_first_rule_that_fits_routes(tmp_path: Path) -> None:
    chosen = rules(
        {"stream": "heads", "calling": "Other", "send_to": "pacs"},
        {"stream": "chests", "body_part": ["chest", "THORAX"], "view": "PA"},
        {"stream": "rest"},
    )
    with Node(tmp_path, chosen) as node:
        send(node.port, mr_image(1), mr_image(2, BodyPartExamined="CHEST", ViewPosition="PA"))
        send(node.port, mr_image(3), calling="Other")
        wait_until(lambda: len(node.results) == 3)
    assert sorted(stream for stream, _ in node.batches) == ["chests", "heads", "rest"]
    assert [result.send_to for result in node.results].count(("pacs",)) == 1


def test_a_series_is_answered_when_no_more_of_it_comes(tmp_path: Path) -> None:
    chosen = rules({**SERIES, "series": "worst", "worst_class": "benign"})
    with Node(tmp_path, chosen) as node:
        send(node.port, *map(mr_image, range(3)), mr_image(4, SeriesInstanceUID=generate_uid()))
        assert not node.results
        wait_until(lambda: len(node.results) == 2)
    three, one = sorted(node.results, key=lambda result: -len(result.images))
    assert (len(three.images), len(one.images)) == (3, 1)
    assert three.summary is not None
    assert three.summary.how == "worst"
    assert three.summary.probabilities == pytest.approx((0.3, 0.7))
    assert [image.row for image in three.images] == [0, 1, 2]


def test_a_study_is_answered_when_no_more_of_it_comes(tmp_path: Path) -> None:
    chosen = rules({**STUDY, "study": "worst", "worst_class": "benign"})
    first, second, other = generate_uid(), generate_uid(), generate_uid()
    with Node(tmp_path, chosen) as node:
        send(node.port, mr_image(1, SeriesInstanceUID=first), mr_image(2, SeriesInstanceUID=second))
        time.sleep(0.5)  # another object of it within the idle time: the study goes on
        send(node.port, mr_image(3, SeriesInstanceUID=second), mr_image(4, StudyInstanceUID=other))
        assert not node.results
        wait_until(lambda: len(node.results) == 2)
    three, one = sorted(node.results, key=lambda result: -len(result.images))
    assert (len(three.images), len(one.images)) == (3, 1)
    series = [image.picture.source.series_uid for image in three.images if image.picture.source]
    assert series == [first, second, second]
    assert three.summary is not None
    assert (three.summary.unit, three.summary.how) == ("study", "worst")
    assert three.summary.probabilities == pytest.approx((0.3, 0.7))


def test_the_mean_of_a_study(tmp_path: Path) -> None:
    with Node(tmp_path, rules(STUDY)) as node:
        send(node.port, *(mr_image(number, SeriesInstanceUID=generate_uid()) for number in range(3)))
        wait_until(lambda: node.results)
    summary = node.results[0].summary
    assert summary is not None
    assert (summary.unit, summary.how, summary.prediction) == ("study", "mean", "malignant, naïve µ")
    assert summary.probabilities == pytest.approx((0.2, 0.8))


def test_a_study_is_answered_as_a_whole_after_one_of_its_objects_failed(tmp_path: Path) -> None:
    failures = [True]

    def fail_once(_: Any) -> None:
        if failures and failures.pop():
            raise TimeoutError

    with Node(tmp_path, rules(STUDY)) as node:
        node.refuse = fail_once
        send(node.port, *(mr_image(number, SeriesInstanceUID=generate_uid()) for number in range(3)))
        wait_until(lambda: node.results)
    assert [len(result.images) for result in node.results] == [3]
    assert [len(pictures) for _, pictures in node.batches] == [3]
    assert not files(tmp_path)


def test_the_mean_of_a_series(tmp_path: Path) -> None:
    with Node(tmp_path, rules(SERIES)) as node:
        send(node.port, *map(mr_image, range(3)))
        wait_until(lambda: node.results)
    summary = node.results[0].summary
    assert summary is not None
    assert summary.how == "mean"
    assert summary.probabilities == pytest.approx((0.2, 0.8))
    assert summary.prediction == "malignant, naïve µ"


def test_an_object_sent_twice_is_answered_once(tmp_path: Path) -> None:
    once, changed = mr_image(1), mr_image(1)
    changed.SOPInstanceUID, changed.InstanceNumber = once.SOPInstanceUID, 2
    with Node(tmp_path) as node:
        send(node.port, once, once)
        wait_until(lambda: node.results)
        assert send(node.port, once)[0].Status == 0
    with Node(tmp_path) as again:
        assert [status.Status for status in send(again.port, once, changed)] == [0, 0]
        wait_until(lambda: again.results)
    assert len(node.results) == 1
    assert len(again.results) == 1


def test_an_answered_object_is_neither_stored_nor_answered_again(tmp_path: Path) -> None:
    def fail(_: UnitResult) -> None:
        raise OutputError("The disk is full.")

    once, other = mr_image(1), mr_image(2)
    with Node(tmp_path, delivery=fail) as node:
        send(node.port, once, other)
        wait_until(lambda: node.batches)
    answered, _ = files(tmp_path)
    (tmp_path / "answered.txt").write_text(f"{answered.stem}\ncut off")  # by a process that was killed just then
    with Node(tmp_path) as again:
        wait_until(lambda: again.results and not files(tmp_path))
        assert len(again.results) == 1
    with Node(tmp_path, rules({**SERIES, "idle_seconds": 60})) as third:
        send(third.port, once, other)
        assert not files(tmp_path)
    assert len((tmp_path / "answered.txt").read_text().split()) == 2


def test_a_restart_answers_what_was_left(tmp_path: Path) -> None:
    def fail(_: UnitResult) -> None:
        raise OutputError("The disk is full.")

    with Node(tmp_path, delivery=fail) as node:
        send(node.port, mr_image(1), mr_image(2))
        wait_until(lambda: len(node.batches))
    (tmp_path / "inbox" / "0123.part").write_bytes(b"half an object")
    waiting = files(tmp_path)
    assert len(waiting) == 2
    waiting[0].write_bytes(waiting[0].read_bytes()[:-5])  # as a power cut may leave it: no sender relies on it
    with Node(tmp_path) as again:
        wait_until(lambda: again.results)
        wait_until(lambda: not list((tmp_path / "inbox").iterdir()))
    assert len(again.results) == 1


def test_an_object_that_cannot_be_decoded_does_not_block_others(tmp_path: Path) -> None:
    bad = mr_image(1)
    bad.Rows = 17
    with Node(tmp_path) as node:
        assert [status.Status for status in send(node.port, bad, mr_image(2))] == [0, 0]
        wait_until(lambda: node.results and files(tmp_path, "refused"))
        assert node.status()["objects_unanswerable"] == 1
    reason = (tmp_path / "refused").glob("*.reason.json")
    assert '"code": "damaged"' in next(reason).read_text()


def test_an_object_that_the_model_cannot_take_is_refused_alone(tmp_path: Path) -> None:
    def refuse(pictures: Any) -> None:
        if any(picture.pixels[0, 0, 0] == first for picture in pictures):
            raise InputError("no")

    objects = [mr_image(number) for number in range(3)]
    first = objects[1].PixelData[0]
    with Node(tmp_path, rules(SERIES)) as node:
        node.refuse = refuse
        send(node.port, *objects)
        wait_until(lambda: node.results)
    assert len(node.results[0].images) == 2
    assert len(files(tmp_path, "refused")) == 1


def test_a_full_inbox_and_a_large_object_are_out_of_resources(tmp_path: Path) -> None:
    chosen = rules({**SERIES, "idle_seconds": 60}, limits={"inbox_objects": 1, "object_mib": 1})
    large = mr_image(2)
    large.add_new(0x00091001, "OB", bytes(1 << 20))
    with Node(tmp_path, chosen) as node:
        statuses = send(node.port, large, mr_image(1), mr_image(3))
        assert [status.Status for status in statuses] == [0xA700, 0, 0xA700]
        assert "larger" in statuses[0].ErrorComment
        assert "full" in statuses[2].ErrorComment
    assert len(files(tmp_path)) == 1
    assert not list((tmp_path / "inbox").glob("*.part"))


def test_a_second_process_cannot_use_the_inbox(tmp_path: Path) -> None:
    first = Inbox(tmp_path, 1, 1)
    with pytest.raises(OutputError, match="another mergestream process"):
        Inbox(tmp_path, 1, 1)
    first.close()


def test_a_data_set_that_is_cut_off_or_not_the_announced_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pynetdicom._config.STORE_SEND_CHUNKED_DATASET", True)  # sends the bytes as they are
    image, entity = mr_image(), AE("SCANNER")
    entity.add_requested_context(MRImageStorage, ExplicitVRLittleEndian)
    data, uid = written(image), image.SOPInstanceUID.encode()
    mixed = data.replace(uid, uid[:-1] + bytes([uid[-1] ^ 1]), 1)  # in the file meta information only
    with Node(tmp_path / "node") as node:
        association = entity.associate("127.0.0.1", node.port, ae_title="TESTNODE")
        for number, (sent, status) in enumerate(
            [(data[:-20], 0xC000), (data[:400], 0xC000), (mixed, 0xA900), (data, 0)]
        ):
            file = tmp_path / f"{number}.dcm"
            file.write_bytes(sent)
            assert association.send_c_store(file).Status == status, number
        association.release()


HOSTILE = {
    "a web request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a huge association request": struct.pack(">BxI", 1, 0xFFFFFFF0),
    "a damaged association request": struct.pack(">BxI", 1, 80) + b"\xff" * 80,
    "data before an association": struct.pack(">BxI", 4, 6) + bytes(6),
    "nothing": b"",
}


@pytest.mark.parametrize("sent", HOSTILE.values(), ids=HOSTILE)
def test_nonsense_ends_its_connection_only(tmp_path: Path, sent: bytes) -> None:
    with Node(tmp_path) as node:
        with socket.create_connection(("127.0.0.1", node.port), timeout=5) as hostile:
            hostile.sendall(sent)
            hostile.shutdown(socket.SHUT_WR)
            received = b""
            with suppress(ConnectionResetError):
                while part := hostile.recv(100):
                    received += part
        assert received[:1] in (b"", b"\x07")  # closed, or aborted
        assert send(node.port, mr_image())[0].Status == 0
        assert not node.node.failed


def test_idle_associations_give_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mergestream.serving.dicom_network.acceptor.GIVES_WAY_SECONDS", 0.0)
    with Node(tmp_path, rules(limits={"associations": 2})) as node:
        entity = AE("SCANNER")
        entity.add_requested_context(Verification)
        idle = [entity.associate("127.0.0.1", node.port, ae_title="TESTNODE") for _ in range(3)]
        assert idle[2].is_established
        assert send(node.port, mr_image())[0].Status == 0
        assert node.status()["associations"] <= 2
        for each in idle:
            each.abort()


BAD_RULES: dict[str, Any] = {
    "the file has entries": [],
    "'rules' is a list": {"rules": []},
    "no entry of the file called 'rulez'. Did you mean 'rules'": {"rulez": [], "rules": [{"stream": "a"}]},
    "In rule 1: 'stream' is missing": {"rules": [{}]},
    "In rule 2: There is no entry of a rule called 'modalities'": {
        "rules": [{"stream": "a"}, {"stream": "a", "modalities": ["CT"]}]
    },
    "In rule 1: A stream's name": {"rules": [{"stream": "Ward 1"}]},
    "'view' is a text or a list of texts; put numbers": {"rules": [{"stream": "a", "view": False}]},
    "'patient' is not a choice for 'answer'": {"rules": [{"stream": "a", "answer": "patient"}]},
    "'idle_seconds' needs 'answer: series' or 'answer: study'": {"rules": [{"stream": "a", "idle_seconds": 5}]},
    "'series: worst' and 'worst_class'": {"rules": [{"stream": "a", "answer": "series", "series": "worst"}]},
    "'study: worst' and 'worst_class'": {"rules": [{"stream": "a", "answer": "study", "study": "worst"}]},
    "'best' is not a choice for 'study'": {"rules": [{"stream": "a", "answer": "study", "study": "best"}]},
    "'series' needs 'answer: series'": {"rules": [{"stream": "a", "answer": "study", "series": "mean"}]},
    "'study' needs 'answer: study'": {"rules": [{"stream": "a", "answer": "series", "study": "mean"}]},
    "'idle_seconds' is a finite number above 0|of at most 3600": {
        "rules": [{"stream": "a", "answer": "series", "idle_seconds": -1}]
    },
    "1 to 16 printable ASCII": {"rules": [{"stream": "a"}], "callers": ["A" * 17]},
    "In the source 'x': 'url' begins": {"rules": [{"stream": "a"}], "sources": {"x": {"url": "file:///etc/passwd"}}},
    "no entry of 'limits' called 'pdu'": {"rules": [{"stream": "a"}], "limits": {"pdu": 1}},
    "'associations' is a whole number": {"rules": [{"stream": "a"}], "limits": {"associations": 0}},
}


@pytest.mark.parametrize("sentence", BAD_RULES)
def test_bad_rules_are_refused_with_a_sentence(sentence: str) -> None:
    with pytest.raises(InputError, match=sentence.replace("?", r"\?")):
        parse_rules(BAD_RULES[sentence], Path())


def test_a_rules_file_that_is_no_yaml(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("rules: [")
    with pytest.raises(InputError, match="cannot be read"):
        read_rules(tmp_path / "rules.yaml")
    with pytest.raises(InputError, match="cannot be read"):
        read_rules(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"rules: [{{stream: a}}]\n#{'x' * (1 << 20)}", "it has more than 1,048,576 bytes"),
        ("rules: [{stream: a}]\nflush: 2026-13-41", "month must be in 1..12"),
        ("[" * 5000, "recursion"),
        ("rules: \udcff", "codec"),
    ],
)
def test_a_rules_file_that_is_too_large_or_damaged(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "rules.yaml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=f"rules.yaml cannot be read: .*{reason}"):
        read_rules(tmp_path / "rules.yaml")


def test_a_token_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    text = "rules: [{stream: a}]\nsources: {archive: {url: 'https://pacs/', token_file: token}}"
    (tmp_path / "rules.yaml").write_text(text)
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(InputError, match=r"In the source 'archive': .*Others may read 'token_file'"):
        read_rules(tmp_path / "rules.yaml")
    (tmp_path / "token").chmod(0o600)
    assert read_rules(tmp_path / "rules.yaml").sources["archive"].token_file == tmp_path / "token"
    (tmp_path / "token").unlink()
    with pytest.raises(InputError, match="token cannot be read"):
        read_rules(tmp_path / "rules.yaml")


def test_a_rule_for_a_class_that_the_pool_lacks(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'ward': There is no class called 'bad'"):
        Node(tmp_path, rules({**SERIES, "series": "worst", "worst_class": "bad"}))


def test_every_cut_of_an_object_is_refused_or_read(tmp_path: Path) -> None:
    with Node(tmp_path, rules({**SERIES, "idle_seconds": 60})) as node:
        send(node.port, mr_image())
    (file,) = files(tmp_path)
    data = file.read_bytes()
    assert read_received(file).header.modality == "MR"
    for length in range(0, len(data), 40):
        file.write_bytes(data[:length])
        with pytest.raises(ValueError):  # noqa: PT011 whatever is missing
            read_received(file)
