"""The webhook: a small JSON document to a URL of the operator when an alarm begins."""

import json
import logging
import queue
import threading
import urllib.request
from collections.abc import Iterable
from http.client import HTTPException
from typing import Any

from mergestream.runtime.errors import InputError
from mergestream.runtime.option_checks import is_http_url
from mergestream.serving.guards.findings import Alarm

MOST_WAITING, TRIES = 256, 6
log = logging.getLogger(__name__)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Refuse: the operator named one address, and a redirected POST would become a GET."""


class Webhook:
    """Sends in a thread of its own, so that no answer waits. What does not fit into its queue is dropped and logged."""

    def __init__(self, url: str, *, timeout: float = 10.0, pause: float = 1.0) -> None:
        """`timeout`: seconds for one try. `pause`: seconds before the second try; it doubles with each."""
        if not is_http_url(url, with_user=True):
            raise InputError("--webhook takes the URL that alarms are sent to, beginning with http:// or https://.")
        self._url, self._timeout, self._pause = url, timeout, pause
        self._opener = urllib.request.build_opener(_NoRedirects)
        self._waiting: queue.Queue[bytes | None] = queue.Queue(MOST_WAITING)
        self._closing = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._work, name="webhook", daemon=True)
        self._thread.start()

    def send(self, stream: str, alarms: Iterable[Alarm]) -> None:
        """Send alarms that have just begun. Returns at once."""
        for alarm in alarms:
            shown = {name: getattr(alarm, name) for name in ("code", "severity", "sentence", "next", "step")}
            document = {"stream": stream, **shown, "time": alarm.since}
            try:
                self._waiting.put_nowait(json.dumps(document).encode())
            except queue.Full:
                self._failed(f"{MOST_WAITING} alarms wait already")

    def close(self, seconds: float = 5.0) -> None:
        """Try what waits once more, for a few seconds at most."""
        self._closing.set()
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(seconds)

    def _work(self) -> None:
        while (document := self._waiting.get()) is not None:
            for number in range(TRIES):
                if self._posted(document) or self._closing.wait(self._pause * 2**number):
                    break

    def _posted(self, document: bytes) -> bool:
        request = urllib.request.Request(self._url, document, {"Content-Type": "application/json"})  # noqa: S310 http(s) only
        try:
            with self._opener.open(request, timeout=self._timeout):
                pass
        except (OSError, ValueError, HTTPException) as error:  # an answer of 300 or more is an OSError, too
            self._failed(type(error).__name__ if not str(error) else str(error))
            return False
        if self._failing:
            log.info("the webhook works again")
        self._failing = False
        return True

    def _failed(self, why: str) -> None:
        if not self._failing:
            log.warning("an alarm could not be sent to the webhook: %s", why)
        self._failing = True
