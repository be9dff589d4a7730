"""The DICOM node over HTTP: its status, objects by STOW-RS, and studies pulled from other systems."""

import asyncio
import json
from typing import Annotated, Any

from fastapi import Depends, Request, Response

from mergestream.serving.dicom_network.dimse import SUCCESS
from mergestream.serving.dicom_network.node import DicomNode
from mergestream.serving.dicom_network.reception import Stored
from mergestream.serving.dicom_network.study_pull import SourceError, pull_study
from mergestream.serving.http.problems import Problem, problems
from mergestream.serving.http.request_limits import body_of
from mergestream.serving.http.routes import CurrentService, Routes
from mergestream.serving.http.routes.administration_routes import BODY_CODES, JSON, read_document
from mergestream.serving.http.schemas import NodeStatus, Pulled, PullRequest
from mergestream.serving.http.tokens import ADMINISTRATOR, CLIENT
from mergestream.serving.http.uploads import RELATED, files_of

router = Routes(tags=["DICOM"])
DICOM_JSON = "application/dicom+json"
BY_WEB = "STOW-RS"  # stands for the sender's AE title in rules
STORE_CODES = ("no_node", "malformed_multipart", "body_too_large", "body_too_slow", "unsupported_media_type", "empty")
STORE_BODY = (RELATED, {"type": "string", "format": "binary"})
STORED: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {DICOM_JSON: {"schema": {"type": "object"}}}}
    for status, text in ((200, "All were stored."), (202, "Some were refused."), (409, "All were refused."))
}


async def node_of(service: CurrentService) -> DicomNode:
    service.engine  # noqa: B018 raises while the service loads
    if service.node is None:
        raise Problem("no_node", "Start the service with --dicom-port or --dicom-rules.")
    return service.node


CurrentNode = Annotated[DicomNode, Depends(node_of)]


@router.declare(ADMINISTRATOR, "GET", "/v1/dicom", "Show the DICOM node", "no_node")
async def show_node(node: CurrentNode) -> NodeStatus:
    """Associations and objects since the start, and what waits. Nothing about patients. Administrators only."""
    return node.status()


@router.declare(
    CLIENT, "POST", "/dicomweb/studies", "Store DICOM objects (STOW-RS)", body=STORE_BODY, response_class=Response,
    responses={**problems(*STORE_CODES), **STORED},
)  # fmt: skip
async def store_objects(request: Request, service: CurrentService, node: CurrentNode) -> Response:
    """Objects go to the node's inbox by its rules, as if they had come by C-STORE; the calling AE title is STOW-RS.

    A stored object is on disk when this answers. Its result goes to the destinations, not to the caller.
    """
    limits = service.limits
    body = body_of(request.receive, limits.body_bytes, limits.body_seconds)
    with service.held.share() as take:
        files = await files_of(request.headers.get("content-type", ""), body, take, limits.intake, dicom=True)
        stored = await asyncio.to_thread(node.reception.store_files, files, BY_WEB)
    good = [each for each in stored if each.status.code == SUCCESS]
    status = 200 if len(good) == len(stored) else 202 if good else 409
    return Response(json.dumps(store_response(stored)), status, media_type=DICOM_JSON)


@router.declare(
    ADMINISTRATOR, "POST", "/v1/dicom/pull", "Pull a study (WADO-RS)", "no_node", "unknown_source", "source_failed",
    *BODY_CODES, body=(JSON, PullRequest.model_json_schema()),
)  # fmt: skip
async def pull(request: Request, service: CurrentService, node: CurrentNode) -> Pulled:
    """Retrieve a study from a source of the rules file into the inbox. Administrators only."""
    asked = await read_document(request, PullRequest, '{"source": "…", "study": "1.2.3"}')
    source = node.rules.sources.get(asked.source)
    if source is None:
        raise Problem("unknown_source", "Sources are listed in the rules file; /v1/dicom has their names.")
    await service.change("pull_study", request.state, lambda: None)
    try:
        stored = await asyncio.to_thread(pull_study, source, asked.study, node.reception)
    except SourceError as error:
        raise Problem("source_failed", str(error)) from error
    received = sum(each.status.code == SUCCESS for each in stored)
    return Pulled(received=received, refused=len(stored) - received)


def store_response(stored: list[Stored]) -> dict[str, Any]:
    """The response of PS3.18 10.5.3, in the DICOM JSON model."""
    items: dict[bool, list[dict[str, Any]]] = {True: [], False: []}
    for each in stored:
        good = each.status.code == SUCCESS
        item: dict[str, Any] = {
            tag: {"vr": "UI", "Value": [uid]}
            for tag, uid in (("00081150", each.sop_class), ("00081155", each.sop_instance))
            if uid
        }
        if not good:
            item["00081197"] = {"vr": "US", "Value": [each.status.code]}
        items[good].append(item)
    sequences = {"00081199": items[True], "00081198": items[False]}
    return {tag: {"vr": "SQ", "Value": value} for tag, value in sequences.items() if value}
