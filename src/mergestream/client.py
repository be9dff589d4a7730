"""A client of the service, in one file that needs httpx only: `Client(url, token).answer(files)`.

**Repeats.** A request is sent again only where that cannot take a step twice, because every step moves the averages of
its stream and is logged. Always safe: no connection could be opened (nothing was sent), and the refusals 429 and 503 of
the service (it refuses before a step). A connection that breaks after the request was sent, or an answer that is late,
is safe to repeat for reads only; for images and changes it is `UncertainOutcome`, and the audit log has the truth.
"""

import base64
import random
import ssl
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

try:
    import httpx
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("mergestream.client needs httpx: pip install 'mergestream[client]'.") from error

ImageFile = str | Path | bytes
ByName = Mapping[str, float | None]
TIMEOUT, CONNECT_SECONDS = 130.0, 5.0  # the service itself gives up after 120 s
RETRIES, FIRST_PAUSE, LONGEST_PAUSE = 4, 0.3, 30.0
# Refusals of the service before it took a step. Others with these statuses come from something in between.
REFUSED_BEFORE_A_STEP = ("rate_limited", "loading", "closing", "overloaded", "audit_unavailable")
NOTHING_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
TEMPORARY = (429, 502, 503, 504)
SAME_NAMES = (  # fields of an answer and of its document
    "stream", "step", "encoder_coefficients", "head_coefficients", "entropies", "head_expert", "pool_hash",
    "model_hash", "depends_on_batch",
)  # fmt: skip


class ClientError(Exception):
    """Base of all errors of the client."""


class ServiceProblem(ClientError):  # noqa: N818 a word of RFC 9457
    """A refusal by the service. Compare `code`, which is stable; `str` is a sentence for people."""

    def __init__(self, status: int, code: str, detail: str, request_id: str | None, position: int | None) -> None:
        super().__init__(f"{detail} ({code}, HTTP {status})")
        self.status, self.code, self.detail = status, code, detail
        self.request_id, self.position = request_id, position  # position of a refused file, from 0


class ServiceUnreachable(ClientError):  # noqa: N818
    """No connection to the service, so nothing was done."""


class UncertainOutcome(ClientError):  # noqa: N818
    """The request was sent and no answer came: the step may have been taken. The audit log has it, if so."""


@dataclass(frozen=True)
class ServiceFinding:
    """Finding of a guard."""

    code: str
    severity: str
    sentence: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AnsweredImage:
    """Result for one image. `prediction` is None if the service abstains; `abstained_because` has the reasons."""

    prediction: str | None
    probabilities: Mapping[str, float]
    abstained_because: tuple[str, ...]
    prediction_set: tuple[str, ...] | None  # classes that hold the true one with the chosen chance; None: none is made
    report: bytes | None = field(repr=False)  # a DICOM structured report, if asked for


@dataclass(frozen=True)
class ServiceAnswer:
    """Answer to a batch. `document` is the whole JSON document."""

    stream: str
    step: int
    images: tuple[AnsweredImage, ...]
    encoder_coefficients: ByName | None
    head_coefficients: ByName | None
    entropies: ByName | None
    head_expert: str | None
    pool_hash: str
    model_hash: str | None
    findings: tuple[ServiceFinding, ...]
    audit_sequence: int | None
    audit_hash: str | None
    depends_on_batch: bool
    parts: tuple["ServiceAnswer", ...]  # the answer to each image, if they were answered one by one
    document: Mapping[str, Any] = field(repr=False, compare=False)

    @property
    def predictions(self) -> tuple[str | None, ...]:
        return tuple(image.prediction for image in self.images)

    @property
    def prediction_sets(self) -> tuple[tuple[str, ...], ...] | None:
        """Per image, with --prediction-sets; else None."""
        return tuple(each.prediction_set for each in self.images if each.prediction_set is not None) or None

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "ServiceAnswer":
        line = document["audit"] or {}
        return cls(
            **{name: document[name] for name in SAME_NAMES},
            images=_images(document),
            findings=tuple(_finding(each) for each in document["findings"]),
            audit_sequence=line.get("sequence"),
            audit_hash=line.get("hash"),
            parts=tuple(map(cls.of, document.get("images") or ())),
            document=document,
        )


@dataclass(frozen=True)
class StreamSummary:
    """Status of a stream. `alarms` is None if they are unknown since a restart. `document`: the JSON document."""

    name: str
    steps: int
    images: int
    last_step_at: str | None
    alarms: tuple[ServiceFinding, ...] | None
    document: Mapping[str, Any] = field(repr=False, compare=False)

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> "StreamSummary":
        alarms = None if document["alarms"] is None else tuple(_finding(each) for each in document["alarms"])
        copied = {name: document[name] for name in ("name", "steps", "images", "last_step_at")}
        return cls(**copied, alarms=alarms, document=document)


class Client:
    """Calls of one service. Use it in `with`, or call `close`. Threads may share it."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        timeout: float = TIMEOUT,
        retries: int = RETRIES,
        ca_file: str | Path | None = None,
    ) -> None:
        """`retries`: how often a request is sent again where that is safe. `ca_file`: the hospital's own authority."""
        if not url.startswith(("http://", "https://")):
            raise ClientError("The address of the service begins with http:// or https://.")
        if retries < 0:
            raise ClientError(f"retries is 0 or more; got {retries}.")
        self._retries = retries
        self._http = httpx.Client(
            base_url=url,
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS)),
            verify=True if ca_file is None else ssl.create_default_context(cafile=str(ca_file)),
        )

    def answer(
        self, files: Iterable[ImageFile], stream: str = "default", *, single: bool = False, reports: bool = False
    ) -> ServiceAnswer:
        """Answer a batch of files: paths, or their bytes. `single`: one by one. `reports`: one per DICOM image."""
        return self._post_images(files, stream, "batches", {"single": "true"} if single else {}, reports)

    def answer_image(self, file: ImageFile, stream: str = "default", *, reports: bool = False) -> ServiceAnswer:
        """Answer one image from itself and the stream's past alone."""
        return self._post_images([file], stream, "images", {}, reports)

    def streams(self) -> list[StreamSummary]:
        """The streams that the token may read."""
        return [StreamSummary.of(each) for each in self._get("/v1/streams")["streams"]]

    def stream(self, name: str) -> StreamSummary:
        """Status of a stream. The first batch that is sent to a stream creates it."""
        return StreamSummary.of(self._get(_stream_path(name)))

    def recent(self, name: str, after: int = -1) -> list[Mapping[str, Any]]:
        """The last 200 steps of a stream, or those of them after this number."""
        return list(self._get(_stream_path(name, "recent"), after=after)["steps"])

    def reset(self, name: str) -> StreamSummary:
        """Reset the averages of a stream (administrator)."""
        return StreamSummary.of(self._send("POST", _stream_path(name, "reset")).json())

    def delete(self, name: str) -> None:
        """Delete a stream; its lines stay in the audit log (administrator)."""
        self._send("DELETE", _stream_path(name))

    def pool(self) -> Mapping[str, Any]:
        """The experts' cards, the method and its options."""
        return self._get("/v1/pool")

    def switch(self, expert: str, *, on: bool) -> None:
        """Switch an expert on or off (administrator)."""
        self._send("PUT", f"/v1/pool/experts/{quote(expert, safe='')}", json={"on": on})

    def ready(self) -> bool:
        """Whether the service takes images now."""
        try:
            return self._http.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _post_images(
        self, files: Iterable[ImageFile], stream: str, door: str, options: dict[str, str], reports: bool
    ) -> ServiceAnswer:
        if isinstance(files, str | bytes | Path) or not (files := list(files)):
            raise ClientError("Give a list of at least one file; answer_image takes a single one.")
        # File names may name patients, so they stay here.
        contents = (file if isinstance(file, bytes) else Path(file).read_bytes() for file in files)
        form = [("images", (f"image-{place}", content)) for place, content in enumerate(contents)]
        query = {**options, **({"report": "dicom-sr"} if reports else {})}
        return ServiceAnswer.of(self._send("POST", _stream_path(stream, door), files=form, params=query).json())

    def _get(self, path: str, **query: Any) -> dict[str, Any]:
        return self._send("GET", path, params=query).json()

    def _send(self, method: str, path: str, **more: Any) -> httpx.Response:
        """Send a request, and again where that is safe. Only a response with a status below 400 is returned."""
        for left in range(self._retries, -1, -1):
            doubled = FIRST_PAUSE * 2 ** (self._retries - left)
            pause = min(LONGEST_PAUSE, doubled * random.uniform(1, 2))  # noqa: S311 no secret
            try:
                response = self._http.request(method, path, **more)
            except httpx.TransportError as error:
                if not left or not (isinstance(error, NOTHING_SENT) or method == "GET"):
                    raise _lost(error) from error
            else:
                if response.is_success:
                    return response
                problem = _problem_of(response)
                pause = max(pause, _retry_after(response))
                if not left or pause > LONGEST_PAUSE or not _safe_to_repeat(problem, method):
                    raise problem
            time.sleep(pause)
        raise AssertionError("unreachable")


def _stream_path(name: str, *more: str) -> str:
    return "/".join(["/v1/streams", quote(name, safe=""), *more])


def _safe_to_repeat(problem: ServiceProblem, method: str) -> bool:
    return problem.status in TEMPORARY and (problem.code in REFUSED_BEFORE_A_STEP or method == "GET")


def _lost(error: httpx.TransportError) -> ClientError:
    kind = type(error).__name__
    if isinstance(error, NOTHING_SENT):
        return ServiceUnreachable(f"The service cannot be reached ({kind}). Nothing was sent.")
    return UncertainOutcome(f"The request was sent, but no answer came ({kind}). Its step may be in the audit log.")


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the service asks to wait; 0 if it does not."""
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdecimal() else 0.0


def _problem_of(response: httpx.Response) -> ServiceProblem:
    """The service's problem document; or a problem `http_NNN` for a response of something in between."""
    try:
        document = response.json()
        code, detail = document["code"], document["detail"]
    except (ValueError, KeyError, TypeError):
        sentence = "The response is not of the service, but of something in between."
        return ServiceProblem(response.status_code, f"http_{response.status_code}", sentence, None, None)
    return ServiceProblem(response.status_code, code, detail, document.get("request_id"), document.get("position"))


def _finding(document: Mapping[str, Any]) -> ServiceFinding:
    return ServiceFinding(document["code"], document["severity"], document["sentence"], document.get("numbers") or {})


def _images(document: Mapping[str, Any]) -> tuple[AnsweredImage, ...]:
    classes, predictions = document["classes"], document["predictions"]
    sets, reports = (document.get(name) or [None] * len(predictions) for name in ("prediction_set", "reports"))
    chosen = (None if each is None else tuple(each) for each in sets)
    files = (None if each is None else base64.b64decode(each) for each in reports)
    rows = zip(predictions, document["probabilities"], document["abstained_because"], chosen, files, strict=True)
    return tuple(
        AnsweredImage(prediction, dict(zip(classes, shares, strict=True)), tuple(because or ()), own_set, file)
        for prediction, shares, because, own_set, file in rows
    )
