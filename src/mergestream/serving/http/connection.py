"""One HTTP connection: uvicorn's, with time limits for what its client has to do: send headers, and read responses."""

import asyncio
import json
import secrets
import socket
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from mergestream.serving.http.problems import MEDIA_TYPE, Problem, document

HEADER_SECONDS = 15.0
KEEP_ALIVE_SECONDS = 15
# A client has to read so many bytes of a response in this time, or the rest of it.
READ_BYTES, READ_SECONDS = 1 << 14, 20.0
# The kernel else stores megabytes of a response, and what its client reads of those does not show here.
KERNEL_BYTES = 1 << 16


class Connection(H11Protocol):
    """`address`: whose limit of connections it counts for."""

    address = ""
    opening: asyncio.Task[None] | None = None  # until TLS is agreed on
    _headers_due: float | None = None
    _read_check: asyncio.TimerHandle | None = None

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._active_at = self.loop.time()  # when its client last sent or read something

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL_BYTES)
        transport.set_write_buffer_limits(high=1, low=0)  # so that writing is paused while anything is unsent
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_read_check()

    def waits_since(self) -> float | None:
        """Since when the client has neither sent nor read what it has to; None while the service works for it."""
        cycle = self.cycle
        working = cycle is not None and not (cycle.response_complete or cycle.more_body or self.flow.write_paused)
        return None if working else self._active_at

    def abort(self) -> None:
        if self.opening is not None:
            self.opening.cancel()
        else:
            self.transport.abort()

    def shutdown(self) -> None:
        if self.opening is not None:
            self.abort()
        else:
            super().shutdown()

    # --- what the client sends

    def data_received(self, data: bytes) -> None:
        """Stop the timer only when the headers are complete; uvicorn stops it with any byte."""
        self._active_at = self.loop.time()
        before = self.cycle
        super().data_received(data)
        if self.cycle is not before:
            self._headers_due = None
        elif self._is_idle():
            self._await_headers()

    def handle_events(self) -> None:
        """Begin a pipelined request only when the response before it has been sent."""
        if self.flow.write_paused:
            self.flow.pause_reading()
        else:
            super().handle_events()

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

    # --- what it reads

    def pause_writing(self) -> None:
        super().pause_writing()
        self._active_at = self.loop.time()
        self._check_reading_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._active_at = self.loop.time()
        self._stop_read_check()
        if self._is_idle():
            self.flow.resume_reading()
        if not self.transport.is_closing():
            self.handle_events()

    def _check_reading_later(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        self._read_check = self.loop.call_later(READ_SECONDS, self._check_reading, unsent)

    def _check_reading(self, before: int) -> None:
        if before - self.transport.get_write_buffer_size() < READ_BYTES:
            self.abort()
        else:
            self._active_at = self.loop.time()
            self._check_reading_later()

    def _stop_read_check(self) -> None:
        if self._read_check is not None:
            self._read_check.cancel()
            self._read_check = None
