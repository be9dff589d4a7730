"""The listening socket of the node: one thread per connection, and limits on how many there are."""

import logging
import socket
import ssl
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from mergestream.runtime.errors import InputError
from mergestream.runtime.files import error_text
from mergestream.serving.dicom_network.association import REQUEST_SECONDS, Association
from mergestream.serving.dicom_network.reception import Reception
from mergestream.serving.dicom_network.rules import NodeLimits

SPARE_CONNECTIONS = 32  # beyond the associations: those that are rejected, and those that have not asked yet
GIVES_WAY_SECONDS = 1.0  # an association that has been idle for so long gives way to a new one
log = logging.getLogger(__name__)


def tls_context(cert: Path, key: Path, authority: Path | None) -> ssl.SSLContext:
    """TLS of the node; with an authority, senders need a certificate that it has signed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
        if authority is not None:
            context.load_verify_locations(authority)
            context.verify_mode = ssl.CERT_REQUIRED
    except OSError as error:
        raise InputError(f"The DICOM node's TLS files cannot be used: {error_text(error) or error}.") from error
    return context


class Acceptor(threading.Thread):
    """Accepts connections until `end` is called. `failed`: an error has ended it."""

    failed = False

    def __init__(
        self, sock: socket.socket, reception: Reception, limits: NodeLimits, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(name="DICOM node", daemon=True)
        self._socket, self._reception, self._limits, self._tls = sock, reception, limits, tls
        self._ending = False
        self._lock = threading.Lock()
        self._associations: set[Association] = set()
        self._connections = 0
        self._silent: dict[object, socket.socket] = {}  # connections without an association yet, the oldest first

    @property
    def associations(self) -> int:
        return len(self._associations)

    def run(self) -> None:
        try:
            while not self._ending:
                self._accept_one()
        except Exception as error:
            log.error("the DICOM node no longer accepts connections: %s", type(error).__name__)
            self.failed = True

    def _accept_one(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError as error:
            if not self._ending:
                log.warning("a DICOM connection could not be accepted: %s", error_text(error))
                time.sleep(0.5)  # for example too many open files
            return
        if self._ending or not self._make_room():
            self._reception.count("association", "rejected")
            connection.close()
            return
        try:
            threading.Thread(target=self._serve, args=(connection,), name="DICOM association", daemon=True).start()
        except RuntimeError:  # no more threads
            connection.close()
            with self._lock:
                self._connections -= 1

    def _make_room(self) -> bool:
        """Count one more connection. If there are too many, the one that has been silent longest is closed."""
        with self._lock:
            if self._connections >= self._limits.associations + SPARE_CONNECTIONS:
                token = next(iter(self._silent), None)
                if token is None:
                    return False
                with suppress(OSError):
                    self._silent.pop(token).shutdown(socket.SHUT_RDWR)
            self._connections += 1
            return True

    def _serve(self, connection: socket.socket) -> None:
        association, token = None, object()
        try:
            with self._lock:
                self._silent[token] = connection
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(REQUEST_SECONDS)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                with self._lock:
                    self._silent[token] = connection
                connection.do_handshake()
            association = Association(connection, self._reception, self._limits, partial(self._admit, token))
            association.run()
        except OSError:  # ssl.SSLError too
            self._reception.count("association", "lost")
        except Exception as error:
            log.error("an association failed: %s", type(error).__name__, exc_info=log.isEnabledFor(logging.DEBUG))
            self._reception.count("association", "aborted")
        finally:
            with suppress(OSError):
                connection.close()
            with self._lock:
                self._connections -= 1
                self._silent.pop(token, None)
                if association is not None:
                    self._associations.discard(association)

    def _admit(self, token: object, association: Association) -> bool:
        """Whether there is room for one more. The association that is idle longest gives way."""
        with self._lock:
            self._silent.pop(token, None)
            if len(self._associations) >= self._limits.associations:
                now = time.monotonic()
                idle = [(now - each.idle_since, each) for each in self._associations if each.idle_since is not None]
                longest, oldest = max(idle, key=lambda pair: pair[0], default=(0.0, None))
                if oldest is None or longest < GIVES_WAY_SECONDS:
                    return False
                self._associations.discard(oldest)
                oldest.close()
            if self._ending:
                return False
            self._associations.add(association)
            return True

    def end(self, seconds: float) -> None:
        """Accept nothing more; let messages that are arriving finish, then end the associations."""
        self._ending = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(each.idle_since is None for each in list(self._associations)):
            time.sleep(0.02)
        for each in list(self._associations):
            each.close()
        if self.ident is not None:
            self.join(5)
