"""Answers to batches and to single images."""

import asyncio
import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import Path, Query, Request, Response

from mergestream.data.intake.pictures import Picture
from mergestream.pool.class_concepts import Concepts
from mergestream.serving.engine.answers import Answer
from mergestream.serving.http.problems import Problem
from mergestream.serving.http.request_limits import body_of
from mergestream.serving.http.routes import PlainRoute, Routes
from mergestream.serving.http.schemas import BatchAnswer
from mergestream.serving.http.tokens import CLIENT
from mergestream.serving.http.uploads import files_of
from mergestream.serving.service import Service
from mergestream.serving.tracing import span

router = Routes(tags=["answers"])
StreamName = Annotated[
    str, Path(pattern="^[a-z0-9][a-z0-9_-]{0,63}$", description="A site or a scanner, never a patient.")
]
Report = Annotated[
    Literal["dicom-sr"] | None, Query(description="'dicom-sr': structured reports for images from DICOM.")
]
Single = Annotated[bool, Query(description="Answer each image from the stream's past and itself alone.")]
# Fields of an answer and of its document.
SAME_NAMES = (
    "stream", "step", "classes", "predictions", "probabilities", "head_expert", "switched_off", "findings",
    "abstention", "batch_size", "position", "encoder_coefficients", "head_coefficients", "consistency",
)  # fmt: skip
UPLOAD_CODES = (
    "malformed_multipart", "empty", "body_too_slow", "too_many_streams", "body_too_large", "too_large", "too_many",
    "unsupported_media_type", "unsupported_format", "invalid_request", "not_an_image", "damaged", "wrong_type",
    "wrong_shape", "too_slow", "unusable_picture", "no_expert", "decoder_missing", "audit_unavailable", "timed_out",
)  # fmt: skip


def _form(several: bool) -> tuple[str, dict[str, Any]]:
    file = {"type": "string", "format": "binary"}
    images = {"type": "array", "items": file, "minItems": 1} if several else file
    schema = {
        "type": "object", "properties": {"images": images}, "required": ["images"], "additionalProperties": False,
    }  # fmt: skip
    return "multipart/form-data", schema


@router.declare(
    CLIENT, "POST", "/v1/streams/{stream}/batches", "Answer a batch", *UPLOAD_CODES, body=_form(several=True),
    response_model=BatchAnswer, route_class_override=PlainRoute,
)  # fmt: skip
async def answer_batch(request: Request, stream: StreamName, report: Report = None, single: Single = False) -> Response:
    """The files in `images` (PNG, JPEG, TIFF, BMP, WebP, DICOM, or one NumPy array) are the next batch of the stream.

    The first batch of a stream creates it. The images of a batch are answered together, by one merged model: the same
    image in another batch may get another answer (`depends_on_batch`).
    """
    return await _answered(request, stream, report, single=single)


@router.declare(
    CLIENT, "POST", "/v1/streams/{stream}/images", "Answer one image", *UPLOAD_CODES, "one_picture_only",
    body=_form(several=False), response_model=BatchAnswer, route_class_override=PlainRoute,
)  # fmt: skip
async def answer_image(request: Request, stream: StreamName, report: Report = None) -> Response:
    """One image, answered from the stream's earlier images and itself alone, no matter who else sends images then.

    Only a service started with --no-single-image-answers answers it together with others that arrive meanwhile.
    """
    return await _answered(request, stream, report, one=True)


async def _answered(
    request: Request, stream: str, report: str | None, *, single: bool = False, one: bool = False
) -> Response:
    """Read and decode the files of a request, and answer them. `one`: a single image."""
    service: Service = request.app.state.service
    service.engine  # noqa: B018 raises while the service loads
    limits = service.limits
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limits.body_bytes:  # so that a client that sent Expect does not begin
        raise Problem("body_too_large", f"A body may have at most {limits.body_bytes:,} bytes.")
    body = body_of(request.receive, limits.body_bytes, limits.body_seconds)
    with service.held.share() as take:
        with span("body"):
            files = await files_of(request.headers.get("content-type", ""), body, take, limits.intake)
        pictures = await service.decode(stream, files)
        take(sum(picture.pixels.nbytes for picture in pictures))
        if one and len(pictures) > 1:
            raise Problem("one_picture_only", "Send several images, or a file that holds several, as a batch.")
        async with service.owners.claimed(stream, request.state.holder, service.stream_names):
            answer = await service.answer_batch(stream, pictures, single=single, one=one)
        reports = None
        if report:
            reports = await asyncio.to_thread(encoded_reports, pictures, answer, service.class_concepts())
        with span("respond"):  # encoded here: FastAPI would check the document once more
            return Response(answer_document(answer, reports).model_dump_json(), media_type="application/json")


def answer_document(answer: Answer, reports: list[str | None] | None = None) -> BatchAnswer:
    return BatchAnswer(
        **{name: getattr(answer, name) for name in SAME_NAMES},
        entropies=answer.entropy,
        pool_hash=answer.pool_sha256,
        model_hash=answer.weights_sha256,
        audit=answer.audit if answer.audit.get("hash") else None,
        abstained_because=[answer.abstained.get(row) for row in range(len(answer.predictions))],
        depends_on_batch=answer.batch_size > 1,
        milliseconds=1000 * answer.seconds,
        images=[answer_document(each) for each in answer.singles] or None,
        prediction_set=[list(each) for each in answer.prediction_sets or ()] or None,
        reports=reports,
    )


def encoded_reports(pictures: Sequence[Picture], answer: Answer, concepts: Concepts) -> list[str | None]:
    """A structured report in base64 per image, or None."""
    from mergestream.serving.reports.structured_report import write_report  # highdicom: not while the service starts

    reports = [write_report(picture, answer, row, concepts) for row, picture in enumerate(pictures)]
    return [None if report is None else base64.b64encode(report).decode("ascii") for report in reports]
