"""The listening sockets of the HTTP server and of the DICOM node."""

import socket

from mergestream.runtime.errors import InputError
from mergestream.runtime.files import error_text


def listening_socket(host: str, port: int, *, backlog: int, option: str = "--") -> socket.socket:
    """Open a socket, so that an address in use is an error before anything is loaded. `option`: begins those names."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=host == "::")
    except (OSError, OverflowError) as error:
        message = f"Cannot listen at {host}, port {port}: {error_text(error)}."
        raise InputError(f"{message} Choose another {option}host or {option}port.") from error
