"""Problems in the OpenAPI document: by status, with an example per code."""

from typing import Any

from mergestream.serving.http.problems import MEDIA_TYPE, PROBLEMS, Problem, document
from mergestream.serving.http.schemas import ProblemDocument

# Any URL under /v1 may answer these.
ALWAYS = (
    "unauthorized", "forbidden", "foreign_origin", "wrong_host", "rate_limited", "internal", "loading", "closing",
    "overloaded", "invalid_request",
)  # fmt: skip
EXAMPLE_DETAIL, EXAMPLE_REQUEST = "What was wrong with this request, and what to do.", "5f1c0a9e7d3b2460"


def problems(*codes: str) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route with these codes and those of ALWAYS."""
    by_status: dict[int | str, dict[str, Any]] = {}
    for code in dict.fromkeys((*codes, *ALWAYS)):
        status, title = PROBLEMS[code]
        entry = by_status.setdefault(status, {"model": ProblemDocument, "description": ""})
        entry["description"] = f"{entry['description']} `{code}`: {title}".strip()
        content = entry.setdefault("content", {MEDIA_TYPE: {"examples": {}}})
        content[MEDIA_TYPE]["examples"][code] = {"value": document(Problem(code, EXAMPLE_DETAIL), EXAMPLE_REQUEST)}
    return by_status
