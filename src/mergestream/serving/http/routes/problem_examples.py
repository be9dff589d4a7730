"""How problems stand in the OpenAPI document: by status, with an example for every code."""

from typing import Any

from mergestream.serving.http.problems import MEDIA_TYPE, PROBLEMS
from mergestream.serving.http.schemas import ProblemDocument

# What any address under /v1 may answer.
ALWAYS = (
    "unauthorized", "forbidden", "foreign_origin", "wrong_host", "rate_limited", "internal", "loading", "closing",
    "overloaded", "invalid_request",
)  # fmt: skip


def problems(*codes: str) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may answer these codes beside those that all do."""
    by_status: dict[int | str, dict[str, Any]] = {}
    for code in dict.fromkeys((*codes, *ALWAYS)):
        kind = PROBLEMS[code]
        entry = by_status.setdefault(kind.status, {"model": ProblemDocument, "description": ""})
        entry["description"] = f"{entry['description']} `{code}`: {kind.title}".strip()
        content = entry.setdefault("content", {MEDIA_TYPE: {"examples": {}}})
        content[MEDIA_TYPE]["examples"][code] = {"value": example(code)}
    return by_status


def example(code: str) -> dict[str, Any]:
    kind = PROBLEMS[code]
    return {
        "type": f"urn:mergestream:problem:{code}",
        "title": kind.title,
        "status": kind.status,
        "detail": "What was wrong with this request, and what to do.",
        "code": code,
        "request_id": "5f1c0a9e7d3b2460",
    }
