"""Streams: list, show, reset, delete."""

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from mergestream.serving.http.problems import Problem
from mergestream.serving.http.routes.image_routes import StreamName
from mergestream.serving.http.routes.problem_examples import problems
from mergestream.serving.http.schemas import Alarm, Recent, RecentStep, Streams, StreamStatus
from mergestream.serving.service import Service

router = APIRouter(tags=["streams"])
After = Annotated[int | None, Query(description="Only steps after this number.", ge=-1, le=2**53)]


@router.get("/v1/streams", summary="List streams", responses=problems())
async def list_streams(request: Request) -> Streams:
    """The status of every stream, by name."""
    return Streams(streams=stream_statuses(request.app.state.service))


@router.get("/v1/streams/{stream}", summary="Show a stream", responses=problems("unknown_stream"))
async def show_stream(request: Request, stream: StreamName) -> StreamStatus:
    """Numbers of steps and images, and the numbers and findings of its last step."""
    return _status_of(request.app.state.service, stream)


@router.get(
    "/v1/streams/{stream}/recent", summary="Show the last steps of a stream", responses=problems("unknown_stream")
)
async def recent_steps(request: Request, stream: StreamName, after: After = None) -> Recent:
    """The last 200 steps since the service started: coefficients, entropies, predictions per class, findings."""
    service: Service = request.app.state.service
    _status_of(service, stream)
    steps = service.recent.after(stream, -1 if after is None else after)
    return Recent(stream=stream, steps=[RecentStep(**step) for step in steps])


@router.post(
    "/v1/streams/{stream}/reset", summary="Reset a stream", responses=problems("unknown_stream", "audit_unavailable")
)
async def reset_stream(request: Request, stream: StreamName) -> StreamStatus:
    """Reset its moving averages and the memory of its guards. Step numbers continue. Administrators only."""
    service: Service = request.app.state.service
    await service.change("reset", request.state, partial(service.open.engine.reset, stream))
    return _status_of(service, stream)


@router.delete(
    "/v1/streams/{stream}",
    summary="Delete a stream",
    status_code=204,
    response_class=Response,
    responses=problems("unknown_stream", "audit_unavailable"),
)
async def delete_stream(request: Request, stream: StreamName) -> Response:
    """Delete its averages and counts; its lines stay in the audit log. Administrators only."""
    service: Service = request.app.state.service
    await service.change("delete", request.state, partial(service.open.engine.delete, stream))
    service.recent.forget(stream)
    return Response(status_code=204)


def stream_statuses(service: Service) -> list[StreamStatus]:
    return [_status(stream, service.recent.last(stream["stream"]) or {}) for stream in service.open.engine.streams()]


def _status_of(service: Service, name: str) -> StreamStatus:
    for status in stream_statuses(service):
        if status.name == name:
            return status
    raise Problem("unknown_stream", "Unknown stream; the first batch sent to a stream creates it.")


def _status(stream: dict[str, Any], last: dict[str, Any]) -> StreamStatus:
    """`last`: the last step since the service started, or {}."""
    return StreamStatus(
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
