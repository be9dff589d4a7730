"""uvicorn around the application: slow connections are closed, and a signal ends it in an orderly way."""

import asyncio
import json
import logging
import secrets
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mergestream.runtime.errors import InputError
from mergestream.runtime.files import error_text
from mergestream.serving.http.application import create_app
from mergestream.serving.http.problems import MEDIA_TYPE, Problem, document
from mergestream.serving.options import ServeOptions
from mergestream.serving.service import Service

HEADER_SECONDS = 15.0
KEEP_ALIVE_SECONDS = 15
SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE_SECONDS = 30.0  # beyond the time limits of a body and an answer
log = logging.getLogger(__name__)


class Connection(H11Protocol):
    """uvicorn's connection with a time limit for headers; uvicorn would wait forever for those of the first request."""

    _headers_due: float | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        """Stop the timer only when the headers are complete; uvicorn stops it with any byte."""
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._headers_due = None
        elif self._is_idle():
            self._await_headers()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        problem = Problem("malformed_http", "Send HTTP/1.1 with complete headers of moderate size.")
        body = json.dumps(document(problem, secrets.token_hex(8))).encode()
        headers = [("content-type", MEDIA_TYPE), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _is_idle(self) -> bool:
        return not self.transport.is_closing() and (self.cycle is None or self.cycle.response_complete)

    def _await_headers(self) -> None:
        self._headers_due = self._headers_due or self.loop.time() + HEADER_SECONDS
        self.timeout_keep_alive_task = self.loop.call_at(self._headers_due, self._close_idle)

    def _close_idle(self) -> None:
        if self._is_idle():
            self.transport.close()


class Server(uvicorn.Server):
    """A signal ends the server but not the process: the caller chooses the exit code."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        self.catch_signals()
        try:
            yield
        finally:
            with suppress(NotImplementedError):
                for number in SIGNALS:
                    asyncio.get_running_loop().remove_signal_handler(number)

    def catch_signals(self) -> None:
        """Repeated while the service loads: Ray replaces the handlers, and would end the process."""
        loop = asyncio.get_running_loop()
        with suppress(NotImplementedError, RuntimeError, ValueError):  # not the main thread
            for number in SIGNALS:
                loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        """The second signal ends it without waiting for slow clients."""
        self.force_exit = self.should_exit
        self.should_exit = True


def run(service: Service, options: ServeOptions, on_ready: Callable[[str], None] = lambda _: None) -> None:
    """Serve until a signal comes; then finish accepted work and release everything."""
    with _listening(options) as sock:
        asyncio.run(_serve(service, options, sock, on_ready))


async def _serve(service: Service, options: ServeOptions, sock: socket.socket, on_ready: Callable[[str], None]) -> None:
    server, url = Server(_config(service, options)), url_of(options, sock)
    failure: list[BaseException] = []

    async def load() -> None:
        try:
            await service.start()
            server.catch_signals()
            if not server.should_exit:  # a signal may have come meanwhile
                on_ready(url)
        except BaseException as error:
            failure.append(error)
            server.should_exit = True

    async def watch_for_end() -> None:
        """From then on the service is not ready and refuses requests over open connections."""
        while not server.should_exit:
            await asyncio.sleep(0.05)
            if not loading.done():
                server.catch_signals()
        service.closing = True

    loading, watching = asyncio.create_task(load()), asyncio.create_task(watch_for_end())
    try:
        await server.serve(sockets=[sock])
    finally:
        server.should_exit = True
        await asyncio.gather(loading, watching)
        await service.stop()
    if failure:
        raise failure[0]


def _config(service: Service, options: ServeOptions) -> uvicorn.Config:
    limits = service.limits
    try:
        config = uvicorn.Config(
            create_app(service),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(limits.body_seconds + limits.answer_seconds + GRACE_SECONDS),
            limit_concurrency=4 * limits.requests,
            ssl_certfile=options.tls_cert,
            ssl_keyfile=options.tls_key,
        )
        config.load()
    except OSError as error:  # ssl.SSLError too
        raise InputError(f"The TLS certificate or its key cannot be used: {error_text(error) or error}.") from error
    return config


@contextmanager
def _listening(options: ServeOptions) -> Iterator[socket.socket]:
    """Open the listening socket, so that an address in use is an error before anything is loaded."""
    try:
        addresses = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        family, kind, protocol, _, place = addresses[0]
        # asyncio sets TCP_NODELAY only if the protocol is given; without it every answer takes 40 ms more.
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(place)
        sock.listen(1024)
    except (OSError, OverflowError) as error:
        message = f"Cannot listen at {options.host}, port {options.port}: {error}. Choose another --host or --port."
        raise InputError(message) from error
    with sock:
        yield sock


def url_of(options: ServeOptions, sock: socket.socket) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"{'https' if options.tls_cert else 'http'}://{host}:{sock.getsockname()[1]}"
