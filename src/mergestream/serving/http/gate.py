"""What every request passes: an id, the questions who asks and how often, and a problem for whatever goes wrong."""

import asyncio
import ipaddress
import logging
import secrets
import time
import traceback
from contextlib import suppress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mergestream.serving.http.problems import ClientGone, Problem, problem_of, response
from mergestream.serving.http.tokens import ADMINISTRATOR, EVERYONE, Holder
from mergestream.serving.micro_batching import ClosingError, OverloadedError
from mergestream.serving.service import Service

log = logging.getLogger(__name__)
access = logging.getLogger("mergestream.serving.access")
READING = ("GET", "HEAD", "OPTIONS")
PICTURES = ("/batches", "/images")
GUARDED = ("/v1/", "/metrics")  # all else is the same on every machine, or says no more than 'ready'
CLIENT_GONE = 499
DRAINED_BYTES, DRAINED_SECONDS = 8 << 20, 2.0
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; connect-src 'self'; "
        "base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Gate:
    """ASGI middleware around all routes."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008})
            return
        passage = _Passage(scope, receive, send)
        self._service.under_way += 1
        try:
            await self._answered(passage)
        finally:
            self._service.under_way -= 1
            self._account(passage)

    async def _answered(self, passage: "_Passage") -> None:
        try:
            self._admit(passage)
            await self._app(passage.scope, passage.receive, passage.send)
        except ClientGone:
            passage.status = passage.status or CLIENT_GONE
        except Exception as error:
            if passage.status:  # too late for another answer: uvicorn breaks the connection off
                _log_fault(error, passage.request_id)
                return
            problem = problem_of(error)
            if problem is None:
                _log_fault(error, passage.request_id)
                problem = Problem("internal", "Tell the operator of the service the request id.")
            await passage.refuse(problem)

    def _admit(self, passage: "_Passage") -> None:
        """Before a byte of the body is read."""
        service, headers = self._service, passage.headers
        if service.closing:
            raise ClosingError("The service is shutting down. Send this again when it is back.")
        self._require_own_page(headers)
        if not passage.path.startswith(GUARDED):
            return
        passage.holder = EVERYONE if service.tokens is None else self._holder(headers, passage.address)
        passage.scope["state"]["holder"] = passage.holder
        service.rates.admit(passage.address if service.tokens is None else f"token {passage.holder.name}")
        if passage.needs_administrator and passage.holder.role != ADMINISTRATOR:
            raise Problem("forbidden", "Only an administrator's token may change streams and the pool.")
        if service.under_way > service.limits.requests:
            raise OverloadedError("Too many requests are under way. Try again in a moment.")

    def _require_own_page(self, headers: Headers) -> None:
        """A browser on this machine must not be made to use a service that asks for no token."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if origin is not None and _authority(origin) != host:
            raise Problem("foreign_origin", "Open the dashboard from this service, or use a client that is no browser.")
        if self._service.hosts is not None and _name_of(host) not in self._service.hosts:
            raise Problem("wrong_host", "Address the service as it was started, for instance as 127.0.0.1.")

    def _holder(self, headers: Headers, address: str) -> Holder:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        assert self._service.tokens is not None
        found = self._service.tokens.holder_of(token.strip()) if scheme.lower() == "bearer" else None
        if found is None:
            self._service.rates.admit(f"unknown at {address}")
            said = "Send the header 'Authorization: Bearer TOKEN' with a token of this service."
            raise Problem("unauthorized", said, {"WWW-Authenticate": "Bearer"})
        return found

    def _account(self, passage: "_Passage") -> None:
        """Counted and logged by route: what a client wrote into an address stays out of both."""
        seconds = time.perf_counter() - passage.started
        status = passage.status or CLIENT_GONE
        pictures = passage.method == "POST" and passage.route.endswith(PICTURES)
        self._service.metrics.request(passage.method, passage.route, status, seconds, pictures=pictures)
        about = {
            "request_id": passage.request_id,
            "method": passage.method,
            "route": passage.route,
            "status": status,
            "milliseconds": round(1000 * seconds, 1),
            "token": passage.holder.name if passage.holder else None,
        }
        access.info("%(request_id)s %(method)s %(route)s %(status)s %(milliseconds)s ms %(token)s", about)


class _Passage:
    """One request on its way through the gate."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.started = time.perf_counter()
        self.scope, self._receive, self._send = scope, receive, send
        self.headers = Headers(scope=scope)
        self.path = scope["path"]
        self.request_id = secrets.token_hex(8)
        scope.setdefault("state", {})["request_id"] = self.request_id
        self.address = (scope.get("client") or ("unknown", 0))[0]
        self.holder: Holder | None = None
        self.status = 0
        self._body_read, self._touched = False, False

    @property
    def method(self) -> str:
        known = (*READING, "POST", "PUT", "DELETE", "PATCH")
        return self.scope["method"] if self.scope["method"] in known else "other"

    @property
    def route(self) -> str:
        return getattr(self.scope.get("route"), "path", "unmatched")

    @property
    def needs_administrator(self) -> bool:
        return self.scope["method"] not in READING and not self.path.endswith(PICTURES)

    async def receive(self) -> Message:
        self._touched = True
        message = await self._receive()
        self._body_read = message["type"] == "http.disconnect" or not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-ID"] = self.request_id
            for name, value in HEADERS.items():
                headers.setdefault(name, value)
        await self._send(message)

    async def refuse(self, problem: Problem) -> None:
        await self._drain()
        if not self._body_read and self._announces_body():  # the rest of it must not be read as the next request
            problem.headers["Connection"] = "close"
        await response(problem, self.request_id)(self.scope, self.receive, self.send)

    def _announces_body(self) -> bool:
        return "transfer-encoding" in self.headers or self.headers.get("content-length", "0") != "0"

    async def _drain(self) -> None:
        """Take in a little of what is on its way: most clients read an answer only after they have sent all."""
        if self._body_read or not self._announces_body() or (not self._touched and "expect" in self.headers):
            return
        left = DRAINED_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAINED_SECONDS):
                while not self._body_read and left > 0:
                    left -= len((await self.receive()).get("body", b""))


def _authority(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def _name_of(host: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _log_fault(error: Exception, request_id: str) -> None:
    """Where it happened, without the error's own words: they may quote what a client sent."""
    where = "".join(traceback.format_tb(error.__traceback__))
    log.error("request %s failed: %s\n%s", request_id, type(error).__name__, where)
