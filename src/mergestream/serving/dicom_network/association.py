"""One association: its requests are read from a socket, and objects go straight to the inbox on disk.

Nothing is decoded here but the messages' own heads and the few elements that routing needs. pynetdicom's own acceptor
is not used: it polls every millisecond in two threads per association, reads as many bytes as a peer announces, and
collects objects in memory.
"""

import logging
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mergestream.data.intake.limits import MEBIBYTE, IntakeError
from mergestream.runtime.errors import OutputError
from mergestream.serving.dicom_network import dimse, negotiation
from mergestream.serving.dicom_network.dimse import Command, ProtocolError, Status
from mergestream.serving.dicom_network.inbox import IncomingFile
from mergestream.serving.dicom_network.rules import NodeLimits

if TYPE_CHECKING:
    from mergestream.serving.dicom_network.reception import Reception

ASSOCIATE, ACCEPT, REJECT, DATA, RELEASE, RELEASED, ABORT = range(1, 8)
HEAD = struct.Struct(">BxI")
FRAGMENT = struct.Struct(">IBB")
REQUEST_SECONDS = 10.0  # for the association request, and for TLS
MOST_REQUEST_BYTES = 1 << 17
MOST_COMMAND_BYTES = 1 << 14
MOST_DISCARDED_BYTES = 4 << 30  # of an object that is refused before it is complete
READ_BYTES = 1 << 16  # at a time
MOST_UNFLUSHED, UNFLUSHED_SECONDS = 1024, 1.0  # objects, and how long they wait, if they are flushed by association
COMMAND, LAST = 1, 2  # bits of a fragment's head
# dcmtk's sender waits for acknowledgements (Nagle), which Linux otherwise delays by 40 ms.
QUICK_ACK: int | None = getattr(socket, "TCP_QUICKACK", None)
ABORTED = struct.pack(">BxIxxBB", ABORT, 4, 2, 0)
log = logging.getLogger(__name__)


@dataclass
class _Message:
    """A request that arrives in fragments."""

    context: int
    head: bytearray
    command: Command | None = None
    file: IncomingFile | None = None
    refusal: Status | None = None
    data_bytes: int = 0


class Association:
    """For one thread. `idle_since`: when the last message was answered; None while one arrives."""

    def __init__(
        self, sock: socket.socket, reception: "Reception", limits: NodeLimits, admit: Callable[["Association"], bool]
    ) -> None:
        """`admit`: whether there is room for one more association."""
        self._socket, self._reception, self._limits, self._admit = sock, reception, limits, admit
        self.idle_since: float | None = None
        self.calling = ""
        self._contexts: dict[int, tuple[str, str]] = {}
        self._most_sent, self._unflushed, self._flush_at = 0, 0, 0.0
        self._flushes_each = reception.flushes_each
        self._message: _Message | None = None
        self._unread = memoryview(b"")  # bytes that came with the last PDU

    def run(self) -> None:
        """Until the peer releases the association, or an error ends it."""
        try:
            if self._open():
                self.idle_since = time.monotonic()
                while self._answer_next():
                    pass
        except ProtocolError as error:
            log.warning("an association was aborted: %s", error)
            self._reception.count("association", "aborted")
            with suppress(OSError):
                self._socket.sendall(ABORTED)
        except (OSError, EOFError):  # the peer is gone or silent
            self._reception.count("association", "lost")
        finally:
            if self._message is not None and self._message.file is not None:
                self._message.file.discard()
            with suppress(OSError):
                self._flush()

    def close(self) -> None:
        """End the association from another thread."""
        with suppress(OSError):
            self._socket.sendall(ABORTED)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _open(self) -> bool:
        kind, body = self._read_pdu(MOST_REQUEST_BYTES, REQUEST_SECONDS)
        if kind != ASSOCIATE:
            raise ProtocolError("The first message is not an association request.")
        proposal = negotiation.read_proposal(HEAD.pack(kind, len(body)) + body)
        rejection = self._reception.rejection_of(proposal.calling, proposal.called)
        if rejection is None and not self._admit(self):
            rejection = negotiation.LIMIT_REACHED
        if rejection is not None:
            self._reception.count("association", "rejected")
            self._socket.sendall(HEAD.pack(REJECT, 4) + bytes((0, *rejection)))
            return False
        self.calling = proposal.calling
        response, self._contexts = negotiation.accept(proposal, self._limits.pdu_kib << 10)
        self._most_sent = proposal.most_bytes or 1 << 14
        self._reception.count("association", "accepted")
        self._socket.sendall(response)
        return True

    def _flush(self) -> None:
        if self._unflushed:
            self._reception.inbox.flush()
            self._unflushed = 0

    def _note_unflushed(self) -> None:
        self._flush_at = self._flush_at if self._unflushed else time.monotonic() + UNFLUSHED_SECONDS
        self._unflushed += 1
        if self._unflushed >= MOST_UNFLUSHED or time.monotonic() >= self._flush_at:
            self._flush()

    def _flush_if_silent(self) -> None:
        """Flush the last objects of an association that stays open."""
        if self._unflushed and not self._unread:
            poll, left = select.poll(), max(0.0, self._flush_at - time.monotonic())
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(1000 * left):
                self._flush()

    def _answer_next(self) -> bool:
        """Read one PDU; False if the association ends."""
        self._flush_if_silent()
        kind, body = self._read_pdu(self._limits.pdu_kib << 10, self._limits.idle_seconds)
        if kind == RELEASE:
            self._flush()
            self._socket.sendall(HEAD.pack(RELEASED, 4) + bytes(4))
            return False
        if kind == ABORT:
            return False
        if kind != DATA:
            raise ProtocolError("An unexpected PDU arrived.")
        self.idle_since = None
        view, position = body, 0
        while position < len(view):
            if len(view) - position < FRAGMENT.size:
                raise ProtocolError("A fragment is damaged.")
            length, context, bits = FRAGMENT.unpack_from(view, position)
            end = position + 4 + length
            if length < 2 or end > len(view):
                raise ProtocolError("A fragment is damaged.")
            self._take(context, bits, view[position + FRAGMENT.size : end])
            position = end
        return True

    def _take(self, context: int, bits: int, data: memoryview) -> None:
        """Take one fragment, and answer the message if it is complete."""
        message = self._message
        if message is None:
            if context not in self._contexts:
                raise ProtocolError("A message names a presentation context that was not accepted.")
            message = self._message = _Message(context, bytearray())
        if context != message.context or bool(bits & COMMAND) != (message.command is None):
            raise ProtocolError("The fragments of two messages are mixed.")
        if message.command is None:
            self._take_command(message, bits, data)
        else:
            self._take_data(message, message.command, bits, data)

    def _take_command(self, message: _Message, bits: int, data: memoryview) -> None:
        message.head += data
        if len(message.head) > MOST_COMMAND_BYTES:
            raise ProtocolError("A command set is too long.")
        if not bits & LAST:
            return
        command = message.command = dimse.read_command(message.head)
        if command.field == dimse.C_ECHO and not command.has_data_set:
            self._respond(message, command, Status(dimse.SUCCESS))
        elif command.field == dimse.C_STORE and command.has_data_set:
            class_uid, syntax = self._contexts[message.context]
            if command.sop_class != class_uid or not command.sop_instance:
                message.refusal = Status(
                    dimse.CANNOT_UNDERSTAND, "The SOP class is not that of the presentation context"
                )
                return
            try:
                names = (syntax, command.sop_class, command.sop_instance, self.calling)
                message.file = self._reception.inbox.new_file(*names)
            except OutputError as error:
                message.refusal = self._reception.refusal_of(error)
        else:
            raise ProtocolError("Only C-ECHO and C-STORE are supported.")

    def _take_data(self, message: _Message, command: Command, bits: int, data: memoryview) -> None:
        message.data_bytes += len(data)
        if message.file is not None:
            try:
                if message.data_bytes > self._limits.object_mib * MEBIBYTE:
                    raise IntakeError("too_large", f"An object may have {self._limits.object_mib} MiB.")
                message.file.write(data)
            except (OSError, IntakeError) as error:
                message.file.discard()
                message.file, message.refusal = None, self._reception.refusal_of(error)
        elif message.data_bytes > MOST_DISCARDED_BYTES:
            raise ProtocolError("A refused object exceeds the discard limit.")
        if bits & LAST:
            status = message.refusal or self._reception.store(message.file, flushed=self._flushes_each)
            message.file = None
            if not self._flushes_each:
                self._note_unflushed()
            self._respond(message, command, status)

    def _respond(self, message: _Message, command: Command, status: Status) -> None:
        if command.field == dimse.C_STORE:
            self._reception.count("object", "received" if status.code == dimse.SUCCESS else "refused")
        data = dimse.response_to(command, status)
        room = max(64, self._most_sent - FRAGMENT.size)
        sent = bytearray()
        for start in range(0, len(data), room):
            part = data[start : start + room]
            last = LAST if start + room >= len(data) else 0
            sent += (
                HEAD.pack(DATA, len(part) + 6) + FRAGMENT.pack(len(part) + 2, message.context, COMMAND | last) + part
            )
        self._socket.sendall(sent)
        self._message, self.idle_since = None, time.monotonic()

    def _read_pdu(self, most: int, seconds: float) -> tuple[int, memoryview]:
        """Type and body of the next PDU, which must be complete in time."""
        deadline = time.monotonic() + seconds
        if QUICK_ACK is not None:  # it lasts for a few packets only
            self._socket.setsockopt(socket.IPPROTO_TCP, QUICK_ACK, 1)
        kind, length = HEAD.unpack(self._read(HEAD.size, deadline))
        if not ASSOCIATE <= kind <= ABORT:
            raise ProtocolError("An unknown kind of PDU arrived.")
        if length > most:
            raise ProtocolError("A PDU is longer than was agreed.")
        return kind, self._read(length, deadline)

    def _read(self, length: int, deadline: float) -> memoryview:
        """The next bytes. More may be read from the socket, and wait for the next call."""
        data, place = self._unread, len(self._unread)
        if place < length:
            buffer = bytearray(max(length, READ_BYTES))
            buffer[:place] = data
            data = memoryview(buffer)
            while place < length:
                place += self._receive(data[place:], deadline)
        self._unread = data[length:place]
        return data[:length]

    def _receive(self, room: memoryview, deadline: float) -> int:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)
        count = self._socket.recv_into(room)
        if not count:
            raise EOFError
        return count
