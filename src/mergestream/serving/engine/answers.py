"""The answer to a caller, built from the audit line of its step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mergestream.pool.expert_pool import ExpertPool
from mergestream.serving.guards.batch_guards import Abstained
from mergestream.serving.guards.findings import RESTARTED, WARNING, Alarm, Finding, GuardSettings

PerExpert = dict[str, float | None] | None  # one number per expert of the pool, switched off or not
PER_EXPERT = ("encoder_coefficients", "head_coefficients", "entropy", "consistency")
# What an answer takes from the audit line of its step; the first are of the model that answered.
OF_ONE_MODEL = (*PER_EXPERT, "head_expert", "weights_sha256")
SHARED = (*OF_ONE_MODEL, "stream", "step", "pool_sha256", "seconds")


@dataclass(frozen=True)
class Answer:
    """The answer to a batch of B pictures, or to one of them."""

    stream: str
    step: int
    classes: tuple[str, ...]
    predictions: tuple[str | None, ...]  # [B]; None where the service abstains
    probabilities: tuple[tuple[float, ...], ...]  # [B][C]
    switched_off: tuple[str, ...]
    encoder_coefficients: PerExpert
    head_coefficients: PerExpert
    entropy: PerExpert
    consistency: PerExpert
    head_expert: str | None
    pool_sha256: str
    weights_sha256: str | None
    findings: tuple[Finding, ...]
    abstention: dict[str, Any] | None
    audit: dict[str, Any]  # sequence and hash of the line that holds this step
    seconds: float
    batch_size: int  # images that were answered together
    position: int | None = None  # of one picture in the batch it was answered with
    abstained: Abstained = field(default_factory=dict)
    prediction_sets: tuple[tuple[str, ...], ...] | None = None  # [B]; None where the service makes none
    begun: tuple[Alarm, ...] = ()  # alarms of the stream that began with this step
    singles: tuple["Answer", ...] = ()  # of pictures that were answered one by one: the answer to each

    @property
    def steps(self) -> tuple["Answer", ...]:
        """One answer per step of the stream."""
        return self.singles or (self,)

    def of(self, position: int) -> "Answer":
        """The answer to one picture: its own row, and what all pictures of its batch share."""
        if self.singles:
            return self.singles[position].of(0)
        own = slice(position, position + 1)
        return replace(
            self,
            predictions=self.predictions[own],
            probabilities=self.probabilities[own],
            prediction_sets=None if self.prediction_sets is None else self.prediction_sets[own],
            abstained={0: self.abstained[position]} if position in self.abstained else {},
            position=position,
        )

    @classmethod
    def of_singles(cls, answers: Sequence["Answer"]) -> "Answer":
        """The answer to pictures that were answered one by one. Without numbers of a model: each had another."""
        if len(answers) == 1:
            return answers[0]
        last, findings = answers[-1], {finding.code: finding for answer in answers for finding in answer.findings}
        no_model: dict[str, Any] = dict.fromkeys(OF_ONE_MODEL)
        undecided = {i: answer.abstained[0] for i, answer in enumerate(answers) if answer.abstained}
        return replace(
            last,
            predictions=tuple(answer.predictions[0] for answer in answers),
            probabilities=tuple(answer.probabilities[0] for answer in answers),
            prediction_sets=tuple(each.prediction_sets[0] for each in answers if each.prediction_sets) or None,
            **no_model,
            findings=tuple(findings.values()),
            abstained=undecided,
            abstention=last.abstention and {**last.abstention, "pictures": len(undecided)},
            seconds=sum(answer.seconds for answer in answers),
            singles=tuple(answers),
        )


def logged_answer(body: Mapping[str, Any], classes: Sequence[str]) -> Answer:
    """The answer of a step as far as its audit line holds it: without probabilities."""
    names = [classes[number] if number < len(classes) else None for number in body["predictions"]]
    undecided = dict(zip(body["abstained"], body["abstained_because"], strict=True))
    findings = [Finding(**each) for each in body["findings"]]
    if body.get("restarted"):  # reported with the first answer after that
        sentence = f"The averages of this stream started anew: {body['restarted']}"
        findings.insert(0, Finding(RESTARTED, WARNING, sentence))
    sets = body.get("prediction_sets")
    by_expert = {name: body[name] and dict(zip(body["experts"], body[name], strict=True)) for name in PER_EXPERT}
    return Answer(
        **{name: body[name] for name in SHARED} | by_expert,
        classes=tuple(classes),
        predictions=tuple(None if place in undecided else name for place, name in enumerate(names)),
        probabilities=(),
        switched_off=tuple(body["switched_off"]),
        findings=tuple(findings),
        abstention=None,
        audit={},
        batch_size=len(names),
        abstained=undecided,
        prediction_sets=None if sets is None else tuple(tuple(classes[each] for each in row) for row in sets),
    )


def abstention_of(undecided: int, pool: ExpertPool, settings: GuardSettings) -> dict[str, Any] | None:
    if settings.abstain_below is None:
        return None
    risks = {card.name: source_risk(card.metrics, settings.abstain_below) for card in pool.cards}
    complete = all(risk["risk"] is not None for risk in risks.values())
    note = (
        "Risks are each expert's own on its source validation set, at this confidence; not the merged model's."
        if complete
        else "Not every expert's card holds its risk by confidence (metrics.validation.risk_by_confidence); 'error' is "
        "its error on all of its source validation set."
    )
    return {"threshold": settings.abstain_below, "pictures": undecided, "source_validation": risks, "note": note}


def source_risk(metrics: Mapping[str, Any], threshold: float) -> dict[str, float | None]:
    """An expert's error on its own validation set: on all of it, and among answers of at least this confidence.

    A card may hold rows [confidence, coverage, risk] as 'risk_by_confidence'; the first one not below counts.
    """
    validation = metrics.get("validation") or {}
    accuracy, rows = validation.get("accuracy"), validation.get("risk_by_confidence") or []
    _, coverage, risk = next((row for row in sorted(rows) if row[0] >= threshold), (None, None, None))
    return {"error": None if accuracy is None else 1 - accuracy, "coverage": coverage, "risk": risk}
