"""One report to one destination: C-STORE by pynetdicom, STOW-RS by dicomweb-client. Reasons never quote a report."""

import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pydicom
import requests
from pynetdicom import AE

from mergestream.serving.dicom_network.web_session import new_client
from mergestream.serving.reports.destinations import C_STORE, Destination
from mergestream.serving.reports.report_pages import KINDS

TIMEOUT = 30.0
SYNTAXES = ["1.2.840.10008.1.2.1", "1.2.840.10008.1.2"]  # explicit, implicit
DUPLICATE = 0x0111  # it has this very object: a report whose confirmation was lost was sent again
STORED = (0x0000, 0xB000, 0xB006, 0xB007, DUPLICATE)  # also with a remark (PS3.4 B.2.3)
REFUSED = (400, 409, 413, 415, 422)  # HTTP statuses that another try will not change


class UnreachableError(Exception):
    """The destination cannot be reached now, or refuses the connection. Its message may be shown."""


class SendOutcome(NamedTuple):
    """What a destination answered: `reason` is empty if it has the report; `final`: another try is of no use."""

    reason: str = ""
    final: bool = False


Send = Callable[[str, Path], SendOutcome]  # a report of this kind in this file


@contextmanager
def connected(destination: Destination, kinds: Sequence[str]) -> Iterator[Send]:
    """Open a connection for reports of some kinds. UnreachableError: try again later."""
    if destination.kind != C_STORE:
        yield _web_sender(destination)
        return
    entity = AE(ae_title=destination.calling_ae_title)
    entity.acse_timeout = entity.dimse_timeout = entity.network_timeout = entity.connection_timeout = TIMEOUT
    for kind in dict.fromkeys(kinds):
        entity.add_requested_context(KINDS[kind].sop_class, SYNTAXES)
    tls = (_tls_context(destination), destination.host) if destination.tls else None
    association = entity.associate(destination.host, destination.port, ae_title=destination.ae_title, tls_args=tls)
    if not association.is_established:
        raise UnreachableError("It cannot be reached, or refuses the association.")
    try:
        yield lambda kind, file: _store(association, kind, file)
    finally:
        association.release()


def _tls_context(destination: Destination) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=destination.ca_file)
    if destination.cert_file is not None:
        context.load_cert_chain(destination.cert_file, destination.key_file)
    return context


def _store(association: Any, kind: str, file: Path) -> SendOutcome:
    if KINDS[kind].sop_class not in {context.abstract_syntax for context in association.accepted_contexts}:
        return SendOutcome(f"The destination does not accept objects of this kind ({kind}).", final=True)
    try:
        return _outcome(association.send_c_store(file).Status)
    except (ValueError, RuntimeError, AttributeError) as error:  # there is no status without an answer
        raise UnreachableError("It did not answer, or ended the association.") from error


def _outcome(status: int) -> SendOutcome:
    """By the status of a C-STORE, or the reason of a STOW-RS failure."""
    if status in STORED:
        return SendOutcome()
    later = status == 0x0110 or 0xA700 <= status <= 0xA7FF  # it failed on its own side, or has no room
    return SendOutcome(f"The destination answered with status 0x{status:04X}.", final=not later)


def _web_sender(destination: Destination) -> Send:
    cert, key = destination.cert_file, destination.key_file
    own_cert = (cert, key) if cert and key else None
    client = new_client(str(destination.url), destination.token_file, ca_file=destination.ca_file, own_cert=own_cert)

    def send(_: str, file: Path) -> SendOutcome:
        try:
            failures = client.store_instances([pydicom.dcmread(file)]).get("FailedSOPSequence") or []
        except (requests.RequestException, OSError, ValueError) as error:
            status = getattr(getattr(error, "response", None), "status_code", None)
            if status in REFUSED:
                return SendOutcome(f"The destination answered with HTTP status {status}.", final=True)
            raise UnreachableError(f"It cannot be reached: {status or type(error).__name__}.") from error
        return _outcome(int(failures[0].get("FailureReason", 0x0110))) if failures else SendOutcome()

    return send
