"""The service's own log on stderr: lines for people, or JSON for a log collector."""

import json
import logging
from datetime import UTC, datetime


class JsonFormatter(logging.Formatter):
    """One JSON object per line, with the fields of a request as keys."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": timestamp(record.created), "level": record.levelname.lower(), "logger": record.name}
        fields = record.args if isinstance(record.args, dict) else {}
        if record.exc_info:
            fields = {**fields, "traceback": self.formatException(record.exc_info)}
        return json.dumps({**line, "message": record.getMessage(), **fields}, default=str)


def log_to_stderr(*, as_json: bool) -> None:
    """Log requests and events of the service; of libraries only warnings."""
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if as_json else plain)
    level = logging.DEBUG if logging.getLogger().level == logging.DEBUG else logging.INFO
    # Not even with --debug more: detailed messages of libraries may quote a file's header.
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("mergestream.serving").setLevel(level)


def timestamp(seconds: float | None = None) -> str:
    """UTC as ISO 8601 with milliseconds; by default now."""
    when = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")
