"""Traces: spans of requests, decoding, steps and audit lines reach an exporter, and hold nothing about patients."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from benching import write_pool
from dicoms import SECRET
from mergestream.runtime.errors import InputError
from mergestream.serving import startup
from mergestream.serving.options import ServeOptions
from mergestream.serving.tracing import span, start_tracing, trace_with
from services import LocalService, colour_dicom, form


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Gets what `--otlp` sends."""
    memory = InMemorySpanExporter()
    monkeypatch.setattr(startup, "start_tracing", lambda url: trace_with(memory))
    return memory


def test_a_request_has_spans_without_anything_about_the_patient(exporter: InMemorySpanExporter, tmp_path: Path) -> None:
    write_pool(tmp_path / "pool")
    with LocalService(tmp_path / "pool", tmp_path / "state", otlp="http://collector") as service:
        with service.client() as http:
            assert http.post("/v1/streams/ward/batches", files=form(colour_dicom(0))).status_code == 200
            assert http.post("/v1/streams/ward/batches", files=form(SECRET.encode())).status_code == 415
        service.stop()
    spans = exporter.get_finished_spans()
    by_name = {name: [each for each in spans if each.name == name] for name in ("request", "decode", "step", "audit")}
    assert [dict(each.attributes)["status"] for each in by_name["request"]] == [200, 415]
    assert by_name["request"][0].attributes["route"] == "/v1/streams/{stream}/batches"
    assert by_name["decode"][0].parent.span_id == by_name["request"][0].context.span_id
    assert dict(by_name["step"][0].attributes) == {"stream": "ward", "images": 1}
    (line,) = [each for each in by_name["audit"] if each.attributes["kind"] == "step"]
    assert line.parent.span_id == by_name["step"][0].context.span_id
    text = "".join(each.to_json() for each in spans)
    assert SECRET not in text
    assert "SECRET" not in text
    assert "1.2.826" not in text
    with span("request") as about:  # stopped with the service
        about["status"] = 200
    assert len(exporter.get_finished_spans()) == len(spans)


def test_the_text_of_an_error_is_not_in_its_span() -> None:
    memory = InMemorySpanExporter()
    stop = trace_with(memory)
    with pytest.raises(ValueError, match=SECRET), span("decode"):
        raise ValueError(SECRET)
    stop()
    (ended,) = memory.get_finished_spans()
    assert dict(ended.attributes) == {"error.type": "ValueError"}
    assert SECRET not in ended.to_json()


def test_a_wrong_collector_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--otlp is the URL"):
        start_tracing("collector:4318")
    assert ServeOptions(tmp_path).otlp is None
