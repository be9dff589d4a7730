"""Threads that send what is in the outbox, one per destination, and what an operator sees of them."""

import logging
import random
import threading
from pathlib import Path
from typing import Any

from mergestream.runtime.errors import MergestreamError
from mergestream.serving.monitoring import Metrics
from mergestream.serving.reports.destinations import Destination, SendingPlan
from mergestream.serving.reports.outbox import DAY, FAILED, SENT, WAITING, Entry, Outbox
from mergestream.serving.reports.senders import SendOutcome, UnreachableError, connected

BATCH, LOOK_SECONDS = 50, 1.0
FIRST_PAUSE, LONGEST_PAUSE, LONGEST_RETRY = 2.0, 300.0, 3600.0  # seconds
GAUGES = {
    WAITING: "Reports that wait for their destination.",
    SENT: "Reports that their destination confirmed in the last 30 days.",
    FAILED: "Reports that failed for good.",
    "oldest_seconds": "Age of the oldest report that waits.",
}
log = logging.getLogger(__name__)


def pause_after(failures: int, longest: float) -> float:
    """Seconds before the next try: doubled with each failure, and jittered so that many do not come at once."""
    return min(longest, FIRST_PAUSE * 2 ** min(failures, 30)) * random.uniform(0.5, 1.0)  # noqa: S311 no secret


class Sender(threading.Thread):
    """Sends the entries of one destination, oldest first. An entry is done only when the destination confirmed it."""

    def __init__(self, outbox: Outbox, destination: Destination, give_up_days: float) -> None:
        super().__init__(name=f"sender {destination.name}", daemon=True)
        self._outbox, self._destination, self._give_up = outbox, destination, give_up_days * DAY
        self.wake, self.ending = threading.Event(), threading.Event()
        self._failures = 0
        outbox.listeners.append(self.wake)

    def run(self) -> None:
        while not self.ending.is_set():
            self.wake.clear()
            try:
                pause = self._send_due()
            except Exception as error:  # the entries stay
                # Messages of other errors may quote a report.
                shown = isinstance(error, MergestreamError | UnreachableError)
                pause = self._unreachable(str(error) if shown else type(error).__name__)
            (self.ending if self._failures else self.wake).wait(pause)

    def _send_due(self) -> float:
        """Send a batch over one connection; return how long to wait before the next."""
        entries = self._outbox.due(self._destination.name, BATCH)
        if not entries:
            return LOOK_SECONDS
        with connected(self._destination, [entry.kind for entry in entries]) as send:
            for entry in entries:
                file, gone = self._outbox.file_of(entry.uid), SendOutcome("The report's file is missing.", final=True)
                self.settle(entry, send(entry.kind, file) if file.exists() else gone)
                if self.ending.is_set():
                    break
        if self._failures:
            log.info("%s can be reached again", self._destination.name)
        self._failures = 0
        return 0.0

    def settle(self, entry: Entry, outcome: SendOutcome) -> None:
        if not outcome.reason:
            self._outbox.settle(entry, SENT)
        elif outcome.final or self._outbox.age(entry) > self._give_up:
            log.warning("a report for %s failed for good: %s", entry.destination, outcome.reason)
            self._outbox.settle(entry, FAILED, outcome.reason)
        else:
            self._outbox.settle(entry, WAITING, outcome.reason, pause_after(entry.tries, LONGEST_RETRY))

    def _unreachable(self, reason: str) -> float:
        """Show the reason at the first entry, give up those that are too old, and say how long to wait."""
        if not self._failures:
            log.warning("reports for %s wait: %s", self._destination.name, reason)
        self._failures += 1
        for place, entry in enumerate(self._outbox.due(self._destination.name, BATCH)):
            if place == 0 or self._outbox.age(entry) > self._give_up:
                old = self._outbox.age(entry) > self._give_up
                self._outbox.settle(entry, FAILED if old else WAITING, reason)
        return pause_after(self._failures, LONGEST_PAUSE)


class ReportSending:
    """The outbox of a service and its senders. In shadow mode there are none: reports are held."""

    def __init__(self, folder: Path, plan: SendingPlan, *, shadow: bool = False) -> None:
        self.plan, self.shadow, self.outbox = plan, shadow, Outbox(folder, plan.most_mib << 20)
        self._senders = [] if shadow else [Sender(self.outbox, each, plan.give_up_days) for each in plan.destinations]

    def start(self, metrics: Metrics) -> None:
        for key, about in GAUGES.items():
            metrics.add_gauge(f"outbox_{key}", about, lambda key=key: self._total(key))  # type: ignore[misc]
        for sender in self._senders:
            sender.start()

    def stop(self, seconds: float = 10.0) -> None:
        """End after the report in progress; the others wait on disk."""
        for sender in self._senders:
            sender.ending.set()
            sender.wake.set()
        for sender in self._senders:
            sender.join(seconds)

    def overview(self) -> dict[str, Any]:
        """Numbers per destination for the dashboard; nothing about a patient."""
        destinations = [{"name": each.name, **self.outbox.counts(each.name)} for each in self.plan.destinations]
        return {"shadow": self.shadow, "held_bytes": self.outbox.held_bytes(), "destinations": destinations}

    def _total(self, key: str) -> float:
        numbers = [self.outbox.counts(each.name)[key] for each in self.plan.destinations]
        return float(max(numbers, default=0) if key == "oldest_seconds" else sum(numbers))
