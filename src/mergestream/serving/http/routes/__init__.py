"""The routes of the service, one file per subject. Each declares who may use it and which problems it answers with."""

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute

from mergestream.serving.engine.registry import NAME
from mergestream.serving.http.problems import problems
from mergestream.serving.http.tokens import ANYONE, HEALTH
from mergestream.serving.service import Service

SECURITY_SCHEMES = {"token": {"type": "http", "scheme": "bearer"}}


async def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


CurrentService = Annotated[Service, Depends(service_of)]


class PlainRoute(APIRoute):
    """A route whose endpoint takes a request and a stream; FastAPI reads and checks parameters only of unusual URLs."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        checked = super().get_route_handler()

        async def handle(request: Request) -> Response:
            stream = request.path_params["stream"]
            if request.scope["query_string"] or not NAME.fullmatch(stream):
                return await checked(request)
            response: Response = await self.endpoint(request, stream)
            return response

        return handle


class Routes(APIRouter):
    """Routes of one subject."""

    def declare(
        self, role: str, method: str, path: str, summary: str | None = None, *codes: str, body: Any = None, **more: Any
    ) -> Callable[[Any], Any]:
        """Add a route for ADMINISTRATOR, for CLIENT (both roles), ANYONE or HEALTH.

        `codes`: of its problems. `body`: content type and schema of what it reads itself.
        """
        about: dict[str, Any] = {"security": [{"token": []}, {}]} if role not in (ANYONE, HEALTH) else {}
        if body is not None:
            about["requestBody"] = {"required": True, "content": {body[0]: {"schema": body[1]}}}
        options = {"summary": summary, "responses": problems(*codes), "openapi_extra": about, **more}

        def add(endpoint: Any) -> Any:
            endpoint.role = role  # read by the gate
            self.add_api_route(path, endpoint, methods=[method], **options)
            return endpoint

        return add
