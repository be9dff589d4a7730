"""Alarms of a stream: what its last step found, since when, what to do next, and who has acknowledged it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mergestream.runtime.errors import InputError
from mergestream.serving.guards import findings as codes
from mergestream.serving.guards.findings import Finding, Severity

NEXT = {
    codes.NEAR_UNIFORM: "Check that these are images of the kind that the experts were trained on.",
    codes.EQUAL: "Look at the last images; if they are right, have them read by a person until this ends.",
    codes.SATURATED: "Switch this expert off and ask its site for its checkpoint again.",
    codes.BLANK: "Check the device or the export that sends these images; have them taken again.",
    codes.STRUCTURELESS: "Check the device or the export that sends these images; have them taken again.",
    codes.DISAGREEMENT: "Have these images read by a person, and compare each expert with the readings.",
    codes.COLLAPSE: "Do not use the answers of this stream; compare them with readings, then reset the stream.",
    codes.ENTROPY_DRIFT: "Ask what changed (scanner, protocol, patients). If it is to stay, check answers and reset.",
    codes.CLASS_DRIFT: "Ask what changed (scanner, protocol, patients). If it is to stay, check answers and reset.",
    codes.FALLBACK: "See the finding that called the fallback; this ends with the first batch that has evidence.",
    codes.RESTARTED: "Nothing, if the change was intended. Watch the first batches: the averages are new.",
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
        if each.severity != codes.INFO
    )


def codes_to_acknowledge(alarms: Iterable[Alarm] | None) -> list[str]:
    """The codes of alarms that nobody has acknowledged; there must be one."""
    if alarms is None:
        raise InputError("Its alarms are unknown since the restart: they are known after its next batch.")
    unacknowledged = [alarm.code for alarm in alarms if alarm.acknowledged_by is None]
    if not unacknowledged:
        raise InputError("The stream has no alarm that is not acknowledged.")
    return unacknowledged


def acknowledge(alarms: Iterable[Alarm], by: str, at: str) -> tuple[Alarm, ...]:
    """The same alarms, with a name and a time on those that nobody had acknowledged."""
    return tuple(
        each if each.acknowledged_by else replace(each, acknowledged_by=by, acknowledged_at=at) for each in alarms
    )
