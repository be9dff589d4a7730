"""Findings of the guards, the alarms of a stream that they raise, and the guards' settings.

docs/guards.md explains the defaults. An alarm says since when, what to do next, and who has acknowledged it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from mergestream.runtime.errors import InputError, unknown_name
from mergestream.runtime.option_checks import names, number, one_of, whole_number, yes_or_no

Severity = Literal["info", "warning", "alarm"]
INFO: Severity = "info"
WARNING: Severity = "warning"
ALARM: Severity = "alarm"
NEAR_UNIFORM, EQUAL = "near_uniform_entropies", "equal_entropies"
SATURATED, BLANK, STRUCTURELESS = "saturated_expert", "blank_pictures", "structureless_pictures"
DISAGREEMENT, COLLAPSE = "confident_disagreement", "class_collapse"
ENTROPY_DRIFT, CLASS_DRIFT = "entropy_drift", "class_drift"
FALLBACK, RESTARTED, ABSTAINED = "fallback", "average_restarted", "abstained"
LOW_CONFIDENCE = "low_confidence"  # a reason to abstain, not a finding
# Findings about one batch that may call the fallback; those and findings about the stream may make it abstain.
BATCH_CODES = (NEAR_UNIFORM, EQUAL, SATURATED, BLANK, STRUCTURELESS)
ABSTAIN_CODES = (*BATCH_CODES, DISAGREEMENT, COLLAPSE, ENTROPY_DRIFT, CLASS_DRIFT)
LISTS = {"fallback_on": BATCH_CODES, "abstain_on": ABSTAIN_CODES}  # settings that are lists of codes
NO_FALLBACK, ENSEMBLE, UNIFORM, EXPERT = "none", "ensemble", "uniform", "expert:"


@dataclass(frozen=True)
class GuardSettings:
    """Settings of the guards."""

    fallback: str = ENSEMBLE  # who answers a batch without evidence: 'ensemble', 'uniform', 'expert:NAME' or 'none'
    fallback_on: tuple[str, ...] = (NEAR_UNIFORM, EQUAL)  # findings about a batch that call the fallback
    near_uniform: float = 0.95  # every expert's entropy is at least this share of log C
    equal_within: float = 0.005  # the experts' entropies span at most this share of their mean
    saturated: float = 16.0  # nats between an expert's two best classes that no fit gives, on half the images or more
    blank: float = 0.05  # range of an image's pixels, in units of the pool's normalisation
    structure: float = 0.25  # correlation of neighbouring pixels below which an image is noise
    as_received: bool = True  # judge noise by the pixels before they are resized, too
    sure: float = 0.9  # probability from which an expert counts as confident
    disagreement: float = 0.5  # share of the window's images on which the confident experts have no majority
    window: int = 256  # images in the window at most
    fewest: int = 128  # images before it is judged
    drift_after: int = 20  # batches (with `fewest` images or more) that set the reference
    drift_slack: float = 0.5  # standard deviations that a batch may be off without being counted (CUSUM's k)
    drift_limit: float = 12.0  # sum at which the alarm is raised (CUSUM's h)
    # Findings that leave their images undecided; those without positions, all images of the batch.
    abstain_on: tuple[str, ...] = (NEAR_UNIFORM, BLANK, STRUCTURELESS)
    abstain_below: float | None = None  # an image whose highest probability is lower stays undecided; None: no limit
    watch_experts: bool = True  # run every expert on every batch, even if the method does not need it

    def __post_init__(self) -> None:
        if not self.fallback.startswith(EXPERT):
            one_of("fallback", self.fallback, (NO_FALLBACK, ENSEMBLE, UNIFORM, f"{EXPERT}NAME"))
        for option, allowed in LISTS.items():
            object.__setattr__(self, option, names(option, getattr(self, option) or ()))
            for code in getattr(self, option):
                one_of(option, code, allowed)
        for share in ("near_uniform", "equal_within", "sure", "disagreement"):
            number(share, getattr(self, share), low=0, high=1)
        for size in ("saturated", "blank", "drift_slack", "drift_limit"):
            number(size, getattr(self, size), low=0)
        number("structure", self.structure, low=-1, high=1)
        whole_number("fewest", self.fewest, low=1)
        whole_number("window", self.window, low=2)
        whole_number("drift_after", self.drift_after, low=2)
        if self.fewest > self.window // 2:
            # The window is two halves that are forgotten in turn, so it may hold only one half.
            raise InputError(f"'fewest' is at most half of 'window' ({self.window}); got {self.fewest}.")
        if self.abstain_below is not None:
            number("abstain_below", self.abstain_below, low=0, high=1)
        for choice in ("as_received", "watch_experts"):
            yes_or_no(choice, getattr(self, choice))

    def require_expert(self, experts: Sequence[str]) -> None:
        """Check that a fallback expert is in the pool."""
        name = self.fallback.removeprefix(EXPERT)
        if self.fallback.startswith(EXPERT) and name not in experts:
            raise unknown_name("expert in this pool", name, experts)


@dataclass(frozen=True)
class Finding:
    """Finding of a guard: a stable code, a severity, a sentence for people, and its numbers."""

    code: str
    severity: Severity
    sentence: str
    numbers: dict[str, Any] = field(default_factory=dict)

    def concerns(self, position: int) -> bool:
        """Whether it is about this image of the batch: it names no images, or this one, or not all that it is about."""
        named = self.numbers.get("positions")
        return named is None or position in named or self.numbers["pictures"] > len(named)


NEXT = {
    NEAR_UNIFORM: "Check that these are images of the kind that the experts were trained on.",
    EQUAL: "Look at the last images; if they are right, have them read by a person until this ends.",
    SATURATED: "Switch this expert off and ask its site for its checkpoint again.",
    BLANK: "Check the device or the export that sends these images; have them taken again.",
    STRUCTURELESS: "Check the device or the export that sends these images; have them taken again.",
    DISAGREEMENT: "Have these images read by a person, and compare each expert with the readings.",
    COLLAPSE: "Do not use the answers of this stream; compare them with readings, then reset the stream.",
    ENTROPY_DRIFT: "Ask what changed (scanner, protocol, patients). If it is to stay, check answers and reset.",
    CLASS_DRIFT: "Ask what changed (scanner, protocol, patients). If it is to stay, check answers and reset.",
    FALLBACK: "See the finding that called the fallback; this ends with the first batch that has evidence.",
    RESTARTED: "Nothing, if the change was intended. Watch the first batches: the averages are new.",
}

ASK = "Ask the operator of the service: this finding is of another version."


@dataclass(frozen=True)
class Alarm:
    """A finding that needs a person. It lasts while every step of the stream has a finding of this code."""

    code: str
    severity: Severity
    sentence: str  # that of the last step
    step: int  # the step in which it began
    since: str  # the time of that step, ISO 8601 in UTC
    next: str  # what to do
    acknowledged_by: str | None = None
    acknowledged_at: str | None = None


def alarms_after(
    before: Iterable[Alarm] | None, findings: Iterable[Finding], step: int, time: str
) -> tuple[Alarm, ...]:
    """The alarms of a stream after a step with these findings."""
    lasting = {alarm.code: alarm for alarm in before or ()}
    return tuple(
        replace(
            lasting.get(each.code) or Alarm(each.code, each.severity, "", step, time, NEXT.get(each.code, ASK)),
            sentence=each.sentence,
        )
        for each in findings
        if each.severity != INFO
    )


def codes_to_acknowledge(alarms: Iterable[Alarm] | None) -> list[str]:
    """The codes of alarms that are not acknowledged yet; there must be one."""
    if alarms is None:
        raise InputError("Its alarms are unknown since the restart: they are known after its next batch.")
    unacknowledged = [alarm.code for alarm in alarms if alarm.acknowledged_by is None]
    if not unacknowledged:
        raise InputError("The stream has no alarm that is not acknowledged.")
    return unacknowledged


def acknowledge(alarms: Iterable[Alarm], by: str, at: str) -> tuple[Alarm, ...]:
    """The same alarms, with a name and a time on those that were not acknowledged yet."""
    return tuple(
        each if each.acknowledged_by else replace(each, acknowledged_by=by, acknowledged_at=at) for each in alarms
    )
