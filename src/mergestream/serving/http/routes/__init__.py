"""The routes of the service, one file per subject. Each declares who may use it and which problems it answers with."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from mergestream.serving.http.problems import problems
from mergestream.serving.http.tokens import ANYONE, HEALTH
from mergestream.serving.service import Service

SECURITY_SCHEMES = {"token": {"type": "http", "scheme": "bearer"}}


async def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


CurrentService = Annotated[Service, Depends(service_of)]


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
