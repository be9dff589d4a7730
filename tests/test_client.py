"""The Python client against a real service, and what it repeats against a listener that fails on purpose."""

import io
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pydicom
import pytest

import mergestream as ms
from benching import write_pool
from mergestream import client as client_module
from mergestream.client import Client, ClientError, ServiceProblem, ServiceUnreachable, UncertainOutcome
from mergestream.serving.http.problems import PROBLEMS
from mergestream.serving.http.tokens import create_token
from services import LocalService, colour_dicom, form, png
from test_quality import with_cards

OVERLOADED = b'{"code": "overloaded", "detail": "Too much work is waiting.", "request_id": "1"}'


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The tokens file, a client's token and an administrator's."""
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    return file, create_token(file, "client", "scanner"), create_token(file, "administrator", "desk")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, tokens: tuple[Path, str, str]) -> Iterator[LocalService]:
    pool = tmp_path_factory.mktemp("pools") / "pool"
    write_pool(pool)
    with LocalService(pool, tmp_path_factory.mktemp("state"), tokens=tokens[0], options=("momentum=0.9",)) as running:
        yield running


@pytest.fixture
def client(service: LocalService, tokens: tuple[Path, str, str]) -> Iterator[Client]:
    with Client(service.url, tokens[1]) as opened:
        yield opened


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(client_module.time, "sleep", slept.append)
    return slept


class FailingListener:
    """Gives each connection the next reply: bytes, or None to close it after the request was read."""

    def __init__(self, *replies: bytes | None) -> None:
        self._socket, self.requests = socket.create_server(("127.0.0.1", 0)), []
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, args=(replies,), daemon=True)
        self._thread.start()

    def _serve(self, replies: tuple[bytes | None, ...]) -> None:
        for reply in replies:
            connection, _ = self._socket.accept()
            with connection:
                self.requests.append(whole_request(connection))
                connection.sendall(reply or b"")
        self._socket.close()


def whole_request(connection: socket.socket) -> bytes:
    with connection.makefile("rb") as lines:
        head = b"".join(iter(lines.readline, b"\r\n"))
        length = re.search(rb"content-length: (\d+)", head.lower())
        return head + lines.read(int(length[1]) if length else 0)


def response(status: int, body: bytes = b"{}", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def test_a_batch_has_the_answer_of_plain_http(
    service: LocalService, client: Client, tokens: tuple[Path, str, str], tmp_path: Path
) -> None:
    (tmp_path / "PATIENT^NAME.png").write_bytes(png(1))
    files = [png(0), tmp_path / "PATIENT^NAME.png", str(tmp_path / "PATIENT^NAME.png")]
    answer = client.answer(files, "typed")
    with service.client(headers={"Authorization": f"Bearer {tokens[1]}"}) as http:
        plain = http.post("/v1/streams/plain/batches", files=form(png(0), png(1), png(1))).json()
    assert answer.predictions == tuple(plain["predictions"])
    assert [list(image.probabilities.values()) for image in answer.images] == plain["probabilities"]
    assert list(answer.images[0].probabilities) == plain["classes"]
    assert answer.encoder_coefficients == plain["encoder_coefficients"]
    assert (answer.pool_hash, answer.depends_on_batch) == (plain["pool_hash"], True)
    assert answer.audit_hash in {line["hash"] for line in service.lines("step")}
    assert answer.document["batch_size"] == 3
    with pytest.raises(AttributeError):
        answer.step = 3  # type: ignore[misc]


def test_single_answers_and_reports_are_typed(client: Client) -> None:
    answer = client.answer([colour_dicom(0), png(1)], "reported", single=True, reports=True)
    assert [part.images[0].prediction for part in answer.parts] == list(answer.predictions)
    assert [part.step for part in answer.parts] == [0, 1]
    assert answer.images[1].report is None
    assert pydicom.dcmread(io.BytesIO(answer.images[0].report or b"")).Modality == "SR"
    one = client.answer_image(colour_dicom(0), "reported", reports=True)
    assert (len(one.images), one.depends_on_batch, one.step) == (1, False, 2)


def test_prediction_sets_are_typed(service: LocalService, client: Client, tmp_path: Path) -> None:
    assert client.answer([png(0)], "typed").prediction_sets is None
    write_pool(tmp_path / "plain")
    with_cards(ms.ExpertPool.load(tmp_path / "plain")).save(tmp_path / "pool")
    own = LocalService(tmp_path / "pool", tmp_path / "state", prediction_sets=0.9)
    with own as running, Client(running.url) as opened:
        answer = opened.answer([png(0), png(1)], "ward")
    assert answer.prediction_sets == tuple(map(tuple, answer.document["prediction_set"]))
    assert answer.images[1].prediction_set == (answer.prediction_sets or ())[1]
    assert all(image.prediction in (image.prediction_set or ()) for image in answer.images)


def test_streams_are_listed_reset_and_deleted(
    service: LocalService, client: Client, tokens: tuple[Path, str, str]
) -> None:
    client.answer([png(0), png(1)], "ward")
    assert (client.stream("ward").steps, client.stream("ward").images) == (1, 2)
    assert "ward" in [stream.name for stream in client.streams()]
    assert [step["step"] for step in client.recent("ward")] == [0]
    with pytest.raises(ServiceProblem) as refusal:
        client.reset("ward")
    assert (refusal.value.code, refusal.value.status) == ("forbidden", 403)
    with Client(service.url, tokens[2]) as desk:
        assert desk.reset("ward").steps == 1
        desk.switch("lyon", on=False)
        assert {expert["name"] for expert in desk.pool()["experts"] if not expert["on"]} == {"lyon"}
        desk.switch("lyon", on=True)
        desk.delete("ward")
        assert desk.ready()
    with pytest.raises(ServiceProblem, match="unknown_stream"):
        client.stream("ward")


def test_problems_have_their_code_and_position(service: LocalService, client: Client) -> None:
    with pytest.raises(ServiceProblem) as refusal:
        client.answer([png(0), b"no image"], "broken")
    assert (refusal.value.code, refusal.value.position) == ("unsupported_format", 1)
    assert refusal.value.request_id
    with Client(service.url, "wrong") as stranger, pytest.raises(ServiceProblem, match="unauthorized"):
        stranger.streams()
    with pytest.raises(ServiceProblem, match=r"not_found|invalid_request"):
        client.stream("../pool")


def test_wrong_use_is_one_sentence(client: Client) -> None:
    with pytest.raises(ClientError, match="Give a list"):
        client.answer("one.png")
    with pytest.raises(ClientError, match="at least one file"):
        client.answer([])
    with pytest.raises(ClientError, match="begins with http"):
        Client("service:8000")
    with pytest.raises(ClientError, match="retries is 0 or more"):
        Client("http://127.0.0.1", retries=-1)


def test_a_refusal_before_a_step_is_repeated_after_the_time_that_the_service_asks_for(pauses: list[float]) -> None:
    listener = FailingListener(
        response(503, OVERLOADED, "Retry-After: 7"),
        response(429, OVERLOADED.replace(b"overloaded", b"rate_limited")),
        response(200, b'{"streams": []}'),
    )
    assert Client(listener.url, "token").streams() == []
    assert pauses[0] == 7
    assert 0.6 <= pauses[1] <= 1.2
    assert b"Authorization: Bearer token" in listener.requests[2]


@pytest.mark.parametrize(
    ("reply", "error", "sent"),
    [
        (response(503, OVERLOADED), ServiceProblem, 3),  # nothing was done: again, then give up
        (None, UncertainOutcome, 1),  # the step may have been taken
        (response(503, b"<html>"), ServiceProblem, 1),  # not of the service: perhaps after the step
        (response(504, OVERLOADED.replace(b"overloaded", b"timed_out")), ServiceProblem, 1),
        (response(503, OVERLOADED, "Retry-After: 600"), ServiceProblem, 1),  # longer than anybody waits
    ],
)
def test_images_are_sent_again_only_if_no_step_can_have_been_taken(
    reply: bytes | None, error: type[Exception], sent: int, pauses: list[float]
) -> None:
    listener = FailingListener(*[reply] * 4)
    with Client(listener.url, retries=2) as client, pytest.raises(error):
        client.answer_image(png(0))
    assert (len(listener.requests), len(pauses)) == (sent, sent - 1)
    assert b"image-0" in listener.requests[0]


def test_reads_are_repeated_after_a_lost_connection(pauses: list[float]) -> None:
    listener = FailingListener(None, response(502, b"<html>"), response(200, b'{"streams": []}'))
    assert Client(listener.url).streams() == []
    assert len(pauses) == 2


def test_a_service_that_is_not_there_is_tried_again_and_then_unreachable(pauses: list[float]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    with Client(url, retries=3) as client:
        with pytest.raises(ServiceUnreachable, match="Nothing was sent"):
            client.answer([png(0)])
        assert not client.ready()
    assert len(pauses) == 3


def test_codes_that_are_repeated_are_those_of_the_service() -> None:
    assert {PROBLEMS[code].status for code in client_module.REFUSED_BEFORE_A_STEP} == {429, 503}
