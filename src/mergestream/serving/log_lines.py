"""Log lines of the service on stderr, for people or as JSON."""

import json
import logging
from datetime import UTC, datetime

from mergestream.runtime.messages import PrintableFormatter


class JsonFormatter(logging.Formatter):
    """One JSON object per line, with the fields of a request as keys."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": time, "level": record.levelname.lower(), "logger": record.name}
        fields = record.args if isinstance(record.args, dict) else {}
        if record.exc_info:
            fields = {**fields, "traceback": self.formatException(record.exc_info)}
        return json.dumps({**line, "message": record.getMessage(), **fields}, default=str)


def log_to_stderr(*, as_json: bool) -> None:
    """Log requests and events of the service; of libraries only warnings."""
    handler = logging.StreamHandler()
    plain = PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if as_json else plain)
    level = logging.DEBUG if logging.getLogger().level == logging.DEBUG else logging.INFO
    # Not even with --debug more: detailed messages of libraries may quote a file's header.
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("mergestream.serving").setLevel(level)
    logging.getLogger("pynetdicom").setLevel(logging.CRITICAL)  # a destination that is away is logged once, by us
