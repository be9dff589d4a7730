"""Log messages that are worth one line per process, not one per step."""

import logging
from functools import cache


@cache
def log_once(log: logging.Logger, level: int, message: str) -> None:
    """Log a message, unless this process has logged it before."""
    log.log(level, message)
