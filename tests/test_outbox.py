"""The outbox of reports: nothing is lost by a kill or a failing destination, nothing is made twice."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest

from dicoms import SECRET, dicom
from mergestream.data.intake.input_files import read_upload
from mergestream.data.intake.limits import Limits
from mergestream.runtime.errors import InputError, OutputError
from mergestream.serving.dicom_network import web_session
from mergestream.serving.dicom_network.results import ImageResult, UnitResult, UnitSummary
from mergestream.serving.monitoring import Metrics
from mergestream.serving.reports import report_sending, senders
from mergestream.serving.reports.destinations import Destination, SendingPlan, read_destinations
from mergestream.serving.reports.outbox import HELD, SENT, WAITING, Outbox
from mergestream.serving.reports.report_delivery import ReportDelivery
from mergestream.serving.reports.report_sending import ReportSending, pause_after
from mergestream.serving.reports.senders import SendOutcome, UnreachableError
from mergestream.serving.reports.shadow_agreement import in_words, shadow_report
from services import ANSWER

PACS = Destination("pacs", "c-store", host="127.0.0.1", port=104, ae_title="PACS")
ARCHIVE = Destination("archive", "stow-rs", url="http://127.0.0.1:1/dicom-web")


def result(folder: Path, number: int = 1, **more: Any) -> UnitResult:
    """A received object in an inbox, with its answer."""
    uid = f"1.2.826.0.1.3680043.8.498.7.{number}"
    file = folder / f"received-{number}"
    file.write_bytes(dicom(np.full((8, 9), number % 251, np.uint8), SOPInstanceUID=uid, AccessionNumber=f"A{number}"))
    (picture,) = read_upload(file.read_bytes(), Limits())
    return UnitResult((ImageResult(file, picture, ANSWER, 0),), **more)


def delivery(sending: ReportSending) -> ReportDelivery:
    return ReportDelivery(sending, Limits(), dict)


class Receiver:
    """Stands for a destination: answers as its list says, then takes everything."""

    def __init__(self, *outcomes: SendOutcome | Exception) -> None:
        self.outcomes, self.received = list(outcomes), list[str]()

    @contextmanager
    def connected(self, destination: Destination, kinds: list[str]) -> Iterator[Any]:
        yield self.send

    def send(self, kind: str, file: Path) -> SendOutcome:
        outcome = self.outcomes.pop(0) if self.outcomes else SendOutcome()
        if isinstance(outcome, Exception):
            raise outcome
        if not outcome.reason:
            self.received.append(str(pydicom.dcmread(file).SOPInstanceUID))
        return outcome


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Receiver:
    made = Receiver()
    monkeypatch.setattr(report_sending, "connected", made.connected)
    monkeypatch.setattr(report_sending, "FIRST_PAUSE", 0.001)
    return made


def wait_until(true: Any, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_result_delivered_twice_is_one_report_and_one_file_until_all_destinations_have_it(tmp_path: Path) -> None:
    sending = ReportSending(tmp_path / "outbox", SendingPlan((PACS, ARCHIVE)))
    one, later = result(tmp_path), replace(ANSWER, probabilities=((0.5, 0.5),), weights_sha256="c" * 64)
    delivery(sending)(one)
    before = sending.outbox.due("pacs", 9)
    delivery(sending)(replace(one, images=(replace(one.images[0], answer=later),)))  # answered again after a kill
    assert sending.outbox.due("pacs", 9) == before
    assert len(before) == 1
    file = sending.outbox.file_of(before[0].uid)
    report = pydicom.dcmread(file)
    assert (report.SOPInstanceUID, report.PatientID, report.AccessionNumber) == (before[0].uid, SECRET, "A1")
    for name in ("pacs", "archive"):
        assert file.exists()
        sending.outbox.settle(sending.outbox.due(name, 1)[0], SENT)
    assert not file.exists()
    delivery(sending)(one)  # sent already
    assert not sending.outbox.due("pacs", 9)
    delivery(sending)(replace(one, summary=UnitSummary("series", "mean", ANSWER.classes, (0.5, 0.5), None)))
    assert len(sending.outbox.due("pacs", 9)) == 1
    assert SECRET.encode() not in b"".join(p.read_bytes() for p in (tmp_path / "outbox").glob("outbox.sqlite*"))


def test_an_object_delivered_again_after_a_change_of_the_pool_gives_no_second_report(tmp_path: Path) -> None:
    """One object, one report: also where the inbox hands it on again because of a kill, and a new pool answers it."""
    sending = ReportSending(tmp_path / "outbox", SendingPlan((PACS,)))
    one, two = result(tmp_path, 1), result(tmp_path, 2)
    mean = UnitSummary("series", "mean", ANSWER.classes, (0.5, 0.5), None)
    whole = UnitResult((*one.images, *two.images), mean)
    for each in (one, whole):
        delivery(sending)(each)
    waiting = sending.outbox.due("pacs", 9)
    assert len(waiting) == 2

    def by_new_pool(image: ImageResult) -> ImageResult:
        return replace(image, answer=replace(image.answer, pool_sha256="d" * 64, weights_sha256="e" * 64))

    again = [UnitResult(tuple(map(by_new_pool, each.images[::-1])), each.summary) for each in (one, whole)]
    for each in again:  # before it is sent
        delivery(sending)(each)
    assert sending.outbox.due("pacs", 9) == waiting
    for entry in waiting:
        sending.outbox.settle(entry, SENT)
    for each in again:  # and after
        delivery(sending)(each)
    assert not sending.outbox.due("pacs", 9)
    assert sending.outbox.counts("pacs")["sent"] == 2
    study = replace(whole, summary=replace(mean, unit="study"))  # the rule has changed: another report
    delivery(sending)(study)
    assert len(sending.outbox.due("pacs", 9)) == 1


def test_a_rule_may_name_its_destinations(tmp_path: Path) -> None:
    sending = ReportSending(tmp_path / "outbox", SendingPlan((PACS, ARCHIVE)))
    delivery(sending)(result(tmp_path, send_to=("archive",)))
    assert [len(sending.outbox.due(name, 9)) for name in ("pacs", "archive")] == [0, 1]


def test_a_failing_destination_gets_everything_once_it_works(tmp_path: Path, receiver: Receiver) -> None:
    busy, gone = SendOutcome("The destination answered with status 0xA700."), UnreachableError("It cannot be reached.")
    receiver.outcomes = [gone, gone, busy, SendOutcome(), gone]
    sending = ReportSending(tmp_path / "outbox", SendingPlan((PACS,)))
    for number in range(4):
        delivery(sending)(result(tmp_path, number))
    sending.start(Metrics())
    wait_until(lambda: sending.overview()["destinations"][0]["sent"] == 4)
    sending.stop()
    assert len(receiver.received) == len(set(receiver.received)) == 4
    about = sending.overview()["destinations"][0]
    assert (about["waiting"], about["failed"], about["oldest_seconds"], about["last_error"]) == (0, 0, 0.0, None)
    assert not [*(tmp_path / "outbox" / "objects").iterdir()]


def test_a_refused_report_is_set_aside_with_its_reason_and_can_be_tried_again(
    tmp_path: Path, receiver: Receiver
) -> None:
    receiver.outcomes = [SendOutcome("The destination answered with status 0xC000.", final=True)]
    sending = ReportSending(tmp_path / "outbox", SendingPlan((PACS,)))
    delivery(sending)(result(tmp_path))
    sending.start(Metrics())
    wait_until(lambda: sending.overview()["destinations"][0]["failed"] == 1)
    assert "0xC000" in sending.overview()["destinations"][0]["last_error"]
    sending.outbox.retry_failed()
    wait_until(lambda: len(receiver.received) == 1)
    sending.stop()


def test_a_report_fails_for_good_after_some_days_and_old_entries_are_forgotten(tmp_path: Path) -> None:
    now = [1e9]
    box = Outbox(tmp_path, 1 << 20, lambda: now[0])
    box.put("1.2", "sr", lambda: b"report", ["pacs"], WAITING)
    sender = report_sending.Sender(box, PACS, 7.0)
    (entry,) = box.due("pacs", 9)
    now[0] += 8 * 86400
    sender.settle(entry, SendOutcome("busy"))
    assert box.counts("pacs")["failed"] == 1
    assert box.file_of(entry.uid).exists()
    box.put("1.3", "sr", lambda: b"report", ["pacs"], HELD)
    box.settle(entry, SENT)
    now[0] += 31 * 86400
    box.prune()
    assert (box.counts("pacs")["sent"], box.counts("pacs")["held"]) == (0, 0)
    assert not [*(tmp_path / "objects").iterdir()]


def test_pauses_grow_and_end_at_a_limit() -> None:
    assert max(pause_after(0, 300) for _ in range(50)) <= report_sending.FIRST_PAUSE
    assert 150 <= pause_after(40, 300) <= 300


def test_a_full_outbox_refuses_so_that_results_wait_in_the_inbox(tmp_path: Path) -> None:
    box = Outbox(tmp_path, 10)
    with pytest.raises(OutputError, match="outbox holds"):
        box.put("1.2", "sr", lambda: b"x" * 11, ["pacs"], WAITING)
    assert not box.due("pacs", 9)


def test_a_destination_that_has_a_report_already_confirms_it() -> None:
    """A confirmation that was lost by a kill: the report is sent again, with the same UID."""
    assert senders._outcome(0x0111) == SendOutcome()
    assert senders._outcome(0xA700).reason
    assert not senders._outcome(0xA700).final
    assert senders._outcome(0xC000).final


def test_a_web_destination_that_never_answers_counts_as_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_session, "SECONDS", (0.3, 0.3))
    file = tmp_path / "report"
    file.write_bytes(dicom(np.zeros((8, 9), np.uint8)))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/dicom-web"
        with senders.connected(replace(ARCHIVE, url=url), ["sr"]) as send, pytest.raises(UnreachableError):
            send("sr", file)


KILLED = """
import sys
from pathlib import Path
from mergestream.serving.reports.outbox import Outbox, SENT, WAITING
box = Outbox(Path(sys.argv[1]), 1 << 30)
for number in range(10_000):
    box.put(f"1.2.{number}", "sr", lambda: b"report" * 500, ["pacs"], WAITING)
    print(number, flush=True)
    if number % 3 == 0:
        box.settle(box.due("pacs", 1)[0], SENT)
"""


def test_a_kill_loses_no_entry_that_was_confirmed(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    confirmed = -1
    for line in process.stdout:
        confirmed = int(line)
        if confirmed >= 40:
            process.send_signal(signal.SIGKILL)
            break
    rest = process.stdout.read().split()
    process.wait()
    confirmed = int(rest[-1]) if rest else confirmed
    box = Outbox(tmp_path, 1 << 30)
    waiting = box.due("pacs", 10_000)
    assert len(waiting) + box.counts("pacs")["sent"] >= confirmed + 1
    assert all(box.file_of(entry.uid).read_bytes() == b"report" * 500 for entry in waiting)
    assert len([*(tmp_path / "objects").iterdir()]) == len(waiting)


# --- shadow mode ------------------------------------------------------------------------------------------------------


def test_shadow_mode_sends_nothing_and_is_compared_with_readings_per_week(tmp_path: Path, receiver: Receiver) -> None:
    sending = ReportSending(tmp_path / "dicom" / "outbox", SendingPlan((PACS,)), shadow=True)
    sending.start(Metrics())
    unsure = replace(ANSWER, predictions=(None,), abstained={0: ["low_confidence"]})
    answers = [ANSWER, replace(ANSWER, predictions=("benign",)), ANSWER, unsure]
    for number, each in enumerate(answers):
        made = result(tmp_path, number)
        delivery(sending)(replace(made, images=(replace(made.images[0], answer=each),)))
    sending.stop()
    assert not receiver.received
    assert sending.overview()["destinations"][0]["held"] == 4
    counted = shadow_report(tmp_path, None)["weeks"]
    assert [(week["images"], week["undecided"], week["compared"]) for week in counted] == [(4, 0.25, 0)]
    readings = tmp_path / "readings.csv"
    bad = ANSWER.classes[1]
    readings.write_text(f'accession,class\nA0,"{bad}"\nA1,benign\nA2,benign\nA3,benign\nA99,benign\n')
    report = shadow_report(tmp_path, readings)
    (week,) = report["weeks"]
    assert report["readings_without_answer"] == 1
    assert (week["compared"], week["agreement"][0]) == (3, 2 / 3)
    assert week["confusion"] == {"benign": {"benign": 1, bad: 1, "undecided": 1}, bad: {bad: 1}}
    assert (week["classes"][bad]["sensitivity"][0], week["classes"][bad]["specificity"][0]) == (1.0, 0.5)
    assert any("agreement 66.7% [20.8%, 93.9%]" in line for line in in_words(report))  # Wilson's interval of 2 in 3


@pytest.mark.parametrize("text", ["", "name,class\na,b\n", "accession\na\n"])
def test_wrong_readings_are_one_sentence(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="is missing"):
        shadow_report(tmp_path, None)
    ReportSending(tmp_path / "dicom" / "outbox", SendingPlan(), shadow=True)
    (tmp_path / "readings.csv").write_text(text)
    with pytest.raises(InputError, match="needs the columns"):
        shadow_report(tmp_path, tmp_path / "readings.csv")


# --- the destinations file --------------------------------------------------------------------------------------------


def test_a_destinations_file(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("abc")
    secret.chmod(0o600)
    file = tmp_path / "destinations.yaml"
    file.write_text(
        "give_up_days: 3\ndestinations:\n"
        "  - {name: pacs, kind: c-store, host: pacs.local, port: 104, ae_title: PACS, objects: [sr]}\n"
        f"  - {{name: web, kind: stow-rs, url: 'https://a.local/dicom-web', token_file: {secret}}}\n"
    )
    plan = read_destinations(file)
    assert plan.give_up_days == 3
    assert [each.name for each in plan.destinations] == ["pacs", "web"]
    assert plan.destinations[1].token_file == secret


BAD = {
    "[]": "needs a list 'destinations'",
    "destinations: [1]": "a list of settings",
    "{": "destinations.yaml",
    "destinations: [{kind: c-store}]": "has no 'name'",
    "destinations: [{name: a b, kind: c-store}]": "a name has letters",
    "destinations: [{name: a, kind: ftp}]": "Known: c-store, stow-rs",
    "destinations: [{name: a, kind: c-store, host: h, port: 1}]": "needs 'ae_title'",
    "destinations: [{name: a, kind: c-store, host: h, port: 99999, ae_title: X}]": "of at most 65535",
    "destinations: [{name: a, kind: c-store, host: h, port: 1, ae_title: 'TOO LONG FOR A TITLE'}]": "1 to 16",
    "destinations: [{name: a, kind: stow-rs, url: 'ftp://x'}]": "begins with http",
    "destinations: [{name: a, kind: stow-rs, url: 'http://u:p@x/'}]": "no password",
    "destinations: [{name: a, kind: stow-rs, url: 'http://x', objects: [video]}]": "choice for 'objects'",
    "destinations: [{name: a, kind: stow-rs, url: 'http://x', colour: red}]": "colour",
    "destinations: [{name: a, kind: stow-rs, url: 'http://x', token_file: /none}]": "cannot be read",
    "{give_up_days: 0, destinations: [{name: a, kind: stow-rs, url: 'http://x'}]}": "give_up_days",
    "destinations: [{name: a, kind: stow-rs, url: 'http://x'}, {name: a, kind: stow-rs, url: 'http://x'}]": "same name",
}


@pytest.mark.parametrize("text", BAD)
def test_a_wrong_destinations_file_is_one_sentence(tmp_path: Path, text: str) -> None:
    file = tmp_path / "destinations.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=re.escape(BAD[text])):
        read_destinations(file)


def test_a_destinations_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "destinations.yaml"
    file.write_text("destinations: [{name: a, kind: stow-rs, url: 'http://x'}]\n#" + "x" * (1 << 20))
    with pytest.raises(InputError, match=r"destinations\.yaml cannot be read: it has more than 1,048,576 bytes"):
        read_destinations(file)


# --- with a real receiver ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("storescp") is None, reason="storescp (Debian's dcmtk) is not installed")
def test_storescp_receives_every_report_also_when_it_starts_late(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    plan = SendingPlan((replace(PACS, port=port, ae_title="STORE"),))
    sending = ReportSending(tmp_path / "outbox", plan)
    for number in range(5):
        delivery(sending)(result(tmp_path, number))
    sending.start(Metrics())
    wait_until(lambda: sending.overview()["destinations"][0]["last_error"])
    (tmp_path / "received").mkdir()
    process = subprocess.Popen(["storescp", "-od", str(tmp_path / "received"), str(port)], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: sending.overview()["destinations"][0]["sent"] == 5, 60)
    finally:
        sending.stop()
        process.kill()
        process.wait()
    read = [pydicom.dcmread(file, force=True) for file in (tmp_path / "received").iterdir()]
    assert {each.AccessionNumber for each in read} == {f"A{number}" for number in range(5)}
