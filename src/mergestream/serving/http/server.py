"""uvicorn around the application: it listens while the service loads, and a signal ends it in an orderly way."""

import asyncio
import gc
import logging
import math
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import cast

import uvicorn

from mergestream.runtime.errors import InputError
from mergestream.runtime.files import error_text
from mergestream.serving.http import listener
from mergestream.serving.http.application import create_app
from mergestream.serving.http.connection import KEEP_ALIVE_SECONDS, Connection
from mergestream.serving.listening_socket import listening_socket
from mergestream.serving.options import ServeOptions
from mergestream.serving.service import Service

SIGNALS = (signal.SIGTERM, signal.SIGINT)
CONNECTIONS_PER_REQUEST = 4  # connections that may be open for each request that may be in progress
LIBRARIES = ("uvicorn.error", "asyncio", listener.__name__)
log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """A signal ends the server but not the process: the caller chooses the exit code."""

    def __init__(self, service: Service, options: ServeOptions) -> None:
        super().__init__(_config(service, options))
        self._service, self._options = service, options
        self._connections = cast("set[Connection]", self.server_state.connections)
        self._deadline = math.inf  # of the end, by the clock of time.monotonic

    @property
    def seconds_left(self) -> float:
        """Of the grace period."""
        return 0.0 if self.force_exit else max(0.0, self._deadline - time.monotonic())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        for name in LIBRARIES:
            logging.getLogger(name).addFilter(listener.ONCE_PER_MINUTE)
        self._listener = listener.Listener(
            sockets[0],
            lambda: Connection(self.config, self.server_state, {}),
            self._connections,
            most=listener.most_connections(CONNECTIONS_PER_REQUEST * self._service.limits.requests),
            per_address=self._options.connections_per_address,
            proxies=self._options.proxies or (),
            tls=self.config.ssl,
        )
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        if self._service.loading:  # Ray replaces the handlers of signals, and would end the process
            self.catch_signals()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002
        """Finish requests in progress until the grace period or a second signal ends; then close all connections."""
        self._service.closing = True  # so that it is not ready, and refuses requests over open connections
        self._listener.close()
        self._deadline = time.monotonic() + self._options.grace_seconds
        connections, tasks = self._connections, self.server_state.tasks
        for connection in list(connections):
            connection.shutdown()
        while (connections or tasks) and self.seconds_left:
            await asyncio.sleep(0.05)
        if connections or tasks:
            log.warning("%d connections and %d requests were cut off at the end", len(connections), len(tasks))
        for connection in list(connections):
            connection.abort()
        await asyncio.sleep(0)  # until they are lost
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1)

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
    with listening_socket(options.host, options.port, backlog=1024) as sock:
        asyncio.run(_serve(service, options, sock, on_ready))


async def _serve(service: Service, options: ServeOptions, sock: socket.socket, on_ready: Callable[[str], None]) -> None:
    server, url = Server(service, options), _url_of(options, sock)

    async def load() -> None:
        try:
            await service.start()
            gc.collect()
            gc.freeze()  # pool and libraries stay for good: without them a collection takes a fraction of the time
            gc.enable()  # the command line switches it off while they are loaded
            server.catch_signals()
            if not server.should_exit:  # a signal may have come meanwhile
                on_ready(url)
        except BaseException:
            server.should_exit = True
            raise

    loading = asyncio.create_task(load())
    try:
        await server.serve(sockets=[sock])
    finally:
        server.should_exit = True
        await asyncio.wait([loading])
        await service.stop(server.seconds_left)
    await loading


def _config(service: Service, options: ServeOptions) -> uvicorn.Config:
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
            ssl_certfile=options.tls_cert,
            ssl_keyfile=options.tls_key,
        )
        config.load()
    except OSError as error:  # ssl.SSLError too
        raise InputError(f"The TLS certificate or its key cannot be used: {error_text(error) or error}.") from error
    return config


def _url_of(options: ServeOptions, sock: socket.socket) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    return f"{'https' if options.tls_cert else 'http'}://{host}:{sock.getsockname()[1]}"
