"""The routes of the service, one file per subject. Each declares who may use it and which problems it answers with."""

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter

from mergestream.serving.http.problems import problems
from mergestream.serving.http.tokens import ANYONE, HEALTH

SECURITY_SCHEMES = {"token": {"type": "http", "scheme": "bearer"}}
Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


class Routes(APIRouter):
    """Routes of one subject."""

    def declare(
        self, role: str, method: str, path: str, summary: str | None = None, *codes: str, **more: Any
    ) -> Callable[[Endpoint], Endpoint]:
        """Add a route for ADMINISTRATOR, for CLIENT (both roles), ANYONE or HEALTH. `codes`: of its problems."""
        about: dict[str, Any] = {"summary": summary, "responses": problems(*codes), **more}
        if role not in (ANYONE, HEALTH):
            about["openapi_extra"] = {"security": [{"token": []}, {}], **more.get("openapi_extra", {})}

        def add(endpoint: Endpoint) -> Endpoint:
            endpoint.role = role  # type: ignore[attr-defined]  # read by the gate
            self.add_api_route(path, endpoint, methods=[method], **about)
            return endpoint

        return add
