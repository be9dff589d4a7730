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
    model_hash: str | None = Field(
        description="Hash of the merged weights that answered, or after 'state:' of what they follow from."
    )
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
    prediction_set: list[list[str]] | None = Field(
        None, description="With --prediction-sets: per image, classes that hold the true one with the chosen chance."
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


class QualityEstimate(Document):
    """A number with its 95 % interval, and what it assumes."""

    value: float
    low: float
    high: float
    assumes: str


class EstimatedAccuracy(Document):
    """Without labels: from confidences (CBPE), and from the experts' thresholds (ATC) where one model answers."""

    by_confidence: QualityEstimate
    by_threshold: QualityEstimate | None


class ClassPrevalence(Document):
    """A class's mean probability with its 95 % interval, and the share that the site declared."""

    name: str
    value: float
    low: float
    high: float
    declared: float | None
    far: bool = Field(description="The two differ surely, and by an amount that matters.")


class PredictionSets(Document):
    coverage: float = Field(description="The chance that a set holds the true class, if the assumption holds.")
    mean_size: float
    prevalence: str = Field(description="The class shares they are made for: declared, or estimated from the stream.")
    assumes: str


class StreamQuality(Document):
    """Estimates of a stream's quality without labels, over its last answers (up to about 6,400)."""

    stream: str
    images: int = 0
    accuracy: EstimatedAccuracy | None = Field(
        default=None, description="Null if no answer with estimates is in the log."
    )
    classes: list[ClassPrevalence] = Field(default_factory=list)
    prevalence_assumes: str | None = None
    prediction_sets: PredictionSets | None = None


class PoolExpert(Document):
    """An expert's card, without its training recipe."""

    name: str
    on: bool
    domain: str | None
    metrics: dict[str, Any]
    network: str
    temperature: float
    weights_hash: str
    signed_by: str | None = Field(description="Its signer; null if signatures are not checked.")
    revoked: str | None = Field(description="Why it is revoked, in one sentence; null if it is not.")


class PoolStatus(Document):
    hash: str
    classes: list[str]
    method: str
    options: dict[str, Any]
    experts: list[PoolExpert]
    class_concepts: dict[str, dict[str, str]] = Field(description="Codes of the classes, from the experts' cards.")


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
    dicom: "NodeStatus | None" = Field(None, description="The DICOM node, if there is one; for administrators.")
    outbox: "OutboxStatus | None" = Field(None, description="Reports for other systems, if it sends any.")


class OutboxStatus(Document):
    """Reports for other systems; no destination where the service sends none."""

    shadow: bool
    held_bytes: int
    destinations: list[dict[str, Any]] = Field(
        description="name, waiting, sent (in 30 days), failed (for good), held, oldest_seconds (waiting), last_error"
    )


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
    quality: StreamQuality | None = Field(description="Estimates without labels; null before the first answer.")


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
    """`changed`: the pool is another one. Streams go on, but those in `restarted` begin their averages again."""

    before: str
    after: str
    changed: bool
    experts: list[str]
    added: list[str]
    removed: list[str]
    replaced: list[str] = Field(description="Same name, other weights.")
    signed_by: list[str] | None = Field(description="Signers in the order of the experts; null if not checked.")
    switched_off: list[str]
    restarted: list[str]


class NodeStatus(Document):
    """The DICOM node. Counts are since the start of the service. Numbers with a description are also metrics."""

    ae_title: str
    port: int | None
    failed: bool
    associations: int = Field(description="Open associations of the DICOM node.")
    associations_accepted: int = Field(description="Associations accepted since the start.")
    associations_rejected: int = Field(description="Associations rejected since the start.")
    associations_aborted: int = Field(description="Associations aborted or lost since the start.")
    objects_received: int = Field(description="Objects received since the start.")
    objects_refused: int = Field(description="Objects refused with a status since the start.")
    objects_answered: int = Field(description="Objects answered and delivered since the start.")
    objects_unanswerable: int = Field(description="Received objects that could not be answered since the start.")
    objects_waiting: int = Field(description="Objects in the inbox.")
    bytes_waiting: int = Field(description="Bytes of the objects in the inbox.")
    oldest_waiting_seconds: float = Field(description="Age of the oldest object in the inbox.")
    streams: list[str]
    sources: list[str]


class PullRequest(Document):
    source: str = Field(max_length=16)
    study: str = Field(pattern=r"^[0-9.]{1,64}$")


class Pulled(Document):
    """Objects of a pulled study."""

    received: int
    refused: int


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
