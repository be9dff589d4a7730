"""The DICOM node of a service: listening, receiving, answering; start, shutdown and status."""

import logging
import math
import socket
import ssl
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mergestream.data.intake.limits import MEBIBYTE, Limits
from mergestream.runtime.errors import InputError, UnknownNameError, unknown_name
from mergestream.serving.dicom_network.acceptor import Acceptor, tls_context
from mergestream.serving.dicom_network.inbox import Inbox
from mergestream.serving.dicom_network.inbox_worker import AnswerBatch, InboxWorker
from mergestream.serving.dicom_network.negotiation import require_pynetdicom
from mergestream.serving.dicom_network.reception import Reception
from mergestream.serving.dicom_network.results import Delivery
from mergestream.serving.dicom_network.rules import Rules, ae_title, read_rules
from mergestream.serving.http.gate import is_loopback
from mergestream.serving.http.schemas import NodeStatus
from mergestream.serving.http.tokens import require_private
from mergestream.serving.listening_socket import listening_socket
from mergestream.serving.monitoring import Metrics
from mergestream.serving.options import ServeOptions

log = logging.getLogger(__name__)


class DicomNode:
    """Receives from the moment it is started; objects are answered by `answer`."""

    def __init__(
        self,
        title: str,
        folder: Path,
        rules: Rules,
        sock: socket.socket | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`sock`: the listening socket; None: objects come by DICOMweb only."""
        self.rules, self._socket, self._tls = rules, sock, tls
        limits = rules.limits
        self._inbox = Inbox(folder, limits.inbox_mib * MEBIBYTE, limits.inbox_objects)
        self.reception = Reception(self._inbox, rules, title)
        self._acceptor: Acceptor | None = None
        self._worker: InboxWorker | None = None
        self._title = title
        self._closed = False

    @property
    def port(self) -> int | None:
        return None if self._socket is None else self._socket.getsockname()[1]

    @property
    def streams(self) -> list[str]:
        return sorted({rule.stream for rule in self.rules.rules})

    @property
    def failed(self) -> bool:
        parts = (self._acceptor, self._worker)
        return any(part is not None and (part.failed or not (part.is_alive() or self._closed)) for part in parts)

    def start(self, answer: AnswerBatch, delivery: Delivery | None, intake: Limits, classes: Sequence[str]) -> None:
        """Answer what an earlier process left, and begin to receive. InputError: a rule names an unknown class."""
        require_classes(self.rules, classes)
        waiting, _, _ = self._inbox.numbers()
        if waiting or self._inbox.dropped_at_start:
            log.info("%d received objects are left from before; %d incomplete files were dropped",
                     waiting, self._inbox.dropped_at_start)  # fmt: skip
        self._worker = InboxWorker(self.reception, self.rules, answer, delivery, intake)
        self._worker.start()
        if self._socket is not None:
            self._acceptor = Acceptor(self._socket, self.reception, self.rules.limits, self._tls)
            self._acceptor.start()

    def end(self, seconds: float = math.inf) -> None:
        """Stop receiving, and answer what is complete within the time; the rest waits for the next start."""
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + seconds
        if self._acceptor is not None:
            self._acceptor.end(min(seconds, 5.0))
        elif self._socket is not None:
            self._socket.close()
        if self._worker is not None:
            self._worker.end(max(0.0, deadline - time.monotonic()))
        self._inbox.close()

    def status(self) -> NodeStatus:
        """Numbers for the dashboard. They say nothing about patients or senders."""
        waiting, size, oldest = self._inbox.numbers()
        count = self.reception.counted
        return NodeStatus(
            ae_title=self._title,
            port=None if self._closed else self.port,
            failed=self.failed,
            associations=0 if self._acceptor is None else self._acceptor.associations,
            associations_accepted=count("association", "accepted"),
            associations_rejected=count("association", "rejected"),
            associations_aborted=count("association", "aborted") + count("association", "lost"),
            objects_received=count("object", "received"),
            objects_refused=count("object", "refused"),
            objects_answered=count("object", "answered"),
            objects_unanswerable=count("object", "unanswerable"),
            objects_waiting=waiting,
            bytes_waiting=size,
            oldest_waiting_seconds=round(oldest, 1),
            streams=self.streams,
            sources=sorted(self.rules.sources),
        )

    def add_metrics(self, metrics: Metrics) -> None:
        for name, field in NodeStatus.model_fields.items():
            if field.description is not None:
                metrics.add_gauge(f"dicom_{name}", field.description, partial(self._number, name))

    def _number(self, name: str) -> float:
        return float(getattr(self.status(), name))


def open_node(options: ServeOptions) -> DicomNode | None:
    """The node that the options ask for, listening but not yet receiving; None if they ask for none."""
    if options.dicom_port is None and options.dicom_rules is None:
        return None
    require_pynetdicom()
    rules = Rules() if options.dicom_rules is None else read_rules(options.dicom_rules)
    title, host = ae_title(options.ae_title), options.dicom_host
    if options.dicom_port is not None and not is_loopback(host) and not rules.callers:
        raise InputError(
            f"Everyone who can reach {host} could send objects. List the AE titles that may, as 'callers' in the "
            "--dicom-rules file, or listen at 127.0.0.1."
        )
    tls = None
    if options.dicom_tls_cert is not None and options.dicom_tls_key is not None:
        require_private(options.dicom_tls_key, 0o027, "Others on this machine may read or change the DICOM TLS key.")
        tls = tls_context(options.dicom_tls_cert, options.dicom_tls_key, options.dicom_tls_ca)
    sock = None
    if options.dicom_port is not None:
        sock = listening_socket(host, options.dicom_port, backlog=128, option="--dicom-")
    try:
        return DicomNode(title, options.state / "dicom", rules, sock, tls)
    except BaseException:
        if sock is not None:
            sock.close()
        raise


def require_classes(rules: Rules, classes: Sequence[str]) -> None:
    """Refuse a rule whose worst class the pool does not have."""
    for rule in rules.rules:
        if rule.worst_class is not None and rule.worst_class not in classes:
            error: UnknownNameError = unknown_name("class", rule.worst_class, classes)
            raise InputError(f"In the rule for the stream '{rule.stream}': {error}")
