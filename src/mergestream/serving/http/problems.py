"""What a client is told when a request is not answered: problem+json (RFC 9457) with one table of stable codes."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from mergestream.data.intake import REFUSALS, IntakeError
from mergestream.runtime.errors import InputError, OutputError, UnknownNameError
from mergestream.serving.audit.lines import AuditError
from mergestream.serving.engine.registry import TooManyStreamsError
from mergestream.serving.micro_batching import ClosingError, OverloadedError

MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = 2


class Kind(NamedTuple):
    """A kind of problem: its HTTP status, and what it means."""

    status: int
    title: str


# Codes are part of the interface: clients compare them. docs/service.md has the same table; a test compares the two.
OWN = {
    "malformed_http": Kind(400, "The bytes are not an HTTP request."),
    "malformed_multipart": Kind(400, "The body is not the multipart form that its content type announces."),
    "unauthorized": Kind(401, "No token, or none that this service knows."),
    "forbidden": Kind(403, "The token is known, and its role does not allow this."),
    "foreign_origin": Kind(403, "A web page of another origin may not use this service."),
    "not_found": Kind(404, "There is nothing at this address."),
    "unknown_stream": Kind(404, "There is no such stream."),
    "unknown_expert": Kind(404, "There is no such expert in the pool."),
    "method_not_allowed": Kind(405, "The address exists, and not with this method."),
    "body_too_slow": Kind(408, "The body took longer than the service's limits allow."),
    "change_refused": Kind(409, "The pool or the method does not allow this change."),
    "pool_unusable": Kind(409, "The pool on the service's disk cannot be used; the old one goes on."),
    "too_many_streams": Kind(409, "The service keeps as many streams as it may."),
    "body_too_large": Kind(413, "The body has more bytes or parts than the service's limits allow."),
    "unsupported_media_type": Kind(415, "The content type is not the one that this address takes."),
    "wrong_host": Kind(421, "The request is addressed to another host."),
    "invalid_request": Kind(422, "A name, a parameter or a field is missing, unknown or not of its form."),
    "one_picture_only": Kind(422, "This address takes one picture, and the file holds several."),
    "unusable_picture": Kind(422, "The picture was read, and the model cannot take it."),
    "rate_limited": Kind(429, "More requests than the service's rate allows."),
    "internal": Kind(500, "A fault of the service; its log has the details under the request id."),
    "loading": Kind(503, "The service is still loading its pool."),
    "closing": Kind(503, "The service is shutting down."),
    "overloaded": Kind(503, "More work waits than the service may hold."),
    "audit_unavailable": Kind(503, "The audit log cannot be written, and no answer leaves without it."),
    "not_watching": Kind(503, "The watched folder is not looked after; the service's log says why."),
    "timed_out": Kind(504, "The answer took longer than the service's limits allow."),
}  # fmt: skip
PROBLEMS = OWN | {code: Kind(refusal.status, refusal.meaning) for code, refusal in REFUSALS.items()}
PASSING = ("rate_limited", "loading", "closing", "overloaded", "audit_unavailable", "not_watching", "timed_out")


@dataclass(eq=False)
class Problem(Exception):  # noqa: N818 a word of RFC 9457
    """A request that is not answered. The sentence quotes nothing that the client sent."""

    code: str
    detail: str
    headers: dict[str, str] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> int:
        return PROBLEMS[self.code].status


class ClientGone(Exception):  # noqa: N818
    """Whoever asked has hung up: nobody is left to answer."""


def problem_of(error: Exception) -> Problem | None:
    """The problem that an error is; None where it is a fault of ours."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, IntakeError):
        more = {} if error.position is None else {"position": error.position}
        return Problem(error.code, error.sentence, more=more)
    if isinstance(error, HTTPException):
        return _of_http(error)
    if isinstance(error, RequestValidationError):
        return Problem("invalid_request", _fields(error))
    return _of_engine(error)


def _of_engine(error: Exception) -> Problem | None:
    """Sentences of AuditError and OutputError name files of this machine, which are nobody's business."""
    if isinstance(error, AuditError | OutputError):
        return Problem("audit_unavailable", "The step was not logged, so it was not taken. Send it again later.")
    if isinstance(error, OverloadedError):
        return Problem("overloaded", str(error))
    if isinstance(error, ClosingError):
        return Problem("closing", str(error))
    if isinstance(error, TooManyStreamsError):
        return Problem("too_many_streams", str(error))
    if isinstance(error, UnknownNameError):
        return Problem("unknown_stream", "There is no such stream; the first batch sent to one creates it.")
    if isinstance(error, InputError):
        return Problem("unusable_picture", str(error))
    if isinstance(error, TimeoutError):
        return Problem("timed_out", "The answer took too long. It may be in the audit log nevertheless.")
    return None


def document(problem: Problem, request_id: str) -> dict[str, Any]:
    kind = PROBLEMS[problem.code]
    return {
        "type": f"urn:mergestream:problem:{problem.code}",
        "title": kind.title,
        "status": kind.status,
        "detail": problem.detail,
        "code": problem.code,
        "request_id": request_id,
        **problem.more,
    }


def response(problem: Problem, request_id: str) -> Response:
    waiting = {"Retry-After": str(RETRY_SECONDS)} if problem.code in PASSING else {}
    headers = {**waiting, **problem.headers}
    return JSONResponse(document(problem, request_id), problem.status, headers, media_type=MEDIA_TYPE)


def _of_http(error: HTTPException) -> Problem:
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return Problem("not_found", "There is nothing at this address. /docs lists what there is.", headers)
    if error.status_code == 405:
        return Problem("method_not_allowed", "Use one of the methods in the Allow header.", headers)
    return Problem("invalid_request", "The request cannot be read.", headers)


def _fields(error: RequestValidationError) -> str:
    """Which parameters are wrong, and how. Of an unknown one not even the name is repeated."""
    sentences = []
    for each in error.errors():
        where = ["a field"] if each["type"] == "extra_forbidden" else list(map(str, each["loc"]))
        sentences.append(f"{' '.join(where)}: {each['msg']}")
    return "; ".join(dict.fromkeys(sentences)) + "."
