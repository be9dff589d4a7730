"""The outbox of reports: show it and, for administrators, try failed reports again."""

import asyncio

from fastapi import Request

from mergestream.serving.http import schemas
from mergestream.serving.http.routes import CurrentService, Routes
from mergestream.serving.http.tokens import ADMINISTRATOR, CLIENT
from mergestream.serving.service import Service

router = Routes(tags=["reports"])


@router.declare(CLIENT, "GET", "/v1/outbox", "Show the outbox", "audit_unavailable")
async def show_outbox(service: CurrentService) -> schemas.OutboxStatus:
    """Reports per destination: waiting, sent, failed, and the age of the oldest that waits."""
    return await _status(service)


@router.declare(ADMINISTRATOR, "POST", "/v1/outbox/retry", "Try failed reports again", "audit_unavailable")
async def retry_reports(request: Request, service: CurrentService) -> schemas.OutboxStatus:
    """Send all reports that failed for good once more. Administrators only."""
    if service.sending is not None:
        await service.change("retry_reports", request.state, service.sending.outbox.retry_failed)
    return await _status(service)


async def _status(service: Service) -> schemas.OutboxStatus:
    if service.sending is None:
        return schemas.OutboxStatus(shadow=False, held_bytes=0, destinations=[])
    return schemas.OutboxStatus(**await asyncio.to_thread(service.sending.overview))
