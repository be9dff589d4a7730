"""Responses of the service, as the OpenAPI document describes them."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from mergestream.serving.guards.findings import Alarm, Finding

ByExpert = dict[str, float | None]
# Neither control characters nor marks that change the direction of text.
VISIBLE = r"^[^\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]*$"


class Document(BaseModel):
    model_config = ConfigDict(extra="forbid")


class BatchAnswer(Document):
    """The answer to a batch, or to one image of it."""

    stream: str
    step: int = Field(description="Number of the step in this stream, from 0.")
    classes: list[str]
    predictions: list[str | None] = Field(description="A class per image; null if the service abstains.")
    abstained_because: list[list[str] | None] = Field(
        description="Per image: why the service abstains (codes of findings, or low_confidence); null if it does not."
    )
    probabilities: list[list[float]] = Field(description="Per image, in the order of `classes`.")
    encoder_coefficients: ByExpert | None = Field(
        description="Per expert, of the model that answered; null if no single merged model did."
    )
    head_coefficients: ByExpert | None
    entropies: ByExpert | None = Field(description="Per expert, in nats; null for one that is switched off.")
    consistency: ByExpert | None
    head_expert: str | None
    switched_off: list[str]
    pool_hash: str
    model_hash: str | None = Field(description="Hash of the merged weights that answered.")
    findings: list[Finding]
    abstention: dict[str, Any] | None
    audit: dict[str, Any] | None = Field(description="Sequence number and hash of this step's audit line.")
    batch_size: int = Field(description="Images that were answered together, by one merged model.")
    depends_on_batch: bool = Field(
        description="True: answered together with other images, beside others the answer may be another. "
        "False: it depends on the image and the stream's past alone."
    )
    position: int | None = Field(description="Position of one image in the batch it was answered with, from 0.")
    milliseconds: float
    images: list["BatchAnswer"] | None = Field(
        None, description="If several images were answered one by one: the answer to each, with its own model."
    )
    reports: list[str | None] | None = Field(
        None, description="With ?report=dicom-sr: a DICOM structured report in base64 per image from DICOM."
    )


class StreamStatus(Document):
    """Status of a stream. The fields of its last step are empty if that is not in the audit log's last files."""

    name: str
    steps: int
    images: int
    last_step_at: str | None
    encoder_coefficients: ByExpert
    head_coefficients: ByExpert
    entropies: ByExpert
    head_expert: str | None
    alarms: list[Alarm] | None = Field(
        description="Warnings and alarms of its last step; null if they are unknown since a restart."
    )


class Streams(Document):
    streams: list[StreamStatus]


class PoolExpert(Document):
    """An expert's card, without its training recipe."""

    name: str
    on: bool
    domain: str | None
    metrics: dict[str, Any]
    network: str
    temperature: float
    weights_hash: str


class PoolStatus(Document):
    hash: str
    classes: list[str]
    method: str
    options: dict[str, Any]
    experts: list[PoolExpert]


class Latency(Document):
    """Of the last requests with images, from the first line to the last byte of the response."""

    p50: float | None
    p95: float | None
    p99: float | None


class Requests(Document):
    """Requests with images since the start."""

    answered: int
    refused: int
    failed: int


class Overview(Document):
    pool: PoolStatus
    streams: list[StreamStatus]
    latency_ms: Latency
    requests: Requests
    administrator: bool
    version: str


class RecentStep(Document):
    step: int
    time: str
    images: int
    encoder_coefficients: ByExpert
    head_coefficients: ByExpert
    entropies: ByExpert
    head_expert: str | None
    predictions_per_class: dict[str, int]
    findings: list[Finding]
    milliseconds: float


class Recent(Document):
    stream: str
    steps: list[RecentStep]


class Switch(Document):
    on: bool = Field(strict=True)


class Acknowledgement(Document):
    name: str = Field(description="The person who knows of the alarms.", min_length=1, max_length=100, pattern=VISIBLE)
    note: str = Field("", description="What was done; nothing about a patient.", max_length=500, pattern=VISIBLE)


class Switched(Document):
    expert: str
    on: bool
    switched_off: list[str]


class Reloaded(Document):
    """`changed`: the pool is another one, so the averages of the streams in `restarted` begin again."""

    before: str
    after: str
    changed: bool
    experts: list[str]
    switched_off: list[str]
    restarted: list[str]


class Health(Document):
    status: str


class ProblemDocument(BaseModel):
    """RFC 9457. `code` is stable; texts may change."""

    type: str = Field(examples=["urn:mergestream:problem:damaged"])
    title: str
    status: int
    detail: str
    code: str
    request_id: str
    position: int | None = Field(None, description="Position of the refused file, from 0.")
