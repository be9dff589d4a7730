"""Association requests, answered with pynetdicom's protocol data units (PS3.8 9.3)."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from mergestream.runtime.errors import InputError
from mergestream.serving.dicom_network.dimse import ProtocolError
from mergestream.serving.dicom_network.inbox import IMPLEMENTATION_NAME, IMPLEMENTATION_UID

VERIFICATION = "1.2.840.10008.1.1"
# Implicit, explicit, big endian, deflated, RLE; JPEG; JPEG-LS; JPEG 2000; High-Throughput JPEG 2000.
SYNTAXES = frozenset(
    f"1.2.840.10008.1.2{ending}"
    for ending in (
        "", ".1", ".2", ".1.99", ".5", ".4.50", ".4.51", ".4.57", ".4.70", ".4.80", ".4.81", ".4.90", ".4.91",
        ".4.201", ".4.202", ".4.203",
    )
)  # fmt: skip
PERMANENT, TRANSIENT = 1, 2
ACCEPTED = 0  # the result of a presentation context
# Result, source and reason of a rejection (PS3.8 9.3.4).
CALLING_UNKNOWN, CALLED_UNKNOWN = (PERMANENT, 1, 3), (PERMANENT, 1, 7)
LIMIT_REACHED = (TRANSIENT, 3, 2)


@dataclass(frozen=True)
class Proposal:
    """A request to open an association."""

    calling: str
    called: str
    request: Any = field(repr=False)  # pynetdicom's primitive
    most_bytes: int  # of a PDU that the peer takes; 0: any


@cache
def image_classes() -> frozenset[str]:
    """UIDs of the storage classes of images."""
    from pynetdicom import sop_class

    return frozenset(uid for name, uid in sop_class._STORAGE_CLASSES.items() if "ImageStorage" in name)


def require_pynetdicom() -> None:
    try:
        import pynetdicom.pdu_primitives  # noqa: F401
    except ModuleNotFoundError as error:
        raise InputError(f"The DICOM node needs {error.name}: pip install 'mergestream[dicom]'.") from error


def read_proposal(pdu: bytes) -> Proposal:
    from pynetdicom.pdu import A_ASSOCIATE_RQ

    try:
        decoded = A_ASSOCIATE_RQ()
        decoded.decode(pdu)
        request = decoded.to_primitive()
        calling, called = request.calling_ae_title.strip(), request.called_ae_title.strip()
        return Proposal(calling, called, request, int(request.maximum_length_received or 0))
    except Exception:  # pynetdicom may raise anything on a damaged one, and quote it
        raise ProtocolError("The association request is damaged.") from None


def accept(proposal: Proposal, most_bytes: int) -> tuple[bytes, dict[int, tuple[str, str]]]:
    """The response that accepts what this node takes, and class and transfer syntax by presentation context."""
    from pynetdicom.pdu import A_ASSOCIATE_AC
    from pynetdicom.pdu_primitives import (
        A_ASSOCIATE,
        ImplementationClassUIDNotification,
        ImplementationVersionNameNotification,
        MaximumLengthNotification,
    )

    length, class_uid = MaximumLengthNotification(), ImplementationClassUIDNotification()
    version = ImplementationVersionNameNotification()
    length.maximum_length_received = most_bytes
    class_uid.implementation_class_uid = IMPLEMENTATION_UID
    version.implementation_version_name = IMPLEMENTATION_NAME
    response, results = A_ASSOCIATE(), list(map(_result, proposal.request.presentation_context_definition_list))
    contexts = {
        each.context_id: (str(each.abstract_syntax), str(each.transfer_syntax[0]))
        for each in results
        if each.result == ACCEPTED
    }
    response.application_context_name = proposal.request.application_context_name
    response.calling_ae_title, response.called_ae_title = proposal.calling, proposal.called
    response.result, response.result_source = 0, 1
    response.presentation_context_definition_results_list = results
    response.user_information = [length, class_uid, version]
    encoded = A_ASSOCIATE_AC()
    encoded.from_primitive(response)
    return encoded.encode(), contexts


def _result(context: Any) -> Any:
    """What is answered to a proposed context, with the first transfer syntax that the node takes."""
    from pynetdicom.presentation import PresentationContext

    result, abstract = PresentationContext(), str(context.abstract_syntax)
    result.context_id, result.abstract_syntax = context.context_id, context.abstract_syntax
    supported = abstract == VERIFICATION or abstract in image_classes()
    # An object is stored as its sender has it.
    chosen = next((each for each in context.transfer_syntax if supported and str(each) in SYNTAXES), None)
    result.transfer_syntax = [chosen or context.transfer_syntax[0]]
    result.result = ACCEPTED if chosen is not None else 4 if supported else 3
    return result
