"""Middleware for every request: request id, roles, rate limit, and a problem document for every error."""

import asyncio
import ipaddress
import logging
import random
import time
import traceback
from contextlib import suppress
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mergestream.serving.answer_queue import ClosingError, OverloadedError
from mergestream.serving.http.problems import ClientGone, Problem, problem_of, response
from mergestream.serving.http.tokens import ADMINISTRATOR, ANYONE, EVERYONE, HEALTH, Holder
from mergestream.serving.service import Service
from mergestream.serving.tracing import span

log = logging.getLogger(__name__)
access = logging.getLogger("mergestream.serving.access")
METHODS = ("GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "PATCH")
IMAGE_ROUTES = ("/batches", "/images")
FORWARDED = ("forwarded", "via", "x-real-ip", "x-forwarded-")
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
TLS_HEADERS = {"Strict-Transport-Security": "max-age=31536000"}


class Gate:
    """ASGI middleware around all routes."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # the server offers nothing else
            return
        exchange = _Exchange(scope, receive, send)
        self._service.requests_in_progress += 1
        with span("request") as about:
            try:
                await self._respond(exchange)
            finally:
                self._service.requests_in_progress -= 1
                fields = self._record(exchange)
                about |= {name: fields[name] for name in ("request_id", "method", "route", "status")}

    async def _respond(self, exchange: "_Exchange") -> None:
        try:
            self._admit(exchange)
            await self._app(exchange.scope, exchange.receive, exchange.send)
        except (ClientGone, asyncio.CancelledError):  # cancelled: the service ends and has closed the connection
            exchange.status = exchange.status or CLIENT_GONE
        except Exception as error:
            if exchange.status:  # too late for another response: uvicorn closes the connection
                _log_fault(error, exchange.request_id)
                return
            problem = problem_of(error)
            if problem is None:
                _log_fault(error, exchange.request_id)
                problem = Problem("internal", "Give the request id to the operator of the service.")
            await exchange.refuse(problem)

    def _admit(self, exchange: "_Exchange") -> None:
        """Check the request before its body is read and before anything of its route runs."""
        service, scope = self._service, exchange.scope
        if service.closing:
            raise ClosingError("The service is shutting down. Send this again when it is back.")
        self._require_own_caller(exchange)
        role, stream = _role_and_stream(scope)
        if role == HEALTH:
            return
        if scope["state"].get("reserved") or service.requests_in_progress > service.limits.requests:
            raise OverloadedError("Too many requests or connections are open. Try again in a moment.")
        if role == ANYONE:
            service.rates.admit(f"pages at {exchange.address}")
            return
        holder = exchange.holder = scope["state"]["holder"] = self._holder(exchange)
        service.rates.admit(exchange.address if holder is EVERYONE else f"token {holder.name}")
        if role == ADMINISTRATOR != holder.role:
            raise Problem("forbidden", "Only an administrator's token may change streams and the pool.")
        if stream is not None:
            service.owners.require(stream, holder)

    def _require_own_caller(self, exchange: "_Exchange") -> None:
        """No web page may make a browser on this machine, and no proxy, use a service that needs no token."""
        headers, service = exchange.headers, self._service
        host, origin = headers.get("host", ""), headers.get("origin")
        if origin not in (None, f"http://{host}", f"https://{host}"):
            raise Problem(
                "foreign_origin", "Open the dashboard from this service, or use a client other than a browser."
            )
        if service.hosts is not None and _name_of(host) not in service.hosts:
            raise Problem("wrong_host", "Address the service as it was started, for instance as 127.0.0.1.")
        forwarded = any(name.startswith(FORWARDED) for name in headers)
        if service.tokens is None and (forwarded or not is_loopback(exchange.address)):
            raise Problem("tokens_needed", "Make tokens with 'mergestream serve-token' and start it with --tokens.")

    def _holder(self, exchange: "_Exchange") -> Holder:
        tokens = self._service.tokens
        if tokens is None:
            return EVERYONE
        scheme, _, token = exchange.headers.get("authorization", "").partition(" ")
        holder = tokens.holder_of(token.strip()) if scheme.lower() == "bearer" else None
        if holder is None:
            self._service.rates.admit(f"unknown at {exchange.address}")
            detail = "Send the header 'Authorization: Bearer TOKEN' with a token of this service."
            raise Problem("unauthorized", detail, {"WWW-Authenticate": "Bearer"})
        return holder

    def _record(self, exchange: "_Exchange") -> dict[str, Any]:
        """Count and log the request by its route: text from the client's URL is in neither."""
        seconds = time.perf_counter() - exchange.started
        status = exchange.status or CLIENT_GONE
        method = exchange.scope["method"] if exchange.scope["method"] in METHODS else "other"
        route = getattr(exchange.scope.get("route"), "path", "unmatched")
        with_images = method == "POST" and route.endswith(IMAGE_ROUTES)
        self._service.metrics.request(method, route, status, seconds, with_images=with_images)
        fields = {
            "request_id": exchange.request_id,
            "method": method,
            "route": route,
            "status": status,
            "milliseconds": round(1000 * seconds, 1),
            "token": exchange.holder.name if exchange.holder else None,
        }
        access.info("%(request_id)s %(method)s %(route)s %(status)s %(milliseconds)s ms %(token)s", fields)
        return fields


class _Exchange:
    """One request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.started = time.perf_counter()
        self.scope, self._receive, self._send = scope, receive, send
        self.headers = Headers(scope=scope)
        self.request_id = f"{random.getrandbits(64):016x}"  # a name, not a secret
        scope.setdefault("state", {})["request_id"] = self.request_id
        self.address = (scope.get("client") or ("unknown", 0))[0]
        self.holder: Holder | None = None
        self.status = 0
        self._body_read, self._touched = False, False

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
            for name, value in (HEADERS | (TLS_HEADERS if self.scope["scheme"] == "https" else {})).items():
                headers.setdefault(name, value)
        await self._send(message)

    async def refuse(self, problem: Problem) -> None:
        await self._drain()
        if not self._body_read and self._announces_body():  # its rest must not be read as the next request
            problem.headers["Connection"] = "close"
        await response(problem, self.request_id)(self.scope, self.receive, self.send)

    def _announces_body(self) -> bool:
        return "transfer-encoding" in self.headers or self.headers.get("content-length", "0") != "0"

    async def _drain(self) -> None:
        """Read some of the body: most clients read the response only after sending all of it."""
        if self._body_read or not self._announces_body() or (not self._touched and "expect" in self.headers):
            return
        left = DRAINED_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(DRAINED_SECONDS):
                while not self._body_read and left > 0:
                    left -= len((await self.receive()).get("body", b""))


def _role_and_stream(scope: Scope) -> tuple[str, str | None]:
    """The role that the request's route declares, and the stream in its path. A route without one: administrators."""
    for route in scope["app"].routes:
        match, details = route.matches(scope)
        if match is Match.FULL:
            role = getattr(details.get("endpoint"), "role", ADMINISTRATOR)
            return role, details.get("path_params", {}).get("stream")
    return ANYONE, None  # no route runs: 404 or 405


def _name_of(host: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


@lru_cache(maxsize=1024)
def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _log_fault(error: Exception, request_id: str) -> None:
    """Log where it happened, without the error's message: it may quote what a client sent."""
    where = "".join(traceback.format_tb(error.__traceback__))
    log.error("request %s failed: %s\n%s", request_id, type(error).__name__, where)
