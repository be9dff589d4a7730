"""Accepting connections: limits in all and per address, a reserve for health checks, and no flood of log lines."""

import asyncio
import ipaddress
import logging
import resource
import socket
import ssl
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from mergestream.runtime.files import error_text
from mergestream.serving.http.connection import Connection

RESERVED_CONNECTIONS = 16  # beyond the limit, for health checks
RESERVED_FILES = 256  # for logs, states and decoders
ACCEPTED_AT_ONCE = 64
PATIENCE_SECONDS = 0.5  # a client that has waited for less keeps its connection
PAUSE_SECONDS = 0.2  # when the system has no files or memory left
TLS_SECONDS = {"ssl_handshake_timeout": 10.0, "ssl_shutdown_timeout": 5.0}
log = logging.getLogger(__name__)


class Listener:
    """Accepts connections in place of asyncio's server, which would accept all of them.

    At a limit the connection that has waited longest for its client is closed: idle clients lose their connections to
    active ones.
    """

    def __init__(
        self,
        sock: socket.socket,
        connect: Callable[[], Connection],
        connections: set[Connection],
        *,
        most: int,
        per_address: int,
        proxies: Iterable[str] = (),
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`connections`: those that are open, kept by uvicorn. `proxies`: addresses without a limit of their own."""
        self._sock, self._connect, self._connections, self._tls = sock, connect, connections, tls
        self._most, self._per_address, self._proxies = most, per_address, set(map(address_group, proxies))
        self._loop = asyncio.get_running_loop()
        self._closed = False
        sock.setblocking(False)
        self._resume()

    def close(self) -> None:
        self._closed = True
        self._loop.remove_reader(self._sock)
        self._sock.close()

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, peer = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("no connection can be accepted: %s", error_text(error))
                self._close_longest_waiting(self._connections)
                self._loop.remove_reader(self._sock)
                self._loop.call_later(PAUSE_SECONDS, self._resume)
                return
            address = address_group(peer[0])
            reserved = self._place(address)
            if reserved is None:
                sock.close()
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or every answer takes 40 ms more
            connection = self._connect()
            # A reserved one answers only health checks: the gate reads this from the request's state.
            connection.address, connection.app_state = address, {"reserved": reserved}
            self._connections.add(connection)
            connection.opening = self._loop.create_task(self._open(sock, connection))

    def _place(self, address: str) -> bool | None:
        """Whether a new connection is one of the reserve; None if there is no room for it."""
        own = [each for each in self._connections if each.address == address]
        if address not in self._proxies and len(own) >= self._per_address and not self._close_longest_waiting(own):
            log.warning("connections refused: an address has %d (--connections-per-address)", self._per_address)
            return None
        if len(self._connections) < self._most or self._close_longest_waiting(self._connections):
            return False
        if self._close_one_of_the_largest(len(own)):  # many connections in little time: none has waited for long
            return False
        reserve = [each for each in self._connections if each.app_state["reserved"]]
        log.warning("all %d connections are in use; more are only for health checks", self._most)
        return True if len(reserve) < RESERVED_CONNECTIONS or self._close_longest_waiting(reserve) else None

    def _close_one_of_the_largest(self, own: int) -> bool:
        """Close a connection of the address that has most of them, if an address with `own` is owed it."""
        by_address = defaultdict(list)
        for each in self._connections:
            if each.address not in self._proxies:
                by_address[each.address].append(each)
        largest = max(by_address.values(), key=len, default=[])
        return len(largest) > own + 1 and self._close_longest_waiting(largest, patience=0)

    def _close_longest_waiting(self, connections: Iterable[Connection], patience: float | None = None) -> bool:
        latest = self._loop.time() - (PATIENCE_SECONDS if patience is None else patience)
        waiting = {each: since for each in connections if (since := each.waits_since()) is not None and since <= latest}
        if not waiting:
            return False
        victim = min(waiting, key=waiting.__getitem__)
        self._connections.discard(victim)
        victim.abort()
        return True

    async def _open(self, sock: socket.socket, connection: Connection) -> None:
        times = TLS_SECONDS if self._tls else {}
        try:
            await self._loop.connect_accepted_socket(lambda: connection, sock, ssl=self._tls, **times)
        except (OSError, asyncio.CancelledError):  # no TLS agreed on, or closed by a limit
            self._connections.discard(connection)
            sock.close()
        finally:
            connection.opening = None


def address_group(host: str) -> str:
    """Whose limit an address counts for: its own, or in IPv6 that of its network of 64 bits."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False))


def most_connections(wish: int) -> int:
    """Raise the process's limit of open files as far as needed; return how many connections it allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wish + RESERVED_CONNECTIONS + RESERVED_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        wish = min(wish, max(soft - RESERVED_CONNECTIONS - RESERVED_FILES, soft // 4))
    return wish


class OncePerMinute(logging.Filter):
    """Lets a kind of log line through once per minute: floods of connections must not fill the disk."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = defaultdict(lambda: -60.0)

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now = str(record.msg).partition("\n")[0][:60], time.monotonic()
        if now - self._last[kind] < 60:
            return False
        self._last[kind] = now
        return True


ONCE_PER_MINUTE = OncePerMinute()
