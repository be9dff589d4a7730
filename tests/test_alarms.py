"""Alarms: restored from the log after a restart, acknowledged by a person, counted by stream, sent to a webhook."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from benching import pool_on_disk
from mergestream.runtime.errors import InputError
from mergestream.serving.audit.log_verification import verify
from mergestream.serving.guards import findings as codes
from mergestream.serving.guards.findings import NEXT, Alarm, Finding, acknowledge, alarms_after
from mergestream.serving.http.tokens import create_token
from mergestream.serving.startup import ServeOptions, serve
from mergestream.serving.webhook import Webhook
from services import STREAMS, LocalService, encoded, form, png

BLACK = encoded(np.zeros((16, 16, 3), dtype=np.uint8))
PERSON = {"name": "Dr. Émile Martin", "note": "scanner 2 was sending test images"}


pool = pool_on_disk


def send(client: httpx.Client, stream: str, *files: bytes) -> dict[str, Any]:
    response = client.post(f"{STREAMS}/{stream}/batches", files=form(*files))
    assert response.status_code == 200, response.text
    return response.json()


def alarms(client: httpx.Client, stream: str) -> list[dict[str, Any]] | None:
    return client.get(f"{STREAMS}/{stream}").json()["alarms"]


def by_code(client: httpx.Client, stream: str) -> dict[str, dict[str, Any]]:
    return {each["code"]: each for each in alarms(client, stream) or ()}


# --- one alarm ---


def test_an_alarm_lasts_while_every_step_has_its_finding() -> None:
    blank = Finding(codes.BLANK, codes.WARNING, "1 image is blank.")
    drift = Finding(codes.CLASS_DRIFT, codes.ALARM, "The mixture has moved.")
    first = alarms_after(None, [blank, Finding(codes.ABSTAINED, codes.INFO, "…")], 3, "at 3")
    assert first == (Alarm(codes.BLANK, "warning", "1 image is blank.", 3, "at 3", NEXT[codes.BLANK]),)
    first = acknowledge(first, "Ann", "at 3.5")
    more = Finding(codes.BLANK, codes.WARNING, "2 images are blank.")
    second = alarms_after(first, [more, drift], 4, "at 4")
    assert [(each.code, each.step, each.since, each.acknowledged_by) for each in second] == [
        (codes.BLANK, 3, "at 3", "Ann"),
        (codes.CLASS_DRIFT, 4, "at 4", None),
    ]
    assert second[0].sentence == "2 images are blank."
    assert [each.acknowledged_by for each in acknowledge(second, "Ben", "at 5")] == ["Ann", "Ben"]
    assert alarms_after(second, [], 5, "at 5") == ()
    (again,) = alarms_after((), [blank], 6, "at 6")
    assert (again.step, again.acknowledged_by) == (6, None)  # it had ended, so it is a new one


def test_every_code_that_can_be_an_alarm_says_what_to_do() -> None:
    assert {*codes.ABSTAIN_CODES, codes.FALLBACK, codes.RESTARTED} == set(NEXT)


# --- restart ---


def test_alarms_and_history_are_restored_from_the_log(pool: Path, tmp_path: Path) -> None:
    with LocalService(pool, tmp_path) as service, service.client() as client:
        send(client, "ward", png(1), png(2))
        for _ in range(2):
            send(client, "ward", BLACK, BLACK)
        send(client, "quiet", png(3))
        send(client, "deleted", BLACK)
        assert client.delete(f"{STREAMS}/deleted").status_code == 204
        before = {name: alarms(client, name) for name in ("ward", "quiet")}
        steps = client.get(f"{STREAMS}/ward/recent").json()["steps"]
        status = client.get(f"{STREAMS}/ward").json()
        assert codes.BLANK in by_code(client, "ward")
    blank = next(each for each in before["ward"] or () if each["code"] == codes.BLANK)
    line = service.lines("step")[1]
    assert (blank["step"], blank["since"]) == (1, line["time"])
    assert blank["next"] == NEXT[codes.BLANK]
    with LocalService(pool, tmp_path) as service, service.client() as client:
        assert {name: alarms(client, name) for name in ("ward", "quiet")} == before
        assert client.get(f"{STREAMS}/deleted").status_code == 404
        restored = client.get(f"{STREAMS}/ward/recent").json()["steps"]
        assert [{**step, "time": "", "milliseconds": 0} for step in restored] == [
            {**step, "time": "", "milliseconds": 0} for step in steps
        ]
        assert [step["time"] for step in restored] == [
            each["time"] for each in service.lines("step") if each["body"]["stream"] == "ward"
        ]
        assert {**client.get(f"{STREAMS}/ward").json(), "last_step_at": ""} == {**status, "last_step_at": ""}
        send(client, "ward", png(1), png(2))
        assert codes.BLANK not in by_code(client, "ward")


def test_alarms_are_unknown_where_nothing_can_be_restored(pool: Path, tmp_path: Path) -> None:
    with LocalService(pool, tmp_path, no_audit=True) as service, service.client() as client:
        send(client, "ward", BLACK)
    with LocalService(pool, tmp_path, no_audit=True) as service, service.client() as client:
        assert alarms(client, "ward") is None
        assert client.get("/v1/overview").json()["streams"][0]["alarms"] is None
        refused = client.post(f"{STREAMS}/ward/acknowledge", json=PERSON)
        assert (refused.status_code, refused.json()["code"]) == (409, "nothing_to_acknowledge")
        assert "unknown since the restart" in refused.json()["detail"]
        send(client, "ward", png(1), png(2))
        assert codes.BLANK not in by_code(client, "ward")
        assert alarms(client, "ward") is not None


# --- acknowledgement ---


def test_a_person_acknowledges_alarms_and_the_log_holds_it(pool: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    keys = {role: create_token(tokens, role, f"the-{role}") for role in ("client", "administrator")}
    headers = {role: {"Authorization": f"Bearer {key}"} for role, key in keys.items()}
    url = f"{STREAMS}/ward/acknowledge"
    with LocalService(pool, tmp_path / "state", tokens=tokens) as service, service.client() as client:
        client.headers = headers["administrator"]
        assert client.post(url, json=PERSON).json()["code"] == "unknown_stream"
        send(client, "ward", BLACK)
        forbidden = client.post(url, json=PERSON, headers=headers["client"])
        assert forbidden.json()["code"] == "forbidden"
        assert all(each["acknowledged_by"] is None for each in alarms(client, "ward") or ())
        status = client.post(url, json=PERSON)
        assert status.status_code == 200, status.text
        blank = by_code(client, "ward")[codes.BLANK]
        assert status.json()["alarms"] == alarms(client, "ward")
        (line,) = service.lines("alarms_acknowledged")
        assert line["body"].pop("codes") == [each["code"] for each in alarms(client, "ward") or ()]
        assert line["body"] == {"stream": "ward", "by": "the-administrator", **PERSON}
        assert (blank["acknowledged_by"], blank["acknowledged_at"]) == (PERSON["name"], line["time"])
        assert client.post(url, json=PERSON).json()["code"] == "nothing_to_acknowledge"
        send(client, "ward", BLACK)
        assert by_code(client, "ward")[codes.BLANK] == blank
        before = alarms(client, "ward")
    assert verify(service.log).sound
    with LocalService(pool, tmp_path / "state", tokens=tokens) as service, service.client() as client:
        client.headers = headers["administrator"]
        assert alarms(client, "ward") == before
        send(client, "ward", png(1), png(2))
        send(client, "ward", BLACK)
        assert by_code(client, "ward")[codes.BLANK]["acknowledged_by"] is None  # it had ended: a new alarm


@pytest.mark.parametrize(
    "body",
    [{}, {"name": ""}, {"name": "a\nb"}, {"name": "a\x1b[2J"}, {"name": "a", "more": 1}, {"name": 3},
     {"name": "x" * 101}, {"name": "a", "note": "\u202e"}, {"name": "a", "note": "x" * 501}, ["a"]],
)  # fmt: skip
def test_an_acknowledgement_needs_a_plain_name(shared: httpx.Client, body: Any) -> None:
    response = shared.post(f"{STREAMS}/ward/acknowledge", json=body)
    assert (response.status_code, response.json()["code"]) == (422, "invalid_request")


@pytest.fixture(scope="module")
def shared(pool: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with LocalService(pool, tmp_path_factory.mktemp("state")) as service, service.client() as client:
        send(client, "ward", BLACK)
        yield client


# --- metrics ---


def test_findings_are_counted_by_stream_and_forgotten_with_it(shared: httpx.Client) -> None:
    send(shared, "other", BLACK)
    name = f'mergestream_findings_total{{code="{codes.BLANK}",severity="warning",stream="other"}} 1.0'
    assert name in shared.get("/metrics").text
    shared.delete(f"{STREAMS}/other")
    assert 'stream="other"' not in shared.get("/metrics").text
    assert 'stream="ward"' in shared.get("/metrics").text


# --- webhook ---


class Receiver:
    """A real HTTP server that answers with `status` and keeps what it was sent."""

    def __init__(self) -> None:
        self.status, self.documents, self.delay = 204, [], 0.0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                time.sleep(receiver.delay)
                receiver.documents.append((self.headers["Content-Type"], json.loads(body)))
                self.send_response(receiver.status)
                self.send_header("Location", f"{receiver.url}/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def receiver_at_work() -> Iterator[Receiver]:
    receiver = Receiver()
    thread = threading.Thread(target=receiver.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield receiver
    finally:
        receiver.server.shutdown()
        thread.join()
        receiver.server.server_close()


def wait_until(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_an_alarm_that_begins_is_posted_once(pool: Path, tmp_path: Path) -> None:
    with receiver_at_work() as receiver:
        for _ in range(2):  # after the restart the alarm lasts: it is not sent again
            with LocalService(pool, tmp_path, webhook=receiver.url) as service, service.client() as client:
                for _ in range(2):
                    send(client, "ward", BLACK)
                shown = by_code(client, "ward")[codes.BLANK]
        documents = [document for _, document in receiver.documents if document["code"] == codes.BLANK]
        assert documents == [
            {
                "stream": "ward", "code": codes.BLANK, "severity": "warning", "sentence": shown["sentence"],
                "next": NEXT[codes.BLANK], "step": 0, "time": service.lines("step")[0]["time"],
            }
        ]  # fmt: skip
        assert {kind for kind, _ in receiver.documents} == {"application/json"}


ALARM = Alarm(codes.BLANK, "warning", "1 image is blank.", 0, "2026-01-01T00:00:00.000000Z", NEXT[codes.BLANK])


def test_a_webhook_that_fails_is_tried_again_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with receiver_at_work() as receiver:
        receiver.status = 503
        webhook = Webhook(receiver.url, pause=0.01)
        webhook.send("ward", [ALARM, ALARM])
        wait_until(lambda: len(receiver.documents) > 3)
        receiver.status = 302  # not followed: a redirected POST would be a GET
        wait_until(lambda: len(receiver.documents) == 12)
        receiver.status = 204
        webhook.send("ward", [ALARM])
        wait_until(lambda: len(receiver.documents) == 13)
        webhook.close()
    assert len([each for each in caplog.records if "could not be sent" in each.message]) == 1


def test_a_webhook_that_hangs_delays_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with receiver_at_work() as receiver:
        receiver.delay = 0.5
        webhook, started = Webhook(receiver.url, timeout=0.05), time.monotonic()
        webhook.send("ward", [ALARM] * 1000)  # more than the queue takes
        assert time.monotonic() - started < 0.4
        webhook.close(0.1)
        assert time.monotonic() - started < 1.5
    assert len(caplog.records) == 1


@pytest.mark.parametrize("url", ["", "ftp://a/b", "file:///etc/passwd", "http://", "//host/x", "https:///x", "a.b/c"])
def test_a_webhook_is_an_http_address(pool: Path, tmp_path: Path, url: str) -> None:
    with pytest.raises(InputError, match="--webhook"):
        serve(ServeOptions(pool, port=0, state=tmp_path, webhook=url))
