"""Messages for a terminal or a log: what comes from a log, a card or a file name can show nothing but itself."""

import logging
import unicodedata
from functools import cache


def printable(text: str) -> str:
    """Show control characters, marks that change the direction of text and lone surrogates as \\x1b, \\u202e, …"""
    return text if text.isprintable() else "".join(map(_visible, text))


def _visible(character: str) -> str:
    if character.isprintable() or unicodedata.category(character) == "Zs":
        return character
    if character < " ":
        return f"\\x{ord(character):02x}"
    units = character.encode("utf-16-be", "surrogatepass").hex(" ", 2).split()  # as JSON writes them, too
    return "".join(f"\\u{unit}" for unit in units)


class PrintableFormatter(logging.Formatter):
    """Log lines without control characters. Further lines are indented: none can pass for a message of its own."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n    ".join(map(printable, super().format(record).split("\n")))


@cache
def log_once(log: logging.Logger, level: int, message: str) -> None:
    """Log a message that is worth one line per process, not one per step."""
    log.log(level, message)
