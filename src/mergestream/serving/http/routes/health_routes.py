"""Health checks, and metrics for Prometheus."""

from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from mergestream.serving.http.problems import PROBLEMS, Problem
from mergestream.serving.http.routes.problem_examples import problems
from mergestream.serving.http.schemas import Health

router = APIRouter(tags=["operation"])
METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.get("/healthz", summary="Liveness")
async def healthz() -> Health:
    """Always ok: the process answers."""
    return Health(status="ok")


@router.get("/readyz", summary="Readiness", responses=problems("audit_unavailable", "not_watching"))
async def readyz(request: Request) -> Health:
    """Not ready while it loads or shuts down, or while the audit log or the watched folder fails."""
    code = await request.app.state.service.why_not_ready()
    if code is not None:
        raise Problem(code, PROBLEMS[code].title)
    return Health(status="ready")


@router.get("/metrics", summary="Metrics for Prometheus", response_class=Response, responses={**METRICS, **problems()})
async def metrics(request: Request) -> Response:
    """Requests, latencies, images, steps, findings, audit lines, queue length, streams."""
    return Response(request.app.state.service.metrics.text(), media_type=CONTENT_TYPE_LATEST)
