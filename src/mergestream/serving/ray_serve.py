"""Scale-out: engines as Ray Serve deployments, every stream pinned to one of them by its name.

Each engine is a deployment of one replica with a number, a state folder and an audit log of its own: Serve starts it
again wherever it dies, and it goes on from its folder. `PinnedEngines` stands where a local engine would stand, so the
HTTP service in front, with its tokens, limits and micro-batches, stays as it is; any number of them may run.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mergestream.errors import InputError
from mergestream.serving.answers import Answer
from mergestream.serving.batching import OverloadedError
from mergestream.serving.intake.pictures import Picture
from mergestream.serving.pinned_engine import EngineRequest, PinnedEngine, ShownLineup, Told, View
from mergestream.serving.registry import require_name

APPLICATION = "mergestream-{number}"
MOST_UNDER_WAY = 64  # batches that one engine takes at a time; its locks put them in order
RENEWED_SECONDS = 2.0
GONE = "An engine does not answer; it is being started again, and what it was doing may be in its log."
log = logging.getLogger(__name__)


class PinnedEngines:
    """An engine, and its log, to whoever asks: what is about a stream goes to the engine it is pinned to, the rest to
    all. What an event loop asks for is answered from the last views, which are renewed by every call and now and then.
    """

    def __init__(self, handles: Sequence[Any], seconds: float = 600.0) -> None:
        self._handles, self._seconds = tuple(handles), seconds
        self._views: dict[int, View] = {}
        self._renewing, self._closed = threading.Lock(), threading.Event()
        self.processes()
        threading.Thread(target=self._renew, name="engines' views", daemon=True).start()

    def place(self, stream: str) -> int:
        """The number of the engine that a stream is pinned to."""
        return place_of(require_name(stream), len(self._handles))

    @property
    def lineup(self) -> ShownLineup:
        return self._views[0].lineup

    def streams(self) -> list[dict[str, Any]]:
        found = [stream for view in self._views.values() for stream in view.streams]
        return sorted(found, key=lambda stream: str(stream["stream"]))

    @property
    def failing(self) -> str | None:
        """Why one of the logs cannot be written."""
        return next((view.failing for view in self._views.values() if view.failing is not None), None)

    def answer(self, stream: str, pictures: Sequence[Picture]) -> Answer:
        """Which DICOM object a picture came from stays here: engines know pictures by their hashes."""
        bare = [replace(picture, source=None) for picture in pictures]
        answer: Answer = self._call(self.place(stream), "answer", stream, bare)
        return answer

    def reset(self, stream: str) -> None:
        self._call(self.place(stream), "reset", stream)

    def delete(self, stream: str) -> None:
        self._call(self.place(stream), "delete", stream)

    def switch(self, expert: str, *, on: bool) -> tuple[str, ...]:
        """One engine after the other: what the first refuses changes none."""
        off: tuple[str, ...] = self._call_all("switch", expert, on=on)[-1]
        return off

    def reload(self) -> dict[str, Any]:
        told = self._call_all("reload")
        return {**told[-1], "restarted": sorted(name for each in told for name in each["restarted"])}

    def append(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """An event of the whole service: a line in every log."""
        line: dict[str, Any] = self._call_all("append", kind, dict(body))[-1]
        return line

    def processes(self) -> list[int]:
        """The engines' process numbers, each on its own machine."""
        return [self._told(number, self._handles[number].look.remote()) for number in range(len(self._handles))]

    def close(self) -> None:
        """The engines go on: others may stand in front of them too."""
        self._closed.set()

    def _call(self, number: int, *arguments: Any, **options: Any) -> Any:
        return self._told(number, self._handles[number].call.remote(*arguments, **options))

    def _call_all(self, *arguments: Any, **options: Any) -> list[Any]:
        return [self._call(number, *arguments, **options) for number in range(len(self._handles))]

    def _told(self, number: int, response: Any) -> Any:
        """An engine's refusal as itself; an engine that is gone as a reason to try again."""
        import ray

        try:
            told: Told = response.result(timeout_s=self._seconds)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except (ray.exceptions.RayError, TimeoutError) as error:
            if number in self._views:
                self._keep(number, replace(self._views[number], at=time.time_ns(), failing=GONE))
            log.error("engine %d does not answer: %s", number, type(error).__name__)
            raise OverloadedError(f"{GONE} Send this again in a moment.") from error
        self._keep(number, told.view)
        if told.refusal is not None:
            raise told.refusal
        return told.value

    def _keep(self, number: int, view: View) -> None:
        with self._renewing:
            if number not in self._views or self._views[number].at < view.at:
                self._views[number] = view

    def _renew(self) -> None:
        while not self._closed.wait(RENEWED_SECONDS):
            with suppress(OverloadedError):
                self.processes()


def start(request: EngineRequest, engines: int) -> PinnedEngines:
    """Start engines on the cluster that RAY_ADDRESS names, or on this machine, and wait until they are ready."""
    if engines < 1:
        raise InputError(f"At least one engine answers, got {engines}.")
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise InputError("Scale-out needs Ray Serve: pip install 'mergestream[scale-out]'.") from error
    if not ray.is_initialized():
        ray.init(logging_level="ERROR", log_to_driver=False)
    # Serve's own HTTP door would ask nobody for a token.
    serve.start(proxy_location="Disabled")
    deployment = serve.deployment(
        PinnedEngine,
        num_replicas=1,
        max_ongoing_requests=MOST_UNDER_WAY,
        max_constructor_retry_count=3,
        ray_actor_options={"num_cpus": 1, "num_gpus": 0 if request.device == "cpu" else 1},
    )
    targets = [
        serve.RunTarget(deployment.bind(request, number), APPLICATION.format(number=number), route_prefix=None)
        for number in range(engines)
    ]
    try:
        return PinnedEngines(serve.run_many(targets))
    except RuntimeError as error:
        raise InputError(f"The engines did not start: {error}") from error


def place_of(stream: str, engines: int) -> int:
    """Rendezvous hashing: of n + 1 engines the new one takes 1/(n + 1) of the streams, and no other stream moves."""
    return max(range(engines), key=lambda number: hashlib.sha256(f"{number}/{stream}".encode()).digest())
