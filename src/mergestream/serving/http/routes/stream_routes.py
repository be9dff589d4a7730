"""Streams: list, look at, reset, delete."""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from mergestream.serving.http.problems import Problem
from mergestream.serving.http.routes.image_routes import StreamName
from mergestream.serving.http.routes.problem_examples import problems
from mergestream.serving.http.schemas import Alarm, Recent, RecentStep, Streams, StreamStanding
from mergestream.serving.service import Service

router = APIRouter(tags=["streams"])
After = Annotated[int | None, Query(description="Only steps above this number.", ge=-1, le=2**53)]


@router.get("/v1/streams", summary="List streams", responses=problems())
async def list_streams(request: Request) -> Streams:
    """Every stream, by name, and where it stands."""
    return Streams(streams=standings(request.app.state.service))


@router.get("/v1/streams/{stream}", summary="Look at a stream", responses=problems("unknown_stream"))
async def show_stream(request: Request, stream: StreamName) -> StreamStanding:
    """Where a stream stands: its steps, its pictures, and what was said of its last step."""
    return _standing_of(request.app.state.service, stream)


@router.get("/v1/streams/{stream}/recent", summary="A stream's last steps", responses=problems("unknown_stream"))
async def recent_steps(request: Request, stream: StreamName, after: After = None) -> Recent:
    """The last 200 steps since the service started: coefficients, entropies, predictions per class, findings."""
    service: Service = request.app.state.service
    _standing_of(service, stream)
    steps = service.recent.after(stream, -1 if after is None else after)
    return Recent(stream=stream, steps=[RecentStep(**step) for step in steps])


@router.post(
    "/v1/streams/{stream}/reset", summary="Reset a stream", responses=problems("unknown_stream", "audit_unavailable")
)
async def reset_stream(request: Request, stream: StreamName) -> StreamStanding:
    """Forget its moving averages and what its guard rails remember; its steps go on counting. Administrators only."""
    service: Service = request.app.state.service
    await service.change("reset", request.state, partial(service.engine.reset, stream))
    return _standing_of(service, stream)


@router.delete(
    "/v1/streams/{stream}",
    summary="Delete a stream",
    status_code=204,
    response_class=Response,
    responses=problems("unknown_stream", "audit_unavailable"),
)
async def delete_stream(request: Request, stream: StreamName) -> Response:
    """Its averages and counts go; its lines stay in the audit log. Administrators only."""
    service: Service = request.app.state.service
    await service.change("delete", request.state, partial(service.engine.delete, stream))
    service.recent.forget(stream)
    return Response(status_code=204)


def standings(service: Service) -> list[StreamStanding]:
    return [_standing(stream, service.recent.last(stream["stream"]) or {}) for stream in service.engine.streams()]


def _standing_of(service: Service, name: str) -> StreamStanding:
    for standing in standings(service):
        if standing.name == name:
            return standing
    raise Problem("unknown_stream", "There is no such stream; the first batch sent to one creates it.")


def _standing(stream: dict[str, Any], last: dict[str, Any]) -> StreamStanding:
    """`last` is the stream's last step since the start, if there was one."""
    return StreamStanding(
        name=stream["stream"],
        steps=stream["steps"],
        images=stream["images"],
        last_step_at=last.get("time"),
        encoder_coefficients=last.get("encoder_coefficients", {}),
        head_coefficients=last.get("head_coefficients", {}),
        entropies=last.get("entropies", {}),
        head_expert=last.get("head_expert"),
        alarms=[
            Alarm(code=each["code"], severity=each["severity"], sentence=each["sentence"])
            for each in last.get("findings", [])
            if each["severity"] != "info"
        ],
    )
