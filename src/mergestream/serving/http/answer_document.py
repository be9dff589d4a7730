"""An answer as the JSON document that clients get, over HTTP and in a watched folder."""

import base64
from collections.abc import Sequence

from mergestream.data.intake import Picture
from mergestream.runtime.errors import InputError
from mergestream.serving.engine.answers import Answer, PerExpert
from mergestream.serving.http.schemas import BatchAnswer


def answer_document(answer: Answer, reports: list[str | None] | None = None) -> BatchAnswer:
    return BatchAnswer(
        stream=answer.stream,
        step=answer.step,
        classes=list(answer.classes),
        predictions=list(answer.predictions),
        probabilities=[list(row) for row in answer.probabilities],
        encoder_coefficients=by_expert(answer, answer.encoder_coefficients),
        head_coefficients=by_expert(answer, answer.head_coefficients),
        entropies=by_expert(answer, answer.entropy),
        consistency=by_expert(answer, answer.consistency),
        head_expert=answer.head_expert,
        switched_off=list(answer.switched_off),
        pool_hash=answer.pool_sha256,
        model_hash=answer.weights_sha256,
        findings=list(answer.findings),
        abstention=answer.abstention,
        audit=answer.audit if answer.audit.get("hash") else None,
        batch_size=answer.batch_size,
        position=answer.position,
        milliseconds=1000 * answer.seconds,
        reports=reports,
    )


def by_expert(answer: Answer, numbers: PerExpert) -> dict[str, float | None] | None:
    """Numbers under the experts' names; None if no single merged model answered."""
    return None if numbers is None else dict(zip(answer.experts, numbers, strict=True))


def encoded_reports(pictures: Sequence[Picture], answer: Answer) -> list[str | None]:
    """A structured report in base64 per image; None for one without the DICOM identifiers that a report needs."""
    from mergestream.serving.structured_report import write_report

    reports: list[str | None] = []
    for row, picture in enumerate(pictures):
        try:
            reports.append(base64.b64encode(write_report(picture, answer, row)).decode("ascii"))
        except InputError:
            reports.append(None)
    return reports
