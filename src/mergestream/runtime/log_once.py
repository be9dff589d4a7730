"""Log messages that are worth one line per process, not one per step."""

import logging

_logged: set[str] = set()


def log_once(log: logging.Logger, level: int, message: str) -> None:
    """Log a message, unless this process has logged it before."""
    if message not in _logged:
        _logged.add(message)
        log.log(level, message)
