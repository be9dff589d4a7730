"""Pages that work offline (the dashboard, the HTTP interface), health checks and metrics."""

from functools import partial
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse
from jinja2 import Template
from prometheus_client import CONTENT_TYPE_LATEST

from mergestream.serving.http.problems import PROBLEMS, Problem, problems
from mergestream.serving.http.routes import CurrentService, Routes
from mergestream.serving.http.schemas import Health
from mergestream.serving.http.tokens import ANYONE, CLIENT, HEALTH

DASHBOARD = Path(__file__).parents[2] / "dashboard"
DOCUMENTATION = Template(Path(__file__).with_name("docs.html").read_text(encoding="utf-8"), autoescape=True)
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
router = Routes(tags=["operation"])
METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
page = partial(router.declare, ANYONE, "GET", include_in_schema=False)


def _add_file(path: str, file: Path) -> None:
    @page(path)
    async def send() -> Response:
        return FileResponse(file, media_type=TYPES[file.suffix])


@page("/docs")
async def documentation(request: Request) -> HTMLResponse:
    """The OpenAPI document as a page."""
    by_status = sorted(PROBLEMS.items(), key=lambda item: (item[1].status, item[0]))
    return HTMLResponse(DOCUMENTATION.render(request.app.openapi(), problems=by_status))


@page("/openapi.json")
async def openapi(request: Request) -> Response:
    """Encoded once: it is large, and anyone may ask for it."""
    state = request.app.state
    if not hasattr(state, "openapi"):
        state.openapi = JSONResponse(request.app.openapi()).body
    return Response(state.openapi, media_type="application/json")


@router.declare(HEALTH, "GET", "/healthz", "Liveness", responses=None)
async def healthz() -> Health:
    """Always ok: the process answers."""
    return Health(status="ok")


@router.declare(HEALTH, "GET", "/readyz", "Readiness", "audit_unavailable", "not_watching", "node_failed")
async def readyz(service: CurrentService) -> Health:
    """Not ready while it loads or shuts down, or while the audit log, the watched folder or the DICOM node fails."""
    code = await service.why_not_ready()
    if code is not None:
        raise Problem(code, PROBLEMS[code].meaning)
    return Health(status="ready")


@router.declare(
    CLIENT, "GET", "/metrics", "Metrics for Prometheus", response_class=Response, responses={**METRICS, **problems()}
)
async def metrics(request: Request, service: CurrentService) -> Response:
    """Requests, latencies, images, steps, findings, audit lines, queue length, streams."""
    hidden = [name for name in service.stream_names() if not service.owners.allow(name, request.state.holder)]
    labels = [f'stream="{name}"'.encode() for name in hidden]
    lines = service.metrics.text().splitlines(keepends=True)
    shown = (line for line in lines if not any(label in line for label in labels))
    return Response(b"".join(shown), media_type=CONTENT_TYPE_LATEST)


# Listed once, so that no path from a client is ever opened.
for _file in sorted(DASHBOARD.rglob("*")):
    if _file.suffix in TYPES:
        _add_file(f"/{_file.relative_to(DASHBOARD).as_posix()}", _file)
_add_file("/", DASHBOARD / "index.html")
_add_file("/docs.css", Path(__file__).with_name("docs.css"))
