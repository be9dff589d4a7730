"""The FastAPI application: the routes of a service behind the gate."""

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mergestream.pool.expert_card import version_of
from mergestream.serving.http.gate import Gate
from mergestream.serving.http.problems import problem_of, response
from mergestream.serving.http.routes import (
    SECURITY_SCHEMES,
    administration_routes,
    dicom_routes,
    image_routes,
    outbox_routes,
    page_routes,
)
from mergestream.serving.http.schemas import ProblemDocument
from mergestream.serving.service import Service

DESCRIPTION = """Send images, get the answers of one merged model, with an audit trail.
For research. Not a medical device.

If tokens are configured, send 'Authorization: Bearer TOKEN' to every URL under /v1 and to /metrics. Clients may send
images and read their own streams; changes of streams and of the pool need an administrator's token.

A single image is answered from the stream's earlier images and itself alone. The images of a batch are answered
together, by one merged model: the same image in another batch may get another answer. Every answer says so:
depends_on_batch, and batch_size. With ?single=true the images of a batch are answered one by one. If an image is blank
or noise, or if no expert recognises the batch, the service abstains: the prediction is null, and abstained_because says
why.

Every error is a problem document (application/problem+json) with a stable code."""


def create_app(service: Service) -> FastAPI:
    """Build the application. Starting and stopping the service is up to the caller."""
    app = FastAPI(
        title="mergestream",
        version=version_of("mergestream"),
        description=DESCRIPTION,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    for part in (image_routes, administration_routes, dicom_routes, outbox_routes, page_routes):
        app.router.routes.extend(part.router.routes)
    app.add_middleware(Gate, service=service)
    app.add_exception_handler(HTTPException, _as_problem)
    app.add_exception_handler(RequestValidationError, _as_problem)
    components = app.openapi()["components"]
    components["securitySchemes"] = SECURITY_SCHEMES
    components["schemas"]["ProblemDocument"] = ProblemDocument.model_json_schema()
    return app


async def _as_problem(request: Request, error: Exception) -> Response:
    problem = problem_of(error)
    assert problem is not None
    if problem.code == "method_not_allowed":
        # Starlette names the methods of the first route only, if several share a path.
        methods = request.app.openapi()["paths"].get(getattr(request.scope.get("route"), "path", None), {})
        problem.headers |= {"Allow": ", ".join(sorted(map(str.upper, methods)))} if methods else {}
    return response(problem, request.state.request_id)
