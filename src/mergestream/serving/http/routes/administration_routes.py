"""Streams and pool: show them and, for administrators, change them."""

import asyncio
import logging
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Path, Query, Request, Response
from pydantic import ValidationError

from mergestream.runtime.errors import CheckpointError, InputError, MergestreamError, OutputError, PoolError
from mergestream.serving.http import schemas
from mergestream.serving.http.problems import Problem
from mergestream.serving.http.request_limits import body_of
from mergestream.serving.http.routes import CurrentService, Routes
from mergestream.serving.http.routes.image_routes import StreamName
from mergestream.serving.http.tokens import ADMINISTRATOR, CLIENT, EVERYONE, Holder
from mergestream.serving.service import Service

router = Routes(tags=["streams and pool"])
After = Annotated[int, Query(description="Only steps after this number.", ge=-1, le=2**53)]
ExpertName = Annotated[str, Path(max_length=200, description="A name in the pool.")]
JSON, LARGEST_BODY = "application/json", 4096
BY_EXPERT = ("encoder_coefficients", "head_coefficients", "entropies")
CHANGE_CODES = ("unknown_stream", "audit_unavailable")
BODY_CODES = ("audit_unavailable", "body_too_large", "body_too_slow", "unsupported_media_type")
Body = TypeVar("Body", bound=schemas.Document)
UNKNOWN_STREAM = "Unknown stream; the first batch sent to a stream creates it."
log = logging.getLogger(__name__)


@router.declare(CLIENT, "GET", "/v1/streams", "List streams")
async def list_streams(request: Request, service: CurrentService) -> schemas.Streams:
    """The status of every stream, by name."""
    return schemas.Streams(streams=_statuses(service, request.state.holder))


@router.declare(CLIENT, "GET", "/v1/streams/{stream}", "Show a stream", "unknown_stream")
async def show_stream(service: CurrentService, stream: StreamName) -> schemas.StreamStatus:
    """Numbers of steps and images, and the numbers and findings of its last step."""
    return _status_of(service, stream)


@router.declare(CLIENT, "GET", "/v1/streams/{stream}/recent", "Show the last steps of a stream", "unknown_stream")
async def recent_steps(service: CurrentService, stream: StreamName, after: After = -1) -> schemas.Recent:
    """Coefficients, entropies, predictions per class and findings of the last 200 steps; restored from the log."""
    quality = _quality_of(service, stream)
    return schemas.Recent(stream=stream, steps=service.metrics.recent(stream, after), quality=quality)


@router.declare(CLIENT, "GET", "/v1/streams/{stream}/quality", "Estimate the quality of a stream", "unknown_stream")
async def estimated_quality(service: CurrentService, stream: StreamName) -> schemas.StreamQuality:
    """Estimated accuracy, class prevalence and prediction sets, without labels; each with what it assumes."""
    return _quality_of(service, stream) or schemas.StreamQuality(stream=stream)


@router.declare(ADMINISTRATOR, "POST", "/v1/streams/{stream}/reset", "Reset a stream", *CHANGE_CODES)
async def reset_stream(request: Request, service: CurrentService, stream: StreamName) -> schemas.StreamStatus:
    """Reset its moving averages and the memory of its guards. Step numbers continue. Administrators only."""
    await service.change("reset", request.state, partial(service.engine.reset, stream))
    return _status_of(service, stream)


@router.declare(
    ADMINISTRATOR, "POST", "/v1/streams/{stream}/acknowledge", "Acknowledge the alarms of a stream",
    "unknown_stream", "nothing_to_acknowledge", *BODY_CODES, body=(JSON, schemas.Acknowledgement.model_json_schema()),
)  # fmt: skip
async def acknowledge_alarms(request: Request, service: CurrentService, stream: StreamName) -> schemas.StreamStatus:
    """Log who knows of its current alarms. They stay until their findings end. Administrators only."""
    person = await read_document(request, schemas.Acknowledgement, '{"name": "…", "note": "…"}, each of one line')
    record = partial(service.engine.acknowledge, stream, **person.model_dump(), by=request.state.holder.name)
    try:
        await service.change("acknowledge", request.state, record)
    except InputError as error:
        raise Problem("nothing_to_acknowledge", str(error)) from error
    return _status_of(service, stream)


@router.declare(
    ADMINISTRATOR, "DELETE", "/v1/streams/{stream}", "Delete a stream", *CHANGE_CODES,
    status_code=204, response_class=Response,
)  # fmt: skip
async def delete_stream(request: Request, service: CurrentService, stream: StreamName) -> Response:
    """Delete its averages and counts; its lines stay in the audit log. Administrators only."""
    await service.change("delete", request.state, partial(service.engine.delete, stream))
    service.metrics.forget(stream)
    await service.owners.release(stream)
    return Response(status_code=204)


def _statuses(service: Service, holder: Holder) -> list[schemas.StreamStatus]:
    """The status of every stream that the holder of a token may read."""
    statuses = []
    for stream in service.engine.streams():
        if service.owners.allow(stream["stream"], holder):
            steps = service.metrics.recent(stream["stream"])
            last = steps[-1] if steps else None
            about: dict[str, Any] = {name: getattr(last, name, {}) for name in BY_EXPERT}
            about |= {name: stream[name] for name in ("steps", "images", "alarms")}
            at, expert = getattr(last, "time", None), getattr(last, "head_expert", None)
            statuses.append(schemas.StreamStatus(name=stream["stream"], last_step_at=at, head_expert=expert, **about))
    return statuses


def _status_of(service: Service, name: str) -> schemas.StreamStatus:
    for status in _statuses(service, EVERYONE):
        if status.name == name:
            return status
    raise Problem("unknown_stream", UNKNOWN_STREAM)


def _quality_of(service: Service, name: str) -> schemas.StreamQuality | None:
    """Estimates of a stream; None if it has none."""
    for each in service.engine.streams():
        if each["stream"] == name:
            return each["quality"]
    raise Problem("unknown_stream", UNKNOWN_STREAM)


@router.declare(CLIENT, "GET", "/v1/pool", "Show the pool")
async def show_pool(service: CurrentService) -> schemas.PoolStatus:
    """Every expert's card, without its training recipe; the method and its options."""
    return schemas.PoolStatus(**service.engine.describe())


@router.declare(CLIENT, "GET", "/v1/overview", "Data of the dashboard")
async def overview(request: Request, service: CurrentService) -> schemas.Overview:
    """Pool, streams, latency and requests."""
    is_administrator = request.state.holder.role == ADMINISTRATOR
    node = service.node if is_administrator else None
    return schemas.Overview(
        pool=schemas.PoolStatus(**service.engine.describe()),
        streams=_statuses(service, request.state.holder),
        latency_ms=schemas.Latency(**service.metrics.latency()),
        requests=schemas.Requests(**service.metrics.outcomes()),
        administrator=is_administrator,
        dicom=None if node is None else node.status(),
        outbox=await _outbox(service),
        version=request.app.version,
    )


async def _outbox(service: Service) -> schemas.OutboxStatus | None:
    if service.sending is None:
        return None
    try:
        return schemas.OutboxStatus(**await asyncio.to_thread(service.sending.overview))
    except OutputError:  # /v1/outbox says why; alarms must still be seen
        return None


@router.declare(ADMINISTRATOR, "POST", "/v1/pool/reload", "Reload the pool", "pool_unusable", "audit_unavailable")
async def reload_pool(request: Request, service: CurrentService) -> schemas.Reloaded:
    """Use the pool that is on disk now, from the next batch on. Administrators only.

    If it cannot be used, the old one stays in use. Streams keep their averages for experts that stay as they are.
    """
    try:
        return schemas.Reloaded(**await service.change("reload", request.state, service.engine.reload))
    except OutputError:
        raise
    except MergestreamError as error:
        raise _unusable(error, request.state.request_id) from error


@router.declare(
    ADMINISTRATOR, "PUT", "/v1/pool/experts/{expert}", "Switch an expert on or off",
    "unknown_expert", "change_refused", *BODY_CODES, body=(JSON, schemas.Switch.model_json_schema()),
)  # fmt: skip
async def switch_expert(request: Request, service: CurrentService, expert: ExpertName) -> schemas.Switched:
    """From the next batch of each stream on. The other coefficients are renormalised. Administrators only."""
    switch = await read_document(request, schemas.Switch, '{"on": true} or {"on": false}')
    names = [each["name"] for each in service.engine.describe()["experts"]]
    if expert not in names:
        raise Problem("unknown_expert", f"The experts of the pool are {', '.join(names)}.")
    try:
        off = await service.change("switch", request.state, partial(service.engine.switch, expert, on=switch.on))
    except (InputError, PoolError) as error:
        raise Problem("change_refused", str(error)) from error
    return schemas.Switched(expert=expert, on=switch.on, switched_off=list(off))


async def read_document(request: Request, kind: type[Body], example: str) -> Body:
    """The JSON body of a request; `example` is for the error."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise Problem("unsupported_media_type", f"Send {JSON}: {example}.")
    body = b""
    async for chunk in body_of(request.receive, LARGEST_BODY, request.app.state.service.limits.body_seconds):
        body += chunk
    try:
        return kind.model_validate_json(body)
    except ValidationError:
        raise Problem("invalid_request", f"Send {example}, and nothing else.") from None


def _unusable(error: MergestreamError, request_id: str) -> Problem:
    log.error("request %s: the pool was not reloaded: %s", request_id, error)
    kinds = {CheckpointError: "an expert on disk is damaged", PoolError: "its experts do not fit together"}
    why = next((text for kind, text in kinds.items() if isinstance(error, kind)), "it does not fit this service")
    return Problem("pool_unusable", f"The old pool stays in use: {why}. The log has details under this request id.")
