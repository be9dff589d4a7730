"""What arrives by any door (C-STORE, STOW-RS, a pulled study) goes through here into the inbox, by the same rules."""

import logging
from collections import Counter
from collections.abc import Iterable
from threading import Lock
from typing import NamedTuple

from mergestream.data.intake.limits import MEBIBYTE, IntakeError
from mergestream.serving.dicom_network import dimse, negotiation
from mergestream.serving.dicom_network.dimse import Status
from mergestream.serving.dicom_network.inbox import Inbox, InboxFullError, IncomingFile, MismatchError, read_file_meta
from mergestream.serving.dicom_network.rules import EACH_OBJECT, Rules

log = logging.getLogger(__name__)


class Stored(NamedTuple):
    """The status of one file, and its UIDs if it has any."""

    status: Status
    sop_class: str = ""
    sop_instance: str = ""


class Reception:
    """Admission and refusal of senders and objects. Safe to use from several threads."""

    def __init__(self, inbox: Inbox, rules: Rules, ae_title: str) -> None:
        self.inbox, self._rules, self._ae_title = inbox, rules, ae_title
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = Lock()
        self.flushes_each = rules.flush == EACH_OBJECT

    def count(self, what: str, outcome: str, number: int = 1) -> None:
        with self._lock:
            self._counts[what, outcome] += number

    def counted(self, what: str, outcome: str) -> int:
        return self._counts[what, outcome]

    def rejection_of(self, calling: str, called: str) -> tuple[int, int, int] | None:
        """Why an association is rejected, if it is."""
        if called != self._ae_title:
            return negotiation.CALLED_UNKNOWN
        if self._rules.callers and calling not in self._rules.callers:
            return negotiation.CALLING_UNKNOWN
        return None

    def store_files(self, files: Iterable[bytes], calling: str) -> "list[Stored]":
        """Keep DICOM files that came another way than by C-STORE. They are on disk when this returns."""
        stored = [self._store_file(data, calling) for data in files]
        self.inbox.flush()
        for each in stored:
            self.count("object", "received" if each.status.code == dimse.SUCCESS else "refused")
        return stored

    def _store_file(self, data: bytes, calling: str) -> "Stored":
        try:
            meta, start = read_file_meta(data)
        except ValueError:
            return Stored(Status(dimse.CANNOT_UNDERSTAND, "This is no DICOM file"))
        uids = (meta[0x0002], meta[0x0003])
        if uids[0] not in negotiation.image_classes() or meta[0x0010] not in negotiation.SYNTAXES:
            return Stored(Status(dimse.NOT_SUPPORTED, "SOP class or transfer syntax is not supported"), *uids)
        if len(data) > self._rules.limits.object_mib * MEBIBYTE:
            return Stored(self.refusal_of(IntakeError("too_large", "")), *uids)
        file = None
        try:
            file = self.inbox.new_file(meta[0x0010], *uids, calling)
            file.write(memoryview(data)[start:])
        except OSError as error:  # OutputError too
            if file is not None:
                file.discard()
            return Stored(self.refusal_of(error), *uids)
        return Stored(self.store(file, flushed=False), *uids)

    def store(self, file: IncomingFile | None, *, flushed: bool = True) -> Status:
        """Check a complete object and keep it. Success: it is on disk, or was answered before.

        `flushed` is False for a caller that calls `inbox.flush` itself.
        """
        assert file is not None
        try:
            received = file.received()
            header = received.header
            if self._rules.rule_for(header) is None:
                about = f"modality {_word(header.modality)}, body part {_word(header.body_part)}"
                about += f", view {_word(header.view)}" if header.view else ""
                file.discard()
                return Status(dimse.NO_RULE, f"No rule for {about}")
            self.inbox.store(file, received, flushed=flushed)
        except (IntakeError, OSError) as error:
            file.discard()
            return self.refusal_of(error)
        return Status(dimse.SUCCESS)

    def refusal_of(self, error: Exception) -> Status:
        """The status for an object that cannot be kept."""
        if isinstance(error, MismatchError):
            return Status(dimse.MISMATCH, "Class or instance differ from the announced ones")
        if isinstance(error, IntakeError):
            too_large = error.code == "too_large"
            return Status(
                dimse.OUT_OF_RESOURCES if too_large else dimse.CANNOT_UNDERSTAND,
                "The object is larger than this node allows" if too_large else "The data set is damaged or cut off",
            )
        if not isinstance(error, InboxFullError):
            log.error("an object could not be written: %s", type(error).__name__)
        return Status(dimse.OUT_OF_RESOURCES, "The inbox is full or cannot be written; try again later")


def _word(text: str) -> str:
    """A value for a comment to the sender: a code string of a few characters."""
    return "".join(each for each in text[:16] if each.isalnum() or each in " _") or "(none)"
