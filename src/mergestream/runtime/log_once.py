"""What is worth a line in the log, but not a line a step."""

import logging

_told: set[str] = set()


def tell_once(log: logging.Logger, level: int, sentence: str) -> None:
    """Log a sentence, unless this process has logged it before."""
    if sentence not in _told:
        _told.add(sentence)
        log.log(level, sentence)
