"""The pool: show it, reload it, switch an expert on or off."""

import logging
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path, Request
from pydantic import ValidationError

from mergestream.runtime.errors import CheckpointError, InputError, MergestreamError, OutputError, PoolError
from mergestream.serving.http.problems import Problem
from mergestream.serving.http.request_limits import body_of
from mergestream.serving.http.routes.problem_examples import problems
from mergestream.serving.http.routes.stream_routes import stream_statuses
from mergestream.serving.http.schemas import (
    Latency,
    Overview,
    OverviewExpert,
    OverviewPool,
    PoolExpert,
    PoolStatus,
    Reloaded,
    Requests,
    Switch,
    Switched,
)
from mergestream.serving.http.tokens import ADMINISTRATOR
from mergestream.serving.service import Service

router = APIRouter(tags=["pool"])
ExpertName = Annotated[str, Path(max_length=200, description="A name in the pool.")]
LARGEST_BODY = 4096
log = logging.getLogger(__name__)


@router.get("/v1/pool", summary="Show the pool", responses=problems())
async def show_pool(request: Request) -> PoolStatus:
    """Every expert's card, without its training recipe; the method and its options."""
    lineup = request.app.state.service.open.engine.lineup
    return PoolStatus(
        hash=lineup.identity["pool_sha256"],
        classes=list(lineup.pool.classes),
        method=lineup.method,
        options=lineup.options,
        experts=[
            PoolExpert(
                name=card.name,
                on=card.name not in lineup.off,
                domain=card.domain,
                network=card.architecture.name,
                metrics=card.metrics,
                temperature=card.temperature,
                weights_hash=card.weights_sha256,
            )
            for card in lineup.pool.cards
        ],
    )


@router.get("/v1/overview", summary="Data of the dashboard", responses=problems())
async def overview(request: Request) -> Overview:
    """Pool, streams, latency and requests."""
    service: Service = request.app.state.service
    lineup = service.open.engine.lineup
    experts = [
        OverviewExpert(name=card.name, on=card.name not in lineup.off, domain=card.domain, metrics=card.metrics)
        for card in lineup.pool.cards
    ]
    return Overview(
        pool=OverviewPool(hash=lineup.identity["pool_sha256"], classes=list(lineup.pool.classes), experts=experts),
        streams=stream_statuses(service),
        latency_ms=Latency(**service.metrics.latency()),
        requests=Requests(**service.metrics.outcomes()),
        administrator=request.state.holder.role == ADMINISTRATOR,
        version=request.app.version,
    )


@router.post(
    "/v1/pool/reload",
    summary="Reload the pool",
    responses=problems("pool_unusable", "audit_unavailable"),
)
async def reload_pool(request: Request) -> Reloaded:
    """Use the pool that is on disk now, from the next batch on. Administrators only.

    If it cannot be used, the old one stays in use. If the pool has changed, the averages of all streams begin again.
    """
    service: Service = request.app.state.service
    try:
        return Reloaded(**await service.change("reload", request.state, service.open.engine.reload))
    except OutputError:
        raise
    except MergestreamError as error:
        raise _unusable(error, request.state.request_id) from error


@router.put(
    "/v1/pool/experts/{expert}",
    summary="Switch an expert on or off",
    responses=problems(
        "unknown_expert", "change_refused", "audit_unavailable", "body_too_large", "body_too_slow",
        "unsupported_media_type",
    ),
    openapi_extra={
        "requestBody": {"required": True, "content": {"application/json": {"schema": Switch.model_json_schema()}}}
    },
)  # fmt: skip
async def switch_expert(request: Request, expert: ExpertName) -> Switched:
    """From the next batch of each stream on. The other coefficients are renormalised. Administrators only."""
    service: Service = request.app.state.service
    switch = await _read_switch(request, service)
    names = service.open.engine.lineup.pool.names
    if expert not in names:
        raise Problem("unknown_expert", f"The experts of the pool are {', '.join(names)}.")
    try:
        off = await service.change("switch", request.state, partial(service.open.engine.switch, expert, on=switch.on))
    except (InputError, PoolError) as error:
        raise Problem("change_refused", str(error)) from error
    return Switched(expert=expert, on=switch.on, switched_off=list(off))


async def _read_switch(request: Request, service: Service) -> Switch:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Problem("unsupported_media_type", 'Send application/json, as in {"on": false}.')
    body = b""
    async for chunk in body_of(request.receive, LARGEST_BODY, service.limits.body_seconds):
        body += chunk
    try:
        return Switch.model_validate_json(body)
    except ValidationError:
        raise Problem("invalid_request", 'Send {"on": true} or {"on": false}, and nothing else.') from None


def _unusable(error: MergestreamError, request_id: str) -> Problem:
    log.error("request %s: the pool was not reloaded: %s", request_id, error)
    kinds = {CheckpointError: "an expert on disk is damaged", PoolError: "its experts do not fit together"}
    why = next((text for kind, text in kinds.items() if isinstance(error, kind)), "it does not fit this service")
    return Problem("pool_unusable", f"The old pool stays in use: {why}. The log has details under this request id.")
