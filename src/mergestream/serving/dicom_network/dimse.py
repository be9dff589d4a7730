"""DIMSE command sets (PS3.7 6.3, implicit little endian): the requests of C-ECHO and C-STORE, and their responses."""

import struct
from dataclasses import dataclass

from mergestream.runtime.errors import MergestreamError

C_STORE, C_ECHO, RESPONSE = 0x0001, 0x0030, 0x8000
NO_DATA_SET = 0x0101
CLASS, FIELD, MESSAGE_ID, RESPONDED_TO, DATA_SET_TYPE, STATUS, COMMENT, INSTANCE = (
    0x0002, 0x0100, 0x0110, 0x0120, 0x0800, 0x0900, 0x0902, 0x1000,
)  # fmt: skip
SUCCESS, OUT_OF_RESOURCES, MISMATCH, CANNOT_UNDERSTAND, NO_RULE, NOT_SUPPORTED = (
    0x0000, 0xA700, 0xA900, 0xC000, 0xC001, 0x0122,
)  # fmt: skip
MOST_COMMENT = 64


class ProtocolError(MergestreamError):
    """The peer sent something that ends the association."""


@dataclass(frozen=True, repr=False)
class Command:
    """A request."""

    field: int
    message_id: int
    sop_class: str
    sop_instance: str
    has_data_set: bool


@dataclass(frozen=True)
class Status:
    """The status of a response, with a sentence for the sender's log if it is not success."""

    code: int
    comment: str = ""


def read_command(data: bytes | bytearray) -> Command:
    """Read a command set."""
    values, position = dict[int, bytes](), 0
    try:
        while position < len(data):
            group, element, length = struct.unpack_from("<HHI", data, position)
            position += 8
            if group != 0 or position + length > len(data):
                raise ProtocolError("The command set is damaged.")
            values[element] = bytes(data[position : position + length])
            position += length
        numbers = {name: struct.unpack("<H", values[name])[0] for name in (FIELD, MESSAGE_ID, DATA_SET_TYPE)}
        sop_class, instance = (values.get(name, b"").decode("ascii").strip(" \0") for name in (CLASS, INSTANCE))
    except (struct.error, KeyError, UnicodeDecodeError):
        raise ProtocolError("The command set is damaged.") from None
    return Command(numbers[FIELD], numbers[MESSAGE_ID], sop_class, instance, numbers[DATA_SET_TYPE] != NO_DATA_SET)


def response_to(command: Command, status: Status) -> bytes:
    """The command set that answers a request."""
    body = _element(CLASS, _uid(command.sop_class)) if command.sop_class else b""
    body += _number(FIELD, command.field | RESPONSE) + _number(RESPONDED_TO, command.message_id)
    body += _number(DATA_SET_TYPE, NO_DATA_SET) + _number(STATUS, status.code)
    if status.comment:
        text = status.comment.encode("ascii", "replace")[:MOST_COMMENT]
        body += _element(COMMENT, text + b" " * (len(text) % 2))
    if command.sop_instance:
        body += _element(INSTANCE, _uid(command.sop_instance))
    return struct.pack("<HHII", 0, 0, 4, len(body)) + body


def _uid(text: str) -> bytes:
    value = text.encode("ascii")
    return value + b"\0" * (len(value) % 2)


def _number(element: int, value: int) -> bytes:
    return struct.pack("<HHIH", 0, element, 2, value)


def _element(element: int, value: bytes) -> bytes:
    return struct.pack("<HHI", 0, element, len(value)) + value
