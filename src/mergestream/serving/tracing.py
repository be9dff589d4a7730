"""OpenTelemetry traces, off by default: spans of requests, decoding, steps and audit lines, nothing about patients.

A step is a trace of its own, since it may answer several requests; its audit line is inside it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mergestream.pool.expert_card import library_versions
from mergestream.runtime.errors import InputError
from mergestream.runtime.option_checks import is_http_url

_tracers: list[Any] = []  # at most one; a service in a process


def start_tracing(url: str) -> Callable[[], None]:
    """Send spans to a collector by OTLP over HTTP. The returned function sends the rest and stops."""
    if not is_http_url(url, with_user=True):
        raise InputError("--otlp is the URL of a collector, as in http://collector:4318/v1/traces.")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ModuleNotFoundError as error:
        raise InputError(f"Traces need {error.name}: pip install 'mergestream[tracing]'.") from error
    return trace_with(OTLPSpanExporter(endpoint=url))


def trace_with(exporter: Any) -> Callable[[], None]:
    """Give spans to an exporter of OpenTelemetry, in batches from a thread of its own."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    about = Resource({"service.name": "mergestream", "service.version": library_versions()["mergestream"]})
    provider = TracerProvider(resource=about, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracers[:] = [provider.get_tracer("mergestream")]

    def stop() -> None:
        _tracers.clear()
        provider.shutdown()

    return stop


@contextmanager
def span(name: str, **attributes: Any) -> Iterator[dict[str, Any]]:
    """Trace the block. Attributes may be added until it ends; of an error only its type is recorded, never its text."""
    if not _tracers:
        yield attributes
        return
    options = {"record_exception": False, "set_status_on_exception": False}
    with _tracers[0].start_as_current_span(name, **options) as current:
        try:
            yield attributes
        except BaseException as error:
            attributes["error.type"] = type(error).__name__
            raise
        finally:
            current.set_attributes({key: value for key, value in attributes.items() if value is not None})
