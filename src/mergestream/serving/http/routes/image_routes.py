"""Pictures in, answers out."""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request

from mergestream.data.intake import Picture
from mergestream.runtime.errors import InputError
from mergestream.serving.engine.answers import Answer
from mergestream.serving.http.problems import Problem
from mergestream.serving.http.request_limits import Share, body_of
from mergestream.serving.http.routes.problem_examples import problems
from mergestream.serving.http.schemas import BatchAnswer, Finding
from mergestream.serving.http.uploads import files_of
from mergestream.serving.recent import by_expert
from mergestream.serving.service import Service

router = APIRouter(tags=["answers"])
StreamName = Annotated[
    str, Path(pattern="^[a-z0-9][a-z0-9_-]{0,63}$", description="A site or a scanner, never a patient.")
]
Report = Annotated[
    Literal["dicom-sr"] | None, Query(description="'dicom-sr': structured reports for pictures from DICOM.")
]
UPLOAD_CODES = (
    "malformed_multipart", "empty", "body_too_slow", "too_many_streams", "body_too_large", "too_large", "too_many",
    "unsupported_media_type", "unsupported_format", "invalid_request", "not_an_image", "damaged", "wrong_type",
    "wrong_shape", "too_slow", "unusable_picture", "decoder_missing", "audit_unavailable", "timed_out",
)  # fmt: skip


def _form(several: bool) -> dict[str, Any]:
    file = {"type": "string", "format": "binary"}
    images = {"type": "array", "items": file, "minItems": 1} if several else file
    schema = {
        "type": "object", "properties": {"images": images}, "required": ["images"], "additionalProperties": False,
    }  # fmt: skip
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


@router.post(
    "/v1/streams/{stream}/batches",
    summary="Answer a batch",
    response_model=BatchAnswer,
    responses=problems(*UPLOAD_CODES),
    openapi_extra=_form(several=True),
)
async def answer_batch(request: Request, stream: StreamName, report: Report = None) -> BatchAnswer:
    """The files in `images` (PNG, JPEG, TIFF, BMP, WebP, DICOM, or one NumPy array) are the stream's next batch.

    The first batch of a stream creates it.
    """
    service: Service = request.app.state.service
    service.engine  # noqa: B018 not before it is loaded
    with service.held.share() as share:
        pictures = await _pictures(request, service, share)
        answer = await service.answer_batch(stream, pictures)
        return shown(answer, _reports(pictures, answer) if report else None)


@router.post(
    "/v1/streams/{stream}/images",
    summary="Answer one picture",
    response_model=BatchAnswer,
    responses=problems(*UPLOAD_CODES, "one_picture_only"),
    openapi_extra=_form(several=False),
)
async def answer_image(request: Request, stream: StreamName, report: Report = None) -> BatchAnswer:
    """One picture, answered together with others that come in at the same time; each caller gets its own answer."""
    service: Service = request.app.state.service
    service.engine  # noqa: B018 not before it is loaded
    with service.held.share() as share:
        pictures = await _pictures(request, service, share)
        if len(pictures) > 1:
            raise Problem("one_picture_only", "Send several pictures, or a file that holds several, as a batch.")
        answer = await service.answer_one(stream, pictures[0])
        return shown(answer, _reports(pictures, answer) if report else None)


async def _pictures(request: Request, service: Service, share: Share) -> list[Picture]:
    limits = service.limits
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limits.body_bytes:  # a client that waits for it need not begin
        raise Problem("body_too_large", f"A body may have {limits.body_bytes:,} bytes here, and this one has more.")
    body = body_of(request.receive, limits.body_bytes, limits.body_seconds)
    form = {"most_files": limits.intake.images, "most_bytes": limits.intake.file_bytes}
    files = await files_of(request.headers.get("content-type", ""), body, share, **form)
    pictures = await service.decode(files)
    share.take(sum(picture.pixels.nbytes for picture in pictures))
    return pictures


def shown(answer: Answer, reports: list[str | None] | None = None) -> BatchAnswer:
    def named(numbers: list[float | None] | None) -> dict[str, float | None] | None:
        return None if numbers is None else by_expert(answer, numbers)

    return BatchAnswer(
        stream=answer.stream,
        step=answer.step,
        classes=list(answer.classes),
        predictions=list(answer.predictions),
        probabilities=[list(row) for row in answer.probabilities],
        encoder_coefficients=named(answer.encoder_coefficients),
        head_coefficients=named(answer.head_coefficients),
        entropies=named(answer.entropy),
        consistency=named(answer.consistency),
        head_expert=answer.head_expert,
        switched_off=list(answer.switched_off),
        pool_hash=answer.pool_sha256,
        model_hash=answer.weights_sha256,
        findings=[Finding(**finding.to_json()) for finding in answer.findings],
        abstention=answer.abstention,
        audit=answer.audit if answer.audit.get("hash") else None,
        batch_size=answer.batch_size,
        position=answer.position,
        milliseconds=1000 * answer.seconds,
        reports=reports,
    )


def _reports(pictures: Sequence[Picture], answer: Answer) -> list[str | None]:
    """One for each picture that came from DICOM and has the identifiers that a report needs."""
    return [_report(picture, answer, row) for row, picture in enumerate(pictures)]


def _report(picture: Picture, answer: Answer, row: int) -> str | None:
    if picture.source is None:
        return None
    try:
        return base64.b64encode(report_of(picture, answer, row)).decode("ascii")
    except InputError:
        return None


def report_of(picture: Picture, answer: Answer, row: int) -> bytes:
    """A DICOM structured report of one picture's answer."""
    from mergestream.serving.structured_report import Finding as Reported
    from mergestream.serving.structured_report import write

    coefficients = by_expert(answer, answer.encoder_coefficients)
    reported = Reported(
        predicted=answer.predictions[row] or "undecided",
        probabilities=dict(zip(answer.classes, answer.probabilities[row], strict=True)),
        coefficients={name: number for name, number in coefficients.items() if number is not None},
        pool_sha256=answer.pool_sha256,
        model_sha256=answer.weights_sha256 or "none: no single merged model answered",
    )
    return write(picture, reported)
