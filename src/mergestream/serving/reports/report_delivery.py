"""Results of received objects -> reports in the outbox. The UID of a report follows from its images."""

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mergestream.data.intake.limits import IntakeError, Limits
from mergestream.pool.class_concepts import Concepts
from mergestream.runtime.errors import InputError, OutputError, unknown_name
from mergestream.serving.dicom_network.results import UnitResult
from mergestream.serving.reports.destinations import SendingPlan, read_destinations
from mergestream.serving.reports.outbox import HELD, WAITING
from mergestream.serving.reports.report_pages import KINDS
from mergestream.serving.reports.source_header import Texts, derived_uid, read_texts
from mergestream.serving.reports.structured_report import ReportRequest, reported_image

if TYPE_CHECKING:
    from mergestream.serving.options import ServeOptions
    from mergestream.serving.reports.report_sending import ReportSending
    from mergestream.serving.service import Service

log = logging.getLogger(__name__)


def deliver_reports(service: "Service", options: "ServeOptions") -> None:
    """Give a service its outbox and its senders, if its options ask for them. Call it after `open_node`."""
    plan = SendingPlan() if options.destinations is None else read_destinations(options.destinations)
    names = [destination.name for destination in plan.destinations]
    for rule in service.node.rules.rules if service.node else ():
        for name in set(rule.send_to or ()) - set(names):
            raise unknown_name("destination for 'send_to' in --destinations", name, names)
    if options.destinations is None and not options.shadow:
        return
    try:
        from mergestream.serving.reports.report_sending import ReportSending
    except ModuleNotFoundError as error:
        raise InputError(f"Sending reports needs {error.name}: pip install 'mergestream[dicom]'.") from error
    service.sending = ReportSending(options.state / "dicom" / "outbox", plan, shadow=options.shadow)
    service.delivery = ReportDelivery(service.sending, service.limits.intake, service.class_concepts)


class ReportDelivery:
    """A `Delivery`: returns when every report and destination is an entry on disk. OutputError: try again later."""

    def __init__(self, sending: "ReportSending", limits: Limits, concepts: Callable[[], Concepts]) -> None:
        self._sending, self._limits, self._concepts = sending, limits, concepts

    def __call__(self, result: UnitResult) -> None:
        images = [made for i in result.images if (made := reported_image(i.picture, i.answer, i.row))]
        if not images:
            log.info("a result has no valid UIDs of an image, so no report refers to it")
            return
        # The same for the same images and kind, whichever pool answered: an object delivered again, after a kill or a
        # change of the pool, gives no second report.
        parts = sorted([i.source.sop_instance_uid, i.picture.frame or 0, i.picture.pixels_sha256] for i in images)
        how = [result.summary.unit, result.summary.how] if result.summary else None

        def make(kind: str, uid: str) -> bytes:
            texts = self._texts(result)
            return KINDS[kind].make(ReportRequest(images, uid, result.summary, texts, self._concepts()))

        every, state = self._sending.plan.destinations, HELD if self._sending.shadow else WAITING
        chosen = [each for each in every if result.send_to is None or each.name in result.send_to]
        for kind in dict.fromkeys(kind for each in chosen for kind in each.objects):
            uid, names = derived_uid("report", kind, parts, how), [d.name for d in chosen if kind in d.objects]
            self._sending.outbox.put(uid, kind, partial(make, kind, uid), names, state)
        if self._sending.shadow:
            accession = self._texts(result)["AccessionNumber"]
            for image in images:
                about = (image.source.sop_instance_uid, image.picture.frame or 0, accession)
                self._sending.outbox.record_answer(*about, image.answer.predictions[0])

    def _texts(self, result: UnitResult) -> Texts:
        try:
            return read_texts(result.images[0].file, self._limits)
        except (OSError, IntakeError) as error:
            raise OutputError("A received object could not be read again for its report.") from error
