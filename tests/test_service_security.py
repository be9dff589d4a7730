"""Who may ask, how much, and what is told when something is wrong: over real HTTP, and inside where time matters."""

import asyncio
import json
import logging
import os
import runpy
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pydicom
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from benching import write_pool
from dicoms import SECRET
from engines import PLAIN, around, batch, small_pool
from mergestream.cli import app as cli
from mergestream.data.intake.limits import Limits
from mergestream.runtime.errors import InputError, MergestreamError
from mergestream.runtime.option_checks import is_http_url
from mergestream.serving.answer_queue import OverloadedError
from mergestream.serving.audit.log_writer import AuditLog, NoAuditLog
from mergestream.serving.engine.engine import Engine
from mergestream.serving.http import server
from mergestream.serving.http.application import create_app
from mergestream.serving.http.problems import ALWAYS, OWN, PROBLEMS, ClientGone, Problem, problem_of
from mergestream.serving.http.request_limits import HeldBytes, RateLimiter, ServiceLimits, body_of
from mergestream.serving.http.tokens import ADMINISTRATOR, CLIENT, Tokens, create_token
from mergestream.serving.http.uploads import files_of
from mergestream.serving.log_lines import JsonFormatter
from mergestream.serving.monitoring import Metrics
from mergestream.serving.options import ServeOptions
from mergestream.serving.service import Service
from mergestream.serving.startup import serve
from services import STREAMS, LocalService, encoded, form, npy, png

ROOT = Path(__file__).parent.parent
RETRIED = ("rate_limited", "timed_out", "not_watching", "node_failed")
WAITING = ("loading", "closing", "overloaded", "audit_unavailable")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("security")
    write_pool(folder / "pool")
    return folder


@pytest.fixture(scope="module")
def tokens(folder: Path) -> dict[str, str]:
    file = folder / "tokens"
    made = {name: create_token(file, CLIENT, name) for name in ("scanner", "revoked", "hasty")}
    return made | {"boss": create_token(file, ADMINISTRATOR, "boss")}


@pytest.fixture(scope="module")
def service(folder: Path, tokens: dict[str, str]) -> Iterator[LocalService]:
    certificate, key = folder / "cert.pem", folder / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate), "-keyout", str(key)]
    subprocess.run([*make, *names], check=True, capture_output=True)
    limits = {"max_body_mib": 1, "rate": 30, "max_streams": 3}
    tls = {"tls_cert": certificate, "tls_key": key}
    with LocalService(folder / "pool", folder / "state", tokens=folder / "tokens", **limits, **tls) as running:
        yield running
        assert running.stop() == 0
        assert SECRET not in running.words() + running.log.read_text()
        assert not any(token in running.words() for token in tokens.values())


@pytest.fixture(scope="module")
def trusted(folder: Path, service: LocalService) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=folder / "cert.pem")


@pytest.fixture
def ask(service: LocalService, tokens: dict[str, str], trusted: ssl.SSLContext) -> Iterator[Callable[..., Any]]:
    """A request as somebody; `code` is asserted where it is a problem."""
    with service.client(verify=trusted) as client:

        def asked(method: str, path: str, who: str | None = "boss", code: str | None = None, **more: Any) -> Any:
            headers = {"Authorization": f"Bearer {tokens.get(who, who)}"} if who else {}
            headers |= more.pop("headers", {})
            answer = client.request(method, path, headers=headers, **more)
            if code is None:
                assert answer.status_code < 300, answer.text
            else:
                require_problem(answer, code)
            return answer

        yield asked


def require_problem(answer: httpx.Response, code: str) -> None:
    assert answer.headers["content-type"] == "application/problem+json"
    problem = answer.json()
    assert problem["code"] == code, problem
    assert answer.status_code == problem["status"] == PROBLEMS[code].status
    assert problem["title"] == PROBLEMS[code].meaning
    assert problem["type"] == f"urn:mergestream:problem:{code}"
    assert problem["request_id"] == answer.headers["x-request-id"]
    assert ("retry-after" in answer.headers) == (code in (*WAITING, *RETRIED))
    assert SECRET not in answer.text


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_nothing_is_told_without_a_token(ask: Callable[..., Any]) -> None:
    for method, path in (
        ("GET", STREAMS), ("GET", "/v1/pool"), ("GET", "/v1/overview"), ("GET", "/metrics"),
        ("POST", f"{STREAMS}/a/batches"), ("POST", "/v1/pool/reload"),
    ):  # fmt: skip
        refused = ask(method, path, who=None, code="unauthorized")
        assert refused.headers["www-authenticate"] == "Bearer"
        ask(method, path, who="wrong", code="unauthorized")
    for path in ("/healthz", "/readyz", "/docs", "/openapi.json", "/"):
        shown = ask("GET", path, who=None)
        assert shown.headers["strict-transport-security"] == "max-age=31536000"  # the service uses TLS


def test_clients_ask_and_administrators_change(ask: Callable[..., Any], service: LocalService) -> None:
    ask("POST", f"{STREAMS}/scanner/batches", "scanner", files=form(png(1)))
    ask("GET", f"{STREAMS}/scanner/recent", "scanner")
    assert ask("GET", "/v1/overview", "scanner").json()["administrator"] is False
    assert ask("GET", "/v1/overview", "boss").json()["administrator"] is True
    for method, path in (
        ("POST", f"{STREAMS}/scanner/reset"), ("DELETE", f"{STREAMS}/scanner"), ("POST", "/v1/pool/reload"),
        ("PUT", "/v1/pool/experts/lyon"),
    ):  # fmt: skip
        ask(method, path, "scanner", code="forbidden")
    ask("POST", f"{STREAMS}/scanner/reset", "boss")
    ask("DELETE", f"{STREAMS}/scanner", "boss")
    assert [line["body"]["by"] for line in service.lines("change_asked")] == ["boss", "boss"]


def test_a_token_is_revoked_and_another_added_without_a_restart(ask: Callable[..., Any], folder: Path) -> None:
    file = folder / "tokens"
    before = file.read_text()
    ask("GET", STREAMS, "revoked")
    file.write_text("".join(line for line in before.splitlines(True) if " revoked " not in line))
    ask("GET", STREAMS, "revoked", code="unauthorized")
    new = create_token(file, CLIENT, "new")
    ask("GET", STREAMS, new)
    file.write_text("nonsense\n" + before)  # a damaged line grants nothing, and takes nothing from the others
    ask("GET", STREAMS, "scanner")
    file.rename(file.with_suffix(".gone"))
    ask("GET", STREAMS, "scanner", code="unauthorized")
    file.with_suffix(".gone").rename(file)
    ask("GET", STREAMS, "scanner")


def test_tokens_are_in_no_file_and_their_names_unique(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    token = create_token(file, CLIENT, "a")
    assert token not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    tokens = Tokens(file)
    assert tokens.holder_of(token) == (CLIENT, "a")
    for wrong in ("", token[:-1], token + "x", token.upper(), "\ud800", file.read_text().split()[2]):
        assert tokens.holder_of(wrong) is None
    for role, name in ((CLIENT, "a"), (CLIENT, "two words"), (CLIENT, "x\nadministrator y"), ("king", "b")):
        with pytest.raises(MergestreamError):
            create_token(file, role, name)
    for content, mode in (("", 0o600), ("client a zz\n", 0o600), (file.read_text(), 0o666)):
        other = tmp_path / "other"
        other.write_text(content)
        other.chmod(mode)
        with pytest.raises(InputError):
            Tokens(other)
    with pytest.raises(InputError, match="cannot be read"):
        Tokens(tmp_path / "none")


def test_the_command_line_makes_tokens_and_prints_them_once(tmp_path: Path) -> None:
    arguments = ["serve-token", "--name", "scanner", "--tokens", str(tmp_path / "tokens")]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0
    assert Tokens(tmp_path / "tokens").holder_of(done.stdout.strip()) == (CLIENT, "scanner")
    assert isinstance(CliRunner().invoke(cli.app, arguments).exception, InputError)


def test_a_service_that_others_could_reach_needs_tokens(folder: Path, tokens: dict[str, str], tmp_path: Path) -> None:
    request = ServeOptions(folder / "pool", port=0, state=tmp_path)
    for host in ("0.0.0.0", "::", "192.0.2.1", "hospital.example"):
        with pytest.raises(InputError, match="--tokens"):
            serve(replace(request, host=host))
    for wrong, message in (
        ({"tls_cert": folder / "cert.pem"}, "both --tls-cert"), ({"device": "abacus"}, "device"),
        ({"no_audit": True, "audit": tmp_path / "a"}, "--no-audit"), ({"guards": ["fallback=none", "x=1"]}, "x"),
        ({"guards": ["fallback=3"]}, "fallback"), ({"rate": -1.0}, "rate"), ({"max_batch": 0}, "max_batch"),
        ({"tokens": tmp_path / "none"}, "cannot be read"), ({"audit_key": tmp_path / "none"}, "cannot be read"),
        ({"max_body_mib": 0}, "max_body_mib"), ({"options": ["momentum"]}, "name=value"), ({"dtype": "int3"}, "dtype"),
        ({"watch": Path(__file__)}, "Cannot write"),
    ):  # fmt: skip
        with pytest.raises(MergestreamError, match=message):
            serve(replace(request, **wrong))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InputError, match="Cannot listen"):
        serve(replace(request, port=taken.getsockname()[1]))


# --- what is refused --------------------------------------------------------------------------------------------------


def test_every_bad_upload_is_a_problem_with_its_code(ask: Callable[..., Any]) -> None:
    path = f"{STREAMS}/bad/batches"
    report = (Path(pydicom.__file__).parent / "data" / "test_files" / "test-SR.dcm").read_bytes()
    bomb = encoded(np.zeros((6000, 6000), dtype=np.uint8))
    for code, file in {
        "empty": b"",
        "unsupported_format": b"PK\x03\x04" + b"x" * 100,
        "damaged": png(1)[:60],
        "not_an_image": report,
        "wrong_type": npy(np.zeros((2, 3, 8, 8), dtype=np.float32)),
        "wrong_shape": npy(np.zeros(4, dtype=np.uint8)),
        "too_large": bomb,
        "too_many": npy(np.zeros((257, 3, 1, 1), dtype=np.uint8)),
    }.items():
        assert ask("POST", path, code=code, files=form(file)).json()["position"] == 0
    second = ask("POST", path, code="damaged", files=form(png(1), png(2)[:50]))
    assert second.json()["position"] == 1
    ask("POST", path, code="unsupported_media_type", content=b"{}", headers={"Content-Type": "application/json"})
    ask("POST", path, code="invalid_request", files={"other": ("x", png(1))})
    ask("POST", path, code="invalid_request", params={"report": SECRET}, files=form(png(1)))
    multipart = {"Content-Type": "multipart/form-data; boundary=x"}
    ask("POST", path, code="malformed_multipart", content=b"--y\r\n", headers=multipart)
    ask("POST", path, code="malformed_multipart", content=b"", headers={"Content-Type": "multipart/form-data"})
    disposition = b'Content-Disposition: form-data; name="images"\r\n\r\n'
    ask("POST", path, code="malformed_multipart", content=b"--x\r\n" + disposition + png(1), headers=multipart)
    ask("POST", f"{STREAMS}/bad/images", code="one_picture_only", files=form(npy(np.zeros((2, 3, 8, 8), np.uint8))))
    assert "bad" not in [stream["name"] for stream in ask("GET", STREAMS).json()["streams"]]


def test_every_bad_address_is_a_problem_with_its_code(ask: Callable[..., Any]) -> None:
    for code, method, path in (
        ("not_found", "GET", f"/{SECRET}"), ("not_found", "GET", "/v1/streams/"), ("not_found", "GET", "/docs/"),
        ("method_not_allowed", "PATCH", STREAMS), ("invalid_request", "GET", f"{STREAMS}/{SECRET}"),
        ("invalid_request", "GET", f"{STREAMS}/..%00"), ("invalid_request", "GET", f"{STREAMS}/{'a' * 65}"),
        ("unknown_stream", "GET", f"{STREAMS}/nobody"), ("unknown_stream", "POST", f"{STREAMS}/nobody/reset"),
        ("unknown_stream", "DELETE", f"{STREAMS}/nobody"), ("unknown_stream", "GET", f"{STREAMS}/nobody/recent"),
    ):  # fmt: skip
        ask(method, path, code=code)
    refused = ask("PATCH", f"{STREAMS}/nobody", code="method_not_allowed")
    assert refused.headers["allow"] == "DELETE, GET"
    switch = "/v1/pool/experts/lyon"
    ask("PUT", f"/v1/pool/experts/{SECRET}", code="unknown_expert", json={"on": True})
    for body in ({"on": 1}, {"on": True, SECRET: 1}, {}, [], "on"):
        ask("PUT", switch, code="invalid_request", json=body)
    ask("PUT", switch, code="unsupported_media_type", content=b"{}")
    ask("PUT", switch, code="body_too_large", json={"on": "x" * 5000})


def test_streams_are_limited(ask: Callable[..., Any]) -> None:
    names = ["one", "two", "three"]
    for name in names:
        ask("POST", f"{STREAMS}/{name}/batches", "scanner", files=form(png(1)))
    ask("POST", f"{STREAMS}/four/batches", "scanner", code="too_many_streams", files=form(png(1)))
    for name in names:
        ask("DELETE", f"{STREAMS}/{name}")


def test_a_body_is_limited_whatever_it_announces(ask: Callable[..., Any]) -> None:
    path = f"{STREAMS}/large/batches"
    ask("POST", path, code="body_too_large", files=form(b"\0" * (2 << 20)))

    def endless() -> Iterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="images"\r\n\r\n'
        for _ in range(64):
            yield b"\0" * (1 << 15)

    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    ask("POST", path, code="body_too_large", content=endless(), headers=headers)
    part = b'--x\r\nContent-Disposition: form-data; name="images"\r\n\r\n1\r\n'
    ask("POST", path, code="body_too_large", content=part * 257 + b"--x--\r\n", headers=headers)


def test_whoever_asks_too_often_waits(ask: Callable[..., Any]) -> None:
    """Sixty at once are free; the others' budgets are their own."""
    ended = time.monotonic() + 20
    for _ in range(500):
        try:
            ask("GET", "/v1/nothing", "hasty", code="not_found")
        except AssertionError:
            break
        assert time.monotonic() < ended
    else:
        pytest.skip("this machine is too slow to ask too often")
    ask("GET", STREAMS, "scanner")


def test_pages_of_others_may_not_use_it(ask: Callable[..., Any], service: LocalService) -> None:
    ask("GET", STREAMS, code="foreign_origin", headers={"Origin": "https://elsewhere.example"})
    ask("GET", STREAMS, code="foreign_origin", headers={"Origin": "null"})
    ask("GET", STREAMS, headers={"Origin": service.url})


# --- inside -----------------------------------------------------------------------------------------------------------


def opened(engine: Engine) -> Callable[[Metrics], Engine]:
    return lambda _: engine


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    pool = small_pool()
    more = {"state_folder": tmp_path / "in", "guards": PLAIN, **around(pool, tmp_path)}
    made = Engine(pool, "entropy_adaptive", {}, audit=NoAuditLog(), **more)
    yield made
    made.close()


def inside(service: Service, talk: Callable[[httpx.AsyncClient], Any], *, start: bool = True) -> None:
    async def talked() -> None:
        transport = httpx.ASGITransport(app=create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://inside") as client:
            if start:
                await service.start()
            await talk(client)
            await service.stop()

    asyncio.run(talked())


def test_a_fault_of_ours_is_told_by_its_request_id_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **more: object) -> None:
        raise RuntimeError(SECRET)

    monkeypatch.setattr(engine, "answer", fail)

    async def talk(client: httpx.AsyncClient) -> None:
        for to in ("batches", "images"):
            refused = await client.post(f"{STREAMS}/a/{to}", files=form(png(1)))
            require_problem(refused, "internal")
            assert refused.json()["request_id"] in caplog.text

    inside(Service(opened(engine)), talk)
    assert "RuntimeError" in caplog.text
    assert "in fail" in caplog.text
    assert SECRET not in caplog.text


def test_loading_closing_and_overloaded_services_say_when_to_come_back(engine: Engine) -> None:
    gate = threading.Event()

    def slowly(_: Metrics) -> Engine:
        gate.wait(10)
        return engine

    service = Service(slowly, ServiceLimits(held_bytes=100_000))

    async def talk(client: httpx.AsyncClient) -> None:
        starting = asyncio.create_task(service.start())
        await asyncio.sleep(0.05)
        assert (await client.get("/healthz")).status_code == 200
        for path in ("/readyz", STREAMS, "/v1/pool", "/v1/overview"):
            require_problem(await client.get(path), "loading")
        require_problem(await client.post(f"{STREAMS}/a/batches", files=form(png(1))), "loading")
        require_problem(await client.post(f"{STREAMS}/a/reset"), "loading")
        gate.set()
        await starting
        assert (await client.get("/readyz")).status_code == 200
        large = npy(np.zeros((1, 3, 200, 200), dtype=np.uint8))
        require_problem(await client.post(f"{STREAMS}/a/batches", files=form(large)), "overloaded")
        assert service.held.total == 0
        service.closing = True
        for path in ("/readyz", STREAMS):
            require_problem(await client.get(path), "closing")

    inside(service, talk, start=False)


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals come to the main thread")
def test_a_signal_while_it_loads_ends_it_in_order_and_it_was_never_ready(engine: Engine) -> None:
    handler, ready = signal.signal(signal.SIGTERM, signal.SIG_IGN), list[str]()

    def slowly(_: Metrics) -> Engine:
        time.sleep(0.3)  # until it listens
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        return engine

    service = Service(slowly)
    try:
        server.run(service, ServeOptions(Path("pool"), port=0), ready.append)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert ready == []
    assert service.closing


def test_a_device_that_one_thread_may_touch_is_touched_by_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: answers, switches, resets and the watched folder's batches take turns in one thread."""
    threads = set()
    for name in ("answer", "switch", "reset"):
        monkeypatch.setattr(engine, name, _noting(threads, getattr(engine, name)))
    service = Service(opened(engine), threads=1)

    async def talk(client: httpx.AsyncClient) -> None:
        ways = [(n, to) for n in range(6) for to in ("batches", "images")]
        asked = [client.post(f"{STREAMS}/s{n % 3}/{to}", files=form(png(n))) for n, to in ways]
        assert {answer.status_code for answer in await asyncio.gather(*asked)} == {200}
        expert = engine.lineup.pool.names[0]
        assert (await client.put(f"/v1/pool/experts/{expert}", json={"on": False})).status_code == 200
        assert (await client.post(f"{STREAMS}/s0/reset")).status_code == 200
        assert (await asyncio.to_thread(service.answer_from_thread, "s1", batch(1))).switched_off == (expert,)

    inside(service, talk)
    assert len(threads) == 1


def _noting(threads: set[int], function: Callable[..., Any]) -> Callable[..., Any]:
    def noted(*given: Any, **more: Any) -> Any:
        threads.add(threading.get_ident())
        return function(*given, **more)

    return noted


def test_an_answer_that_takes_too_long_is_given_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = engine.answer

    def slowly(*given: Any, **more: Any) -> Any:
        time.sleep(0.5)
        return answer(*given, **more)

    monkeypatch.setattr(engine, "answer", slowly)

    async def talk(client: httpx.AsyncClient) -> None:
        for to in ("batches", "images"):
            require_problem(await client.post(f"{STREAMS}/a/{to}", files=form(png(1))), "timed_out")

    inside(Service(opened(engine), ServiceLimits(answer_seconds=0.1)), talk)


def test_a_log_that_cannot_be_written_stops_answers_until_it_can(tmp_path: Path) -> None:
    """The file of the log is really closed under its writer, and really comes back."""
    audit = AuditLog(tmp_path / "audit.jsonl")
    pool = small_pool()
    more = {"state_folder": tmp_path / "state", "guards": PLAIN, **around(pool, tmp_path)}
    engine = Engine(pool, "mean", {}, audit=audit, **more)
    service = Service(opened(engine))

    async def talk(client: httpx.AsyncClient) -> None:
        first = (await client.post(f"{STREAMS}/a/batches", files=form(png(1)))).json()
        handle = os.dup(audit._storage._handle)
        os.dup2(os.open("/dev/full", os.O_WRONLY), audit._storage._handle)
        refused = await client.post(f"{STREAMS}/a/batches", files=form(png(1)))
        require_problem(refused, "audit_unavailable")
        assert str(tmp_path) not in refused.text
        require_problem(await client.get("/readyz"), "audit_unavailable")
        os.dup2(handle, audit._storage._handle)
        service._log_checked_at = 0.0
        assert (await client.get("/readyz")).status_code == 200
        again = (await client.post(f"{STREAMS}/a/batches", files=form(png(1)))).json()
        assert (first["step"], again["step"]) == (0, 1)

    inside(service, talk)


def test_without_tokens_only_this_very_host_is_answered(engine: Engine) -> None:
    async def talk(client: httpx.AsyncClient) -> None:
        for host in ("127.0.0.1:8000", "localhost", "[::1]:80"):
            assert (await client.get(STREAMS, headers={"Host": host})).status_code == 200
        for host in ("elsewhere.example", "127.0.0.1.elsewhere.example", "", "[::1"):
            require_problem(await client.get(STREAMS, headers={"Host": host}), "wrong_host")

    inside(Service(opened(engine), hosts=("127.0.0.1", "localhost", "::1")), talk)


def test_the_rate_is_that_of_a_bucket() -> None:
    now = [0.0]
    limiter = RateLimiter(2.0, 3, lambda: now[0])

    def admitted(key: str = "a") -> bool:
        try:
            limiter.admit(key)
        except Problem as problem:
            return problem.code != "rate_limited"
        return True

    assert [admitted() for _ in range(5)] == [True] * 3 + [False] * 2
    assert admitted("b")
    now[0] = 0.5
    assert [admitted(), admitted()] == [True, False]
    now[0] = 100.0
    assert [admitted() for _ in range(4)] == [True] * 3 + [False]
    assert all(RateLimiter(0.0, 1).admit("x") is None for _ in range(10))
    for key in range(10_000):
        limiter.admit(str(key))
    assert len(limiter._buckets) <= 4096


def test_memory_of_all_requests_is_given_back_however_they_end() -> None:
    held = HeldBytes(100)
    with held.share() as one:
        one(60)
        with held.share() as other:
            other(30)
            with pytest.raises(OverloadedError):
                other(30)
        assert held.total == 60
    assert held.total == 0


def test_a_body_that_does_not_come_or_a_client_that_left_is_noticed() -> None:
    async def read(messages: list[dict[str, Any]]) -> bytes:
        async def receive() -> dict[str, Any]:
            if not messages:
                await asyncio.sleep(10)
            return messages.pop(0)

        return b"".join([chunk async for chunk in body_of(receive, 4, 0.05)])

    part = {"type": "http.request", "body": b"ab", "more_body": True}
    assert asyncio.run(read([part, {**part, "more_body": False}])) == b"abab"
    with pytest.raises(Problem, match="must arrive within"):
        asyncio.run(read([part]))
    with pytest.raises(Problem, match="at most 4 bytes"):
        asyncio.run(read([part, part, part]))
    with pytest.raises(ClientGone):
        asyncio.run(read([part, {"type": "http.disconnect"}]))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.binary(max_size=200), min_size=1, max_size=4), st.lists(st.integers(1, 300), max_size=20))
def test_files_come_out_as_they_went_in_wherever_the_body_is_cut(files: list[bytes], cuts: list[int]) -> None:
    request = httpx.Request("POST", "http://x", files=form(*files))
    body = request.read()

    async def pieces() -> AsyncIterator[bytes]:
        start = 0
        for cut in cuts:
            yield body[start : start + cut]
            start += cut
        yield body[start:]

    async def parsed() -> list[bytes]:
        held, kind = HeldBytes(1 << 20), request.headers["content-type"]
        with held.share() as take:
            received = await files_of(kind, pieces(), take, Limits(images=4, file_bytes=200))
            assert held.total == sum(map(len, files))
            return received

    assert asyncio.run(parsed()) == files


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=300), st.sampled_from([b"", b"--x\r\n", b'--x\r\nContent-Disposition: form-data; name="']))
def test_any_bytes_as_a_form_are_files_or_a_problem(body: bytes, start: bytes) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield start + body

    async def parsed() -> None:
        with HeldBytes(1 << 20).share() as take:
            await files_of("multipart/form-data; boundary=x", pieces(), take, Limits(images=4, file_bytes=200))

    with suppress(Problem):  # and nothing else
        asyncio.run(parsed())


@pytest.mark.parametrize(
    ("url", "plain", "with_user"),
    [
        ("https://pacs.example/dicom-web", True, True),
        ("http://[::1]:8042/x?y=1", True, True),
        ("https://user:password@pacs.example/", False, True),
        ("ftp://pacs.example/", False, False),
        ("https:///dicom-web", False, False),
        ("http://[::1", False, False),
        ("http://pacs.example/a b\n", False, False),
        ("pacs.example", False, False),
        (None, False, False),
    ],
)
def test_urls_of_other_systems(url: str | None, plain: bool, with_user: bool) -> None:
    assert (is_http_url(url), is_http_url(url, with_user=True)) == (plain, with_user)


def test_the_table_of_problems_is_the_documents() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "docs_site.py"))["http_page"]()
    for code, kind in OWN.items():
        assert f"| `{code}`{'*' * (code in ALWAYS)} | {kind.status} | {kind.meaning} |" in page, code
    assert "POST /v1/streams/{stream}/batches" in page
    assert problem_of(RuntimeError("x")) is None


def test_logs_as_json_hold_a_requests_fields() -> None:
    record = logging.LogRecord("x", logging.INFO, "f", 1, "%(status)s", ({"status": 200},), None)
    line = json.loads(JsonFormatter().format(record))
    assert (line["status"], line["message"], line["level"]) == (200, "200", "info")
