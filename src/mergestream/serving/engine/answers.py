"""The answer to a caller, and the numbers of the same step for its audit line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mergestream.data.intake.pictures import Picture
from mergestream.pool.expert_pool import ExpertPool, sha256_of_tensor
from mergestream.serving.engine.lineup import Lineup
from mergestream.serving.engine.service_step import Outcome
from mergestream.serving.guards.alarms import Alarm
from mergestream.serving.guards.batch_guards import abstained
from mergestream.serving.guards.findings import RESTARTED, WARNING, Finding, GuardSettings

PerExpert = list[float | None] | None  # one number per expert of the pool, switched off or not


@dataclass(frozen=True)
class Answer:
    """The answer to a batch of B pictures, or to one of them. Numbers by expert are in the order of `experts`."""

    stream: str
    step: int
    classes: tuple[str, ...]
    predictions: tuple[str | None, ...]  # [B]; None where the service abstains
    probabilities: tuple[tuple[float, ...], ...]  # [B][C]
    experts: tuple[str, ...]
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
    batch_size: int
    position: int | None = None  # of one picture in the batch it was answered with
    begun: tuple[Alarm, ...] = ()  # alarms of the stream that began with this step

    def of(self, position: int) -> "Answer":
        """The answer to one picture: its own row, and what all pictures of its batch share."""
        own = slice(position, position + 1)
        return replace(
            self, predictions=self.predictions[own], probabilities=self.probabilities[own], position=position
        )


def answer_of(
    stream: str,
    step: int,
    lineup: Lineup,
    outcome: Outcome,
    settings: GuardSettings,
    line: Mapping[str, Any],
    seconds: float,
    restart: str | None = None,
) -> Answer:
    """The answer to the caller, once `line` is in the log. `restart`: why the averages started anew."""
    probabilities = torch.softmax(outcome.logits, dim=-1)
    undecided = set(abstained(outcome.logits, settings))
    classes = lineup.pool.classes
    predictions = outcome.logits.argmax(dim=-1).tolist()
    return Answer(
        stream=stream,
        step=step,
        classes=classes,
        predictions=tuple(None if i in undecided else classes[c] for i, c in enumerate(predictions)),
        probabilities=tuple(map(tuple, probabilities.tolist())),
        experts=lineup.pool.names,
        switched_off=lineup.off,
        encoder_coefficients=lineup.spread(outcome.encoder_coefficients, 0.0),
        head_coefficients=lineup.spread(outcome.head_coefficients, 0.0),
        entropy=lineup.spread(outcome.step.entropy, None),
        consistency=lineup.spread(outcome.step.consistency, None),
        head_expert=outcome.head_expert,
        pool_sha256=lineup.identity["pool_sha256"],
        weights_sha256=outcome.weights_sha256,
        findings=(*([restarted(restart)] if restart else []), *outcome.findings),
        abstention=_abstention(len(undecided), lineup.pool, settings),
        audit={name: line.get(name) for name in ("sequence", "hash")},
        seconds=seconds,
        batch_size=len(predictions),
    )


def input_of(picture: Picture) -> dict[str, Any]:
    """A picture in the log: its hashes, and which image of its file it was."""
    hashes = {"sha256": picture.sha256, "pixels_sha256": picture.pixels_sha256}
    return hashes if picture.frame is None else {**hashes, "frame": picture.frame}


def measured(outcome: Outcome, lineup: Lineup, settings: GuardSettings) -> dict[str, Any]:
    """The part of an audit line that follows from pictures, state and experts: a replay must compute the same."""
    step = outcome.step
    return {
        "entropy": lineup.spread(step.entropy, None),
        "scores": lineup.spread(step.scores, None),
        "consistency": lineup.spread(step.consistency, None),
        "encoder_coefficients": lineup.spread(outcome.encoder_coefficients, 0.0),
        "head_coefficients": lineup.spread(outcome.head_coefficients, 0.0),
        "lambdas": None
        if step.lambdas is None
        else lineup.spread(step.lambdas.reshape(len(step.lambdas), -1).mean(dim=1), None),
        "class_shift": None if step.class_shift is None else step.class_shift.tolist(),
        "head_expert": outcome.head_expert,
        "weights_sha256": outcome.weights_sha256,
        "logits_sha256": sha256_of_tensor(outcome.logits),
        "predictions": outcome.logits.argmax(dim=-1).tolist(),
        "abstained": abstained(outcome.logits, settings),
        "fallback": outcome.fallback,
        "findings": [finding.to_json() for finding in outcome.findings],
    }


def _abstention(undecided: int, pool: ExpertPool, settings: GuardSettings) -> dict[str, Any] | None:
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
    validation = metrics.get("validation")
    validation = validation if isinstance(validation, Mapping) else {}
    accuracy = validation.get("accuracy")
    row = _row_at(validation.get("risk_by_confidence"), threshold)
    return {
        "error": 1 - accuracy if isinstance(accuracy, float | int) else None,
        "coverage": None if row is None else row[1],
        "risk": None if row is None else row[2],
    }


def _row_at(rows: Any, threshold: float) -> Sequence[float] | None:
    if not isinstance(rows, list) or not all(isinstance(row, list | tuple) and len(row) == 3 for row in rows):
        return None
    return next((row for row in sorted(rows) if row[0] >= threshold), None)


def restarted(why: str) -> Finding:
    """Reported with the first answer after a stream's averages started anew."""
    return Finding(RESTARTED, WARNING, f"The averages of this stream started anew: {why}")
