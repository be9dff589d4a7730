"""Is it alive, is it ready, and its numbers for Prometheus."""

from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from mergestream.serving.http.problems import PROBLEMS, Problem
from mergestream.serving.http.routes.problem_examples import problems
from mergestream.serving.http.schemas import Health

router = APIRouter(tags=["operation"])
METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.get("/healthz", summary="Is the process alive?")
async def healthz() -> Health:
    """Yes, whenever it answers."""
    return Health(status="ok")


@router.get("/readyz", summary="Is it ready for pictures?", responses=problems("audit_unavailable", "not_watching"))
async def readyz(request: Request) -> Health:
    """Not while it loads, while its audit log fails, nobody looks after its watched folder, or it shuts down."""
    why = await request.app.state.service.why_not_ready()
    if why is not None:
        raise Problem(why, PROBLEMS[why].title)
    return Health(status="ready")


@router.get("/metrics", summary="Numbers for Prometheus", response_class=Response, responses={**METRICS, **problems()})
async def metrics(request: Request) -> Response:
    """Requests, latencies, pictures, steps, guard rails' findings, audit lines, what waits, streams."""
    return Response(request.app.state.service.metrics.text(), media_type=CONTENT_TYPE_LATEST)
