"""Errors as problem documents (RFC 9457, application/problem+json), with a table of stable codes, problems.toml."""

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mergestream.data.intake.limits import REFUSALS, IntakeError, Refusal
from mergestream.runtime.errors import InputError, OutputError, UnknownNameError
from mergestream.serving.answer_queue import ClosingError, OverloadedError
from mergestream.serving.engine.registry import TooManyStreamsError
from mergestream.serving.engine.revocation_watch import NoExpertError

MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = 2
# Any URL under /v1 may answer these.
ALWAYS = (
    "unauthorized", "forbidden", "tokens_needed", "foreign_origin", "wrong_host", "rate_limited", "internal", "loading",
    "closing", "overloaded", "invalid_request",
)  # fmt: skip
EXAMPLE_DETAIL, EXAMPLE_REQUEST = "What was wrong with this request, and what to do.", "5f1c0a9e7d3b2460"


TABLE = tomllib.loads(Path(__file__).with_name("problems.toml").read_text(encoding="utf-8"))
OWN = {code: Refusal(*row) for code, row in TABLE.items()}
PROBLEMS = OWN | REFUSALS
TEMPORARY = (
    "rate_limited",
    "loading",
    "closing",
    "overloaded",
    "audit_unavailable",
    "not_watching",
    "node_failed",
    "timed_out",
)

HTTP_ERRORS = {
    404: ("not_found", "There is nothing at this URL. /docs lists all URLs."),
    405: ("method_not_allowed", "Use one of the methods in the Allow header."),
}
# In this order. Without a sentence: the error's own. Messages of OutputError name files of this machine.
ENGINE_ERRORS: tuple[tuple[type[Exception], str, str], ...] = (
    (OutputError, "audit_unavailable", "The step could not be logged, so it was not taken. Send it again later."),
    (ClosingError, "closing", ""),
    (TooManyStreamsError, "too_many_streams", ""),
    (UnknownNameError, "unknown_stream", "Unknown stream; the first batch sent to a stream creates it."),
    (NoExpertError, "no_expert", ""),
    (InputError, "unusable_picture", ""),
    (TimeoutError, "timed_out", "The answer took too long. It may be in the audit log nevertheless."),
)  # fmt: skip


@dataclass(eq=False)
class Problem(Exception):  # noqa: N818 a word of RFC 9457
    """A request that fails. `detail` quotes nothing that the client sent."""

    code: str
    detail: str
    headers: dict[str, str] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)


class ClientGone(Exception):  # noqa: N818
    """The client closed the connection."""


def problem_of(error: Exception) -> Problem | None:
    """The problem for an error; None for an internal one."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, IntakeError):
        more = {} if error.position is None else {"position": error.position}
        return Problem(error.code, error.sentence, more=more)
    if isinstance(error, HTTPException):
        code, detail = HTTP_ERRORS.get(error.status_code, ("invalid_request", "The request cannot be read."))
        return Problem(code, detail, dict(error.headers or {}))
    if isinstance(error, RequestValidationError):
        return Problem("invalid_request", _fields(error))
    if isinstance(error, OverloadedError):
        return Problem("overloaded", str(error), {"Retry-After": str(error.retry_after)})
    matches = ((code, sentence) for kind, code, sentence in ENGINE_ERRORS if isinstance(error, kind))
    return next((Problem(code, sentence or str(error)) for code, sentence in matches), None)


def document(problem: Problem, request_id: str) -> dict[str, Any]:
    problem_type = PROBLEMS[problem.code]
    return {
        "type": f"urn:mergestream:problem:{problem.code}",
        "title": problem_type.meaning,
        "status": problem_type.status,
        "detail": problem.detail,
        "code": problem.code,
        "request_id": request_id,
        **problem.more,
    }


def response(problem: Problem, request_id: str) -> Response:
    retry = {"Retry-After": str(RETRY_SECONDS)} if problem.code in TEMPORARY else {}
    headers = {**retry, **problem.headers}
    body = json.dumps(document(problem, request_id))  # in ASCII: names in a pool may hold any character
    return Response(body, PROBLEMS[problem.code].status, headers, media_type=MEDIA_TYPE)


def _fields(error: RequestValidationError) -> str:
    """Say which parameters are wrong, and how. The name of an unknown one is not repeated."""
    sentences = []
    for each in error.errors():
        where = ["a field"] if each["type"] == "extra_forbidden" else list(map(str, each["loc"]))
        sentences.append(f"{' '.join(where)}: {each['msg']}")
    return "; ".join(dict.fromkeys(sentences)) + "."


def problems(*codes: str) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route with these codes and those of ALWAYS."""
    by_status: dict[int | str, dict[str, Any]] = {}
    for code in dict.fromkeys((*codes, *ALWAYS)):
        status, title = PROBLEMS[code]
        content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}, "examples": {}}}
        entry = by_status.setdefault(status, {"description": "", "content": content})
        entry["description"] = f"{entry['description']} `{code}`: {title}".strip()
        example = {"value": document(Problem(code, EXAMPLE_DETAIL), EXAMPLE_REQUEST)}
        entry["content"][MEDIA_TYPE]["examples"][code] = example
    return by_status
