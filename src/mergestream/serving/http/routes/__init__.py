"""The routes of the service, one file per subject. Each declares who may use it and which problems it answers with."""

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter

from mergestream.serving.http.problems import problems

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


class Routes(APIRouter):
    """Routes of one subject."""

    def declare(
        self, role: str, method: str, path: str, summary: str | None = None, *codes: str, **more: Any
    ) -> Callable[[Endpoint], Endpoint]:
        """Add a route for ADMINISTRATOR, for CLIENT (both roles), ANYONE or HEALTH. `codes`: of its problems."""
        about = {"summary": summary, "responses": problems(*codes), **more}

        def add(endpoint: Endpoint) -> Endpoint:
            endpoint.role = role  # type: ignore[attr-defined]  # read by the gate
            self.add_api_route(path, endpoint, methods=[method], **about)
            return endpoint

        return add
