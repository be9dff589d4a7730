"""Clients that are silent, never read, or are too many: over real sockets, with short times where that is enough."""

import asyncio
import json
import logging
import resource
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from uvicorn.server import ServerState

from benching import pool_on_disk
from live_service import LiveService
from services import STREAMS, LocalService, form, png

GET = b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
MANY = 1100


pool = pool_on_disk


def connected(url: str, sent: bytes = b"", own_address: str = "127.0.0.1") -> socket.socket:
    """A socket with a small receive buffer: the kernel stores little of what its owner does not read."""
    address = httpx.URL(url)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.bind((own_address, 0))
    sock.settimeout(5)
    sock.connect((address.host, address.port))
    if sent:
        with suppress(OSError):
            sock.setblocking(False)
            sock.send(sent)
    return sock


def closed(sock: socket.socket) -> bool:
    sock.settimeout(0.01)
    try:
        return sock.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def wait_until(condition: Callable[[], bool], within: float) -> None:
    ends = time.monotonic() + within
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


def open_connections(service: LocalService) -> int:
    return len(service._servers[0].server_state.connections)


# --- never reading ----------------------------------------------------------------------------------------------------


def test_a_client_that_never_reads_is_cut_off(pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with suppress(ImportError):
        from mergestream.serving.http import connection

        monkeypatch.setattr(connection, "READ_SECONDS", 0.3)
    with LocalService(pool, tmp_path) as service:
        silent = connected(service.url, 100 * GET)
        wait_until(lambda: open_connections(service) == 1, 2)
        time.sleep(0.2)
        (open_connection,) = service._servers[0].server_state.connections
        assert open_connection.transport.get_write_buffer_size() < 1 << 20  # one response waits, not a hundred
        wait_until(lambda: open_connections(service) == 0, 3)
        silent.close()
        with service.client() as client:
            assert client.get("/healthz").status_code == 200


def test_a_client_that_reads_slowly_gets_everything(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mergestream.serving.http import connection

    monkeypatch.setattr(connection, "READ_SECONDS", 0.2)
    monkeypatch.setattr(connection, "READ_BYTES", 1000)
    with LocalService(pool, tmp_path) as service:
        with service.client() as client:
            length = len(client.get("/openapi.json").content)
        slow = connected(service.url, 20 * GET.replace(b"\r\n\r\n", b"\r\nConnection: keep-alive\r\n\r\n"))
        slow.setblocking(True)
        received = 0
        while received < 20 * length:
            part = slow.recv(16384)
            assert part, f"cut off after {received} of {20 * length} bytes"
            received += len(part)
            time.sleep(0.002)
        slow.close()


def test_a_second_signal_ends_it_at_once_and_the_log_is_closed(pool: Path, tmp_path: Path) -> None:
    with LocalService(pool, tmp_path) as service:
        with service.client() as client:
            assert client.post(f"{STREAMS}/ward/batches", files=form(png(1))).status_code == 200
        silent = connected(service.url, 100 * GET)
        time.sleep(0.3)
        running = service._servers[0]
        running._on_signal()
        time.sleep(0.3)
        running._on_signal()
        service._thread.join(3)
        assert not service._thread.is_alive()
        silent.close()
    assert service.lines()[-1]["kind"] == "service_stopped"


def test_the_grace_period_ends_it_and_accepted_work_is_done(pool: Path, tmp_path: Path) -> None:
    with LocalService(pool, tmp_path, grace_seconds=1.0) as service:
        silent = connected(service.url, 100 * GET)
        time.sleep(0.2)
        with ThreadPoolExecutor(4) as threads, service.client() as client:
            sent = [threads.submit(client.post, f"{STREAMS}/s{n}/images", files=form(png(n))) for n in range(4)]
            wait_until(lambda: len(service.words().split("POST")) > 1 or all(each.done() for each in sent), 5)
            service._servers[0]._on_signal()
            codes = [each.result().status_code for each in sent if each.exception() is None]
        assert 200 in codes
        service._thread.join(4)
        assert not service._thread.is_alive()
        silent.close()
    steps = [line for line in service.lines() if line["kind"] == "step"]
    assert len(steps) >= codes.count(200)
    assert service.lines()[-1]["kind"] == "service_stopped"


@pytest.mark.slow
@pytest.mark.parametrize(("signals", "within"), [(1, 35), (2, 10)])
def test_sigterm_ends_a_process_whose_client_never_reads(
    pool: Path, tmp_path: Path, signals: int, within: float
) -> None:
    with LiveService(tmp_path, pool) as service:
        with service.client() as client:
            assert client.post(f"{STREAMS}/ward/batches", files=form(png(1))).status_code == 200
        silent = connected(service.url, 400 * GET)
        time.sleep(1)
        assert service.process is not None
        for _ in range(signals):
            service.process.send_signal(signal.SIGTERM)
            time.sleep(0.5)
        assert service.process.wait(within) == 0
        silent.close()
    assert json.loads(service.log.read_text().splitlines()[-1])["kind"] == "service_stopped"
    assert "Traceback" not in service.said.read_text()


@pytest.mark.slow
def test_many_who_never_read_do_not_stop_the_others(pool: Path, tmp_path: Path) -> None:
    with LiveService(tmp_path, pool, "--rate", "100") as service, ExitStack() as stack:
        for _ in range(MANY):
            stack.enter_context(connected(service.url, 20 * GET))
        started = time.monotonic()
        with service.client(transport=httpx.HTTPTransport(local_address="127.0.0.2")) as client:
            for number in range(5):
                assert client.post(f"{STREAMS}/ward/batches", files=form(png(number))).status_code == 200
        assert time.monotonic() - started < 20  # it was over a minute

        def answers() -> bool:
            with suppress(httpx.TransportError), service.client() as client:
                return client.get("/v1/pool").status_code == 200
            return False

        wait_until(answers, 5)  # from the same address


def test_slow_headers_close_a_connection_and_malformed_ones_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    from mergestream.serving.http import connection

    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.4)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.8)  # longer than headers may take: only they are timed
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    async def answered(*pieces: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        config = uvicorn.Config(app, lifespan="off", log_config=None)
        made = await loop.create_server(lambda: connection.Connection(config, ServerState(), {}, loop), "127.0.0.1", 0)
        async with made:
            reader, writer = await asyncio.open_connection(*made.sockets[0].getsockname())
            for piece in pieces:
                writer.write(piece)
                await asyncio.sleep(0.15)
            try:
                return await asyncio.wait_for(reader.read(), 5)
            except ConnectionError:  # closed while something was still sent
                return b""
            finally:
                writer.close()

    whole = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    assert asyncio.run(answered()) == b""
    assert asyncio.run(answered(*(whole[i : i + 2] for i in range(0, 20, 2)))) == b""
    assert asyncio.run(answered(whole[:20], whole[20:])).endswith(b"ok")
    head, _, body = asyncio.run(answered(b"\x16\x03\x01 nonsense\r\n\r\n")).partition(b"\r\n\r\n")
    assert b"400" in head
    assert json.loads(body)["code"] == "malformed_http"


# --- idle -------------------------------------------------------------------------------------------------------------


def test_an_address_has_a_limit_and_idle_connections_go_first(pool: Path, tmp_path: Path) -> None:
    more = {"connections_per_address": 5, "proxies": ["127.0.0.3"]}
    with LocalService(pool, tmp_path, **more) as service, ExitStack() as stack:
        idle = [stack.enter_context(connected(service.url)) for _ in range(5)]
        other = [stack.enter_context(connected(service.url, own_address="127.0.0.2")) for _ in range(3)]
        proxied = [stack.enter_context(connected(service.url, own_address="127.0.0.3")) for _ in range(9)]
        time.sleep(0.6)
        with service.client() as client:
            assert client.get("/v1/pool").status_code == 200
            assert [closed(each) for each in idle] == [True] + [False] * 4
            assert client.get("/v1/pool").status_code == 200
        assert not any(map(closed, other + proxied))


@pytest.mark.slow
def test_idle_connections_beyond_the_limit_of_files(pool: Path, tmp_path: Path) -> None:
    """Open files are limited to 1,024, and 2 x 1,100 idle connections from eleven addresses ask for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4096)), hard))
    limited = ["prlimit", "--nofile=1024:1024"]
    with LiveService(tmp_path, pool, prefix=limited) as service, ExitStack() as stack:
        slowest = 0.0
        for number in range(2 * MANY):
            stack.enter_context(connected(service.url, own_address=f"127.0.1.{1 + number % 11}"))
            if number % 100 == 0:
                started = time.monotonic()
                with service.client() as client:
                    assert client.get("/healthz").status_code == 200
                    assert client.post(f"{STREAMS}/ward/batches", files=form(png(1))).status_code == 200
                slowest = max(slowest, time.monotonic() - started)
        assert slowest < 3
        assert service.said.stat().st_size < 100_000
        assert service.stop() == 0


class Listening:
    """A listener around a small application: /work takes a while, anything else is answered at once."""

    def __init__(self, **limits: Any) -> None:
        from mergestream.serving.http.connection import Connection
        from mergestream.serving.http.listener import Listener

        self.state, self.end = ServerState(), asyncio.Event()
        self._sock = socket.create_server(("127.0.0.1", 0))
        self.address = self._sock.getsockname()
        config = uvicorn.Config(self._answer, interface="asgi3", lifespan="off", log_config=None)
        self._listener = Listener(
            self._sock, lambda: Connection(config, self.state, {}), self.state.connections, **limits
        )

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/work":
            await self.end.wait()
        body = json.dumps(scope["state"]).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def get(self, path: str) -> bytes:
        reader, writer = await asyncio.open_connection(*self.address)
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
            return await asyncio.wait_for(reader.read(), 5)
        except ConnectionError:
            return b""
        finally:
            writer.close()

    def close(self) -> None:
        self._listener.close()


def test_busy_connections_leave_a_reserve_for_health_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    from mergestream.serving.http import listener

    monkeypatch.setattr(listener, "RESERVED_CONNECTIONS", 2)

    async def talk() -> None:
        listening = Listening(most=3, per_address=10)
        busy = [asyncio.create_task(listening.get("/work")) for _ in range(3)]
        await asyncio.sleep(0.1)
        reserved = [asyncio.create_task(listening.get("/work")) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert await listening.get("/") == b""  # the reserve is busy too
        listening.end.set()
        assert all(b'"reserved": false' in answer for answer in await asyncio.gather(*busy))
        assert all(b'"reserved": true' in answer for answer in await asyncio.gather(*reserved))
        assert b'"reserved": false' in await listening.get("/")
        listening.close()

    asyncio.run(talk())


def test_a_flood_in_no_time_takes_no_connection_from_another_address() -> None:
    async def talk() -> None:
        listening = Listening(most=6, per_address=10)
        with ExitStack() as stack:
            for number in range(12):
                stack.enter_context(connected(f"http://127.0.0.1:{listening.address[1]}", own_address="127.0.0.2"))
                if number % 4 == 3:
                    assert b'"reserved": false' in await listening.get("/")
        listening.close()

    asyncio.run(talk())


def test_an_address_whose_connections_are_all_busy_gets_no_more() -> None:
    async def talk() -> None:
        listening = Listening(most=10, per_address=2)
        busy = [asyncio.create_task(listening.get("/work")) for _ in range(2)]
        await asyncio.sleep(0.1)
        assert await listening.get("/") == b""
        listening.end.set()
        assert all(await asyncio.gather(*busy))
        assert await listening.get("/")
        listening.close()

    asyncio.run(talk())


def test_accepting_without_files_is_logged_once_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mergestream.serving.http import listener

    monkeypatch.setattr(listener, "PAUSE_SECONDS", 0.01)
    limited = [True]

    class Sock:
        def __init__(self, sock: socket.socket) -> None:
            self._sock = sock

        def __getattr__(self, name: str) -> Any:
            return getattr(self._sock, name)

        def accept(self) -> Any:
            if limited[0]:
                raise OSError(24, "Too many open files")
            return self._sock.accept()

    async def talk() -> None:
        with monkeypatch.context() as patched:
            create = socket.create_server
            patched.setattr(socket, "create_server", lambda *given: Sock(create(*given)))
            listening = Listening(most=10, per_address=10)
        answer = asyncio.create_task(listening.get("/"))
        await asyncio.sleep(0.2)
        limited[0] = False
        assert await answer
        listening.close()

    listener.log.addFilter(once := listener.OncePerMinute())
    try:
        asyncio.run(talk())
    finally:
        listener.log.removeFilter(once)
    assert [record.getMessage() for record in caplog.records if record.name == listener.log.name] == [
        "no connection can be accepted: Too many open files"
    ]


def test_the_number_of_connections_fits_the_limit_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    from mergestream.serving.http import listener

    chosen: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: chosen.append(limits))
    for limits, expected, raised in (
        ((20_000, 20_000), 4096, []),
        ((1024, 1024), 1024 - 16 - 256, [(1024, 1024)]),
        ((1024, 65536), 4096, [(4368, 65536)]),
        ((1024, resource.RLIM_INFINITY), 4096, [(4368, resource.RLIM_INFINITY)]),
        ((64, 64), 16, [(64, 64)]),
    ):
        chosen.clear()
        monkeypatch.setattr(resource, "getrlimit", lambda _, limits=limits: limits)
        assert listener.most_connections(4096) == expected
        assert chosen == raised


def test_addresses_of_ipv6_are_limited_by_network() -> None:
    from mergestream.serving.http.listener import address_group

    assert address_group("192.0.2.1") == "192.0.2.1" == address_group("::ffff:192.0.2.1")
    assert address_group("2001:db8:1:2:3::4") == address_group("2001:db8:1:2::9%eth0") == "2001:db8:1:2::/64"
    assert address_group("unknown") == "unknown"


def test_the_log_has_one_line_per_kind_and_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    from mergestream.serving.http import listener

    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    once = listener.OncePerMinute()

    def passes(message: str) -> bool:
        return once.filter(logging.LogRecord("x", logging.ERROR, "f", 1, message, (), None))

    assert [passes("a"), passes("b"), passes("a"), passes("b")] == [True, True, False, False]
    now[0] += 61
    assert [passes("a"), passes("a")] == [True, False]
