"""What the service answers, as OpenAPI describes it."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

ByExpert = dict[str, float | None]
EXAMPLE_HASH = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Finding(Model):
    """What a guard rail saw."""

    code: str = Field(description="Stable; docs/guards.md lists them.")
    severity: Literal["info", "warning", "alarm"]
    sentence: str
    numbers: dict[str, Any] = {}


class BatchAnswer(Model):
    """The answer to a batch, or to one picture of it."""

    stream: str
    step: int = Field(description="Of this stream, from 0.")
    classes: list[str]
    predictions: list[str | None] = Field(description="A class for each picture; null where the service abstains.")
    probabilities: list[list[float]] = Field(description="For each picture, in the order of `classes`.")
    encoder_coefficients: ByExpert | None = Field(
        description="By expert, of the model that answered; null where no single merged model did."
    )
    head_coefficients: ByExpert | None
    entropies: ByExpert | None = Field(description="By expert, in nats; null for one that is switched off.")
    consistency: ByExpert | None
    head_expert: str | None
    switched_off: list[str]
    pool_hash: str
    model_hash: str | None = Field(description="Of the merged weights that answered.")
    findings: list[Finding]
    abstention: dict[str, Any] | None
    audit: dict[str, Any] | None = Field(description="Sequence number and hash of the line that holds this step.")
    batch_size: int
    position: int | None = Field(description="Of one picture in the batch that it was answered with, from 0.")
    milliseconds: float
    reports: list[str | None] | None = Field(
        None, description="With ?report=dicom-sr: a DICOM structured report in base64 for each picture from DICOM."
    )


class Alarm(Model):
    code: str
    severity: str
    sentence: str


class StreamStanding(Model):
    """Where a stream stands. What was said of its last step is empty after a restart."""

    name: str
    steps: int
    images: int
    last_step_at: str | None
    encoder_coefficients: ByExpert
    head_coefficients: ByExpert
    entropies: ByExpert
    head_expert: str | None
    alarms: list[Alarm]


class Streams(Model):
    streams: list[StreamStanding]


class PoolExpert(Model):
    """An expert's card, without its training recipe."""

    name: str
    on: bool
    domain: str | None
    network: str
    metrics: dict[str, Any]
    temperature: float
    weights_hash: str


class PoolStanding(Model):
    hash: str
    classes: list[str]
    method: str
    options: dict[str, Any]
    experts: list[PoolExpert]


class OverviewExpert(Model):
    name: str
    on: bool
    domain: str | None
    metrics: dict[str, Any]


class OverviewPool(Model):
    hash: str
    classes: list[str]
    experts: list[OverviewExpert]


class Latency(Model):
    """Of the last answers to pictures, from a request's first line to its answer's last byte."""

    p50: float | None
    p95: float | None
    p99: float | None


class Requests(Model):
    """Requests with pictures since the start."""

    answered: int
    refused: int
    failed: int


class Overview(Model):
    pool: OverviewPool
    streams: list[StreamStanding]
    latency_ms: Latency
    requests: Requests
    administrator: bool
    version: str


class RecentStep(Model):
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


class Recent(Model):
    stream: str
    steps: list[RecentStep]


class Switch(Model):
    on: bool = Field(strict=True)


class Switched(Model):
    expert: str
    on: bool
    switched_off: list[str]


class Reloaded(Model):
    """`changed`: the weights are others, so the averages of the streams in `restarted` begin again."""

    before: str
    after: str
    changed: bool
    experts: list[str]
    switched_off: list[str]
    restarted: list[str]


class Health(Model):
    status: str


class ProblemDocument(BaseModel):
    """RFC 9457. `code` is stable; sentences may change."""

    type: str = Field(examples=["urn:mergestream:problem:damaged"])
    title: str
    status: int
    detail: str
    code: str
    request_id: str
    position: int | None = Field(None, description="Of the file that was refused, from 0.")
