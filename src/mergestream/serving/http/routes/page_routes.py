"""Pages that work offline (the dashboard, the HTTP interface), health checks and metrics."""

from html import escape
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import FileResponse, HTMLResponse
from prometheus_client import CONTENT_TYPE_LATEST

from mergestream.serving.http.problems import PROBLEMS, Problem, problems
from mergestream.serving.http.schemas import Health

DASHBOARD = Path(__file__).parents[2] / "dashboard"
STYLE = Path(__file__).with_name("docs.css")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}
router = APIRouter(tags=["operation"])
METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


def _sender(file: Path) -> Any:
    async def send() -> Response:
        return FileResponse(file, media_type=TYPES[file.suffix])

    return send


@router.get("/docs.css", include_in_schema=False)
async def style() -> FileResponse:
    return FileResponse(STYLE, media_type=TYPES[".css"])


@router.get("/docs", include_in_schema=False)
async def documents(request: Request) -> HTMLResponse:
    return HTMLResponse(page(request.app.openapi()))


def page(schema: dict[str, Any]) -> str:
    """The OpenAPI document as plain HTML."""
    operations = [
        _operation(method, path, about)
        for path, methods in schema["paths"].items()
        for method, about in methods.items()
    ]
    codes = "".join(
        f"<tr id='{escape(code)}'><td><code>{escape(code)}</code></td><td>{status}</td><td>{escape(title)}</td></tr>"
        for code, (status, title) in sorted(PROBLEMS.items(), key=lambda item: (item[1].status, item[0]))
    )
    info = schema["info"]
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'><link rel='stylesheet' href='docs.css'>"
        f"<title>{escape(info['title'])}</title></head><body><main><h1>{escape(info['title'])} "
        f"<small>{escape(info['version'])}</small></h1>{_text(info['description'])}"
        "<p>For programs: <a href='openapi.json'>openapi.json</a>. <a href='./'>Dashboard</a>.</p>"
        f"{''.join(operations)}<h2>Problems</h2><table><thead><tr><th scope='col'>code</th>"
        f"<th scope='col'>status</th><th scope='col'>meaning</th></tr></thead><tbody>{codes}</tbody></table>"
        "</main></body></html>"
    )


def _operation(method: str, path: str, about: dict[str, Any]) -> str:
    parameters = "".join(
        f"<li><code>{escape(each['name'])}</code> ({escape(each['in'])}): {escape(each.get('description', ''))}</li>"
        for each in about.get("parameters", [])
    )
    body = "".join(
        f"<li>body: <code>{escape(kind)}</code></li>" for kind in about.get("requestBody", {}).get("content", {})
    )
    answers = "".join(
        f"<li><b>{escape(status)}</b> {escape(_first(answer))}</li>" for status, answer in about["responses"].items()
    )
    return (
        f"<section><h2>{escape(about['summary'])}</h2><p><code>{method.upper()} {escape(path)}</code></p>"
        f"{_text(about.get('description', ''))}<ul>{parameters}{body}</ul>"
        f"<details><summary>Responses</summary><ul>{answers}</ul></details></section>"
    )


def _first(answer: dict[str, Any]) -> str:
    return str(answer.get("description", "")).replace("`", "")


def _text(text: str) -> str:
    return "".join(f"<p>{escape(paragraph)}</p>" for paragraph in text.split("\n\n") if paragraph.strip())


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


# Listed once, so that no path from a client is ever opened.
for _file in sorted(DASHBOARD.rglob("*")):
    if _file.suffix in TYPES:
        _path = _file.relative_to(DASHBOARD).as_posix()
        router.add_api_route(f"/{_path}", _sender(_file), methods=["GET"], include_in_schema=False)
router.add_api_route("/", _sender(DASHBOARD / "index.html"), methods=["GET"], include_in_schema=False)
