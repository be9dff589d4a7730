"""The service's own log: lines for people, or JSON for what collects them."""

import json
import logging

from mergestream.serving.recent import timestamp


class JsonLines(logging.Formatter):
    """One JSON object a line; the fields of a request stand apart."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": timestamp(record.created), "level": record.levelname.lower(), "logger": record.name}
        fields = record.args if isinstance(record.args, dict) else {}
        if record.exc_info:
            fields = {**fields, "traceback": self.formatException(record.exc_info)}
        return json.dumps({**line, "message": record.getMessage(), **fields}, default=str)


def log_to_stderr(*, as_json: bool) -> None:
    """Requests and events of the service, and of libraries only what they warn of."""
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if as_json else plain)
    level = logging.DEBUG if logging.getLogger().level == logging.DEBUG else logging.INFO
    # Also with --debug: what libraries say in detail may quote a file's header.
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("mergestream.serving").setLevel(level)
