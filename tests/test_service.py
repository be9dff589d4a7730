"""The service as clients see it: real HTTP, the same answers as the Python interface."""

import asyncio
import base64
import hashlib
import io
import json
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pydicom
import pytest
from highdicom import sr
from PIL import Image

import mergestream as ms
from benching import pool_on_disk
from dicoms import SECRET, dicom
from mergestream.runtime.errors import CheckpointError
from mergestream.serving.audit.keys import create_key, read_public_key
from mergestream.serving.audit.log_verification import verify
from mergestream.serving.http.problems import PROBLEMS
from mergestream.serving.startup import ServeOptions, serve
from services import (
    STREAMS,
    LocalService,
    RunningService,
    colour_dicom,
    direct,
    encoded,
    form,
    npy,
    pixels,
    png,
    probabilities,
    tensor,
)

MOMENTUM = ("--option", "momentum=0.9", "--rate", "0", "--max-wait-ms", "30")
LOCAL_MOMENTUM = {"options": ("momentum=0.9",), "rate": 0, "max_wait_ms": 30}


pool = pool_on_disk


@pytest.fixture(scope="module")
def service(pool: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalService]:
    with LocalService(pool, tmp_path_factory.mktemp("state"), **LOCAL_MOMENTUM) as running:
        yield running
        assert running.stop() == 0
        assert verify(running.log).sound
        assert running.lines()[-1]["kind"] == "service_stopped"
        # Nothing that a client called its files, and nothing of a DICOM header, is anywhere.
        for file in (f for f in running.state.rglob("*") if f.is_file()):
            assert SECRET.encode() not in file.read_bytes()
        assert SECRET not in running.words()


@pytest.fixture(scope="module")
def client(service: LocalService) -> Iterator[httpx.Client]:
    with service.client() as client:
        yield client


def answer(client: httpx.Client, stream: str, *files: bytes, to: str = "batches", **query: str) -> dict[str, Any]:
    sent = client.post(f"{STREAMS}/{stream}/{to}", files=form(*files), params=query)
    assert sent.status_code == 200, sent.text
    return sent.json()


def decoded(data: bytes) -> np.ndarray:
    return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


# --- answers ----------------------------------------------------------------------------------------------------------


def test_png_jpeg_dicom_and_numpy_batches_are_answered_as_in_python(client: httpx.Client, pool: Path) -> None:
    """One stream through all formats: moving average, hashes and all."""
    method = direct(pool, momentum=0.9)
    arrays = [pixels(seed) for seed in range(4)]
    jpegs = [encoded(array, "JPEG", quality=80) for array in arrays]
    batches = [
        ([encoded(array) for array in arrays], arrays),
        (jpegs, [decoded(data) for data in jpegs]),
        ([dicom(array) for array in arrays], arrays),
        ([npy(tensor(*arrays).numpy())], arrays),
    ]
    for number, (files, shown) in enumerate(batches):
        response, step = answer(client, "formats", *files), method.step(tensor(*shown))
        assert response["step"] == number
        assert response["probabilities"] == probabilities(step)
        assert response["predictions"] == [method.pool.classes[c] for c in step.logits.argmax(dim=-1)]
        names = method.pool.names
        assert response["encoder_coefficients"] == dict(zip(names, step.encoder_coefficients.tolist(), strict=True))
        assert response["head_coefficients"] == dict(zip(names, step.head_coefficients.tolist(), strict=True))
        assert response["entropies"] == dict(zip(names, step.entropy.tolist(), strict=True))
        assert response["head_expert"] == step.head_expert
        assert response["pool_hash"] == method.pool.fingerprint()
        assert len(response["model_hash"]) == 64


def test_a_real_process_answers_curl_and_ends_with_sigterm(pool: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(1))
    (tmp_path / "b.dcm").write_bytes(colour_dicom(2))
    images = [word for name in ("a.png", "b.dcm") for word in ("-F", f"images=@{tmp_path / name}")]
    with RunningService(pool, tmp_path / "state", *MOMENTUM) as running:
        url = f"{running.url}/v1/streams/curl/batches"
        done = subprocess.run(["curl", "-sS", "--fail", *images, url], capture_output=True, text=True, check=True)
        assert running.stop() == 0
    assert running.lines()[-1]["kind"] == "service_stopped"
    step = direct(pool, momentum=0.9).step(tensor(pixels(1), pixels(2)))
    assert json.loads(done.stdout)["probabilities"] == probabilities(step)


def test_every_answer_is_in_the_log_before_it_leaves(service: LocalService, client: httpx.Client) -> None:
    response = answer(client, "logged", png(1), png(2))
    (line,) = [line for line in service.lines("step") if line["sequence"] == response["audit"]["sequence"]]
    assert line["hash"] == response["audit"]["hash"]
    assert line["body"]["stream"] == "logged"
    assert len(line["body"]["inputs"]) == 2
    assert list(response["encoder_coefficients"].values()) == line["body"]["encoder_coefficients"]


def test_sixteen_callers_at_once_get_their_own_answers(service: LocalService, client: httpx.Client) -> None:
    """Each in a step of its own, from the stream's past alone."""

    async def ask() -> list[dict[str, Any]]:
        async with httpx.AsyncClient(base_url=service.url, timeout=30) as asking:

            async def one(seed: int) -> dict[str, Any]:
                sent = await asking.post(f"{STREAMS}/together/images", files=form(png(seed)))
                assert sent.status_code == 200, sent.text
                return sent.json()

            return await asyncio.gather(*(one(seed) for seed in range(16)))

    answers = asyncio.run(ask())
    lines = {line["sequence"]: line["body"] for line in service.lines("step") if line["body"]["stream"] == "together"}
    assert [len(body["inputs"]) for body in lines.values()] == [1] * 16
    for seed, response in enumerate(answers):
        body = lines[response["audit"]["sequence"]]
        assert body["inputs"][response["position"]]["sha256"] == hashlib.sha256(png(seed)).hexdigest()
        assert response["predictions"] == [response["classes"][body["predictions"][response["position"]]]]
        assert len(response["probabilities"]) == 1
        assert (response["batch_size"], response["depends_on_batch"]) == (1, False)


def test_dicom_answers_come_as_structured_reports_on_demand(client: httpx.Client) -> None:
    response = answer(client, "reports", png(1), colour_dicom(2), report="dicom-sr")
    nothing, report = response["reports"]
    assert nothing is None
    read = pydicom.dcmread(io.BytesIO(base64.b64decode(report)))
    assert read.Modality == "SR"
    (group,) = sr.srread(io.BytesIO(base64.b64decode(report))).content.get_image_measurement_groups()
    shown = {each.name.value: each.value.meaning for each in group.get_qualitative_evaluations()}
    assert response["predictions"][1] == shown["predicted"]
    assert [each.value for each in group.get_measurements()] == response["probabilities"][1]
    assert response["model_hash"].encode() in base64.b64decode(report)
    assert answer(client, "reports", colour_dicom(2))["reports"] is None


# --- streams ----------------------------------------------------------------------------------------------------------


def test_streams_are_listed_reset_and_deleted(client: httpx.Client, pool: Path) -> None:
    fresh = direct(pool, momentum=0.9)
    first = answer(client, "site", png(1))["probabilities"]
    second = answer(client, "site", png(1))
    assert client.get(f"{STREAMS}/site").json()["steps"] == 2
    names = [stream["name"] for stream in client.get(STREAMS).json()["streams"]]
    assert "site" in names
    assert names == sorted(names)
    assert client.post(f"{STREAMS}/site/reset").json()["steps"] == 2
    again = answer(client, "site", png(1))
    assert again["step"] == 2
    assert again["probabilities"] == first == probabilities(fresh.step(tensor(pixels(1))))
    assert second["step"] == 1
    assert client.delete(f"{STREAMS}/site").status_code == 204
    assert client.get(f"{STREAMS}/site").json()["code"] == "unknown_stream"
    assert client.delete(f"{STREAMS}/site").status_code == 404
    assert answer(client, "site", png(1))["step"] == 0


def test_recent_steps_and_overview_show_what_was_answered(client: httpx.Client) -> None:
    answers = [answer(client, "watched", png(number), png(number + 1)) for number in range(3)]
    recent = client.get(f"{STREAMS}/watched/recent").json()
    assert recent["stream"] == "watched"
    assert [step["step"] for step in recent["steps"]] == [0, 1, 2]
    later = client.get(f"{STREAMS}/watched/recent", params={"after": 1}).json()["steps"]
    assert later == recent["steps"][2:]
    step = later[0]
    assert step["images"] == 2 == sum(step["predictions_per_class"].values())
    assert step["encoder_coefficients"] == answers[2]["encoder_coefficients"]
    assert step["entropies"] == answers[2]["entropies"]
    shown = client.get("/v1/overview").json()
    (stream,) = [stream for stream in shown["streams"] if stream["name"] == "watched"]
    assert stream["steps"] == 3
    assert stream["images"] == 6
    assert stream["last_step_at"].endswith("Z")
    assert stream["encoder_coefficients"] == answers[2]["encoder_coefficients"]
    assert {alarm["code"] for alarm in stream["alarms"]} == {finding["code"] for finding in answers[2]["findings"]}
    assert shown["latency_ms"]["p50"] <= shown["latency_ms"]["p95"] <= shown["latency_ms"]["p99"]
    assert shown["requests"]["answered"] >= 3
    assert [expert["name"] for expert in shown["pool"]["experts"]] == list(answers[0]["encoder_coefficients"])


# --- pool -------------------------------------------------------------------------------------------------------------


def test_an_expert_is_switched_off_for_all_and_on_again(
    service: LocalService, client: httpx.Client, pool: Path
) -> None:
    name = client.get("/v1/pool").json()["experts"][0]["name"]
    off = client.put(f"/v1/pool/experts/{name}", json={"on": False}).json()
    assert off == {"expert": name, "on": False, "switched_off": [name]}
    response = answer(client, "without", png(1))
    assert response["encoder_coefficients"][name] == 0
    assert response["entropies"][name] is None
    assert response["switched_off"] == [name]
    rest = ms.create_method("entropy_adaptive", ms.ExpertPool.load(pool).without(name), momentum=0.9)
    assert response["probabilities"] == probabilities(rest.step(tensor(pixels(1))))
    others = [each["name"] for each in client.get("/v1/pool").json()["experts"] if each["on"]]
    assert name not in others
    for other in others[:-1]:
        assert client.put(f"/v1/pool/experts/{other}", json={"on": False}).status_code == 200
    refused = client.put(f"/v1/pool/experts/{others[-1]}", json={"on": False})
    assert (refused.status_code, refused.json()["code"]) == (409, "change_refused")
    for each in (name, *others[:-1]):
        assert client.put(f"/v1/pool/experts/{each}", json={"on": True}).status_code == 200
    asked = [line["body"] for line in service.lines("change_asked")]
    assert {"switch"} <= {body["change"] for body in asked}
    assert all(body["by"] == "loopback" for body in asked)


def test_reload_says_what_changed_and_keeps_the_old_pool_if_the_new_one_is_bad(
    client: httpx.Client, pool: Path
) -> None:
    before = client.get("/v1/pool").json()
    assert client.post("/v1/pool/reload").json()["changed"] is False
    weights = pool / before["experts"][0]["name"] / "weights.safetensors"
    good = weights.read_bytes()
    try:
        weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        refused = client.post("/v1/pool/reload")
        assert (refused.status_code, refused.json()["code"]) == (409, "pool_unusable")
        assert str(pool) not in refused.text
    finally:
        weights.write_bytes(good)
    assert client.get("/v1/pool").json() == before
    assert answer(client, "after-reload", png(1))["pool_hash"] == before["hash"]


def test_cards_say_nothing_about_how_an_expert_was_made(client: httpx.Client) -> None:
    expert = client.get("/v1/pool").json()["experts"][0]
    assert set(expert) == {
        "name", "on", "domain", "network", "metrics", "temperature", "weights_hash", "signed_by", "revoked",
    }  # fmt: skip


# --- operation --------------------------------------------------------------------------------------------------------


def test_health_readiness_and_metrics(client: httpx.Client) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json() == {"status": "ready"}
    numbers = metrics_of(client)
    answer(client, "counted", png(1), png(2))
    client.post(f"{STREAMS}/counted/batches", files=form(b"nothing"))
    later = metrics_of(client)

    def grown(name: str) -> float:
        return later[name] - numbers.get(name, 0)

    route = 'route="/v1/streams/{stream}/batches"'
    assert grown(f'mergestream_requests_total{{method="POST",{route},status="200"}}') == 1
    assert grown(f'mergestream_requests_total{{method="POST",{route},status="415"}}') == 1
    assert grown(f"mergestream_request_seconds_count{{{route}}}") == 2
    assert grown("mergestream_images_total") == 2
    assert grown("mergestream_steps_total") == 1
    assert grown("mergestream_audit_lines_total") == 1
    labels = 'code="structureless_pictures",severity="warning",stream="counted"'
    assert grown(f"mergestream_findings_total{{{labels}}}") == 1
    assert later["mergestream_streams"] == len(client.get(STREAMS).json()["streams"])
    assert later["mergestream_queue_length"] == 0


def metrics_of(client: httpx.Client) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    return {name: float(number) for name, number in (line.rsplit(" ", 1) for line in lines if line[:1] != "#")}


def test_documents_are_complete_and_need_nothing_from_elsewhere(client: httpx.Client) -> None:
    schema = client.get("/openapi.json").json()
    codes = {
        code
        for methods in schema["paths"].values()
        for about in methods.values()
        for response in about["responses"].values()
        for code in response.get("content", {}).get("application/problem+json", {}).get("examples", {})
    }
    # The others are said before any route is found.
    assert codes | {"not_found", "method_not_allowed", "malformed_http"} == set(PROBLEMS)
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "http://" not in page.text.replace("http://127.0.0.1", "")
    assert "https://" not in page.text
    assert "<script" not in page.text
    assert all(f"<code>{code}</code>" in page.text for code in PROBLEMS)
    assert client.get("/docs.css").headers["content-type"].startswith("text/css")


def test_the_dashboards_files_are_served_under_a_strict_policy(client: httpx.Client) -> None:
    page = client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert client.get("/dashboard.js").headers["content-type"].startswith("text/javascript")
    assert client.get("/vendor/uPlot.iife.min.js").headers["content-type"].startswith("text/javascript")
    for path in ("/../service.py", "/%2e%2e/service.py", "/vendor/", "/dashboard/", "/index.html/x"):
        assert client.get(path).status_code == 404


# --- starting and ending ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_sigterm_under_load_loses_nothing_and_a_restart_goes_on(pool: Path, tmp_path: Path) -> None:
    """Every answer is in the log, every line of it was answered, the exit code is 0, and averages go on from there."""
    method = direct(pool, momentum=0.9)
    steps = [probabilities(method.step(tensor(pixels(number), pixels(number + 50)))) for number in range(4)]
    create_key(tmp_path / "site.key")
    more = (*MOMENTUM, "--max-batch", "4", "--audit-key", str(tmp_path / "site.key"))
    with RunningService(pool, tmp_path, *more) as first:
        with first.client() as client:
            responses = [answer(client, "a", png(number), png(number + 50)) for number in (0, 1)]
        answered = asyncio.run(load_until_stopped(first, 40))
        assert first.process.wait(60) == 0, first.words()
    lines = [line for line in first.lines("step") if line["body"]["stream"] != "a"]
    logged = {(line["sequence"], position) for line in lines for position in range(len(line["body"]["inputs"]))}
    places = [(each["audit"]["sequence"], each["position"]) for each in answered]
    assert len(set(places)) == len(places) >= 40
    assert set(places) == logged
    assert first.lines()[-1]["kind"] == "service_stopped"
    assert "Traceback" not in first.words()
    with RunningService(pool, tmp_path, *more) as second, second.client() as client:
        responses += [answer(client, "a", png(number), png(number + 50)) for number in (2, 3)]
        assert second.stop() == 0
    assert [each["probabilities"] for each in responses] == steps
    assert [each["step"] for each in responses] == [0, 1, 2, 3]
    report = verify(second.log, read_public_key(tmp_path / "site.key.pub"))
    assert report.sound
    assert "not signed" not in second.words()


async def load_until_stopped(running: RunningService, enough: int) -> list[dict[str, Any]]:
    """Sixteen callers who go on until nobody listens any more; the signal comes in the middle of it."""
    answered: list[dict[str, Any]] = []

    async def caller(number: int) -> None:
        async with httpx.AsyncClient(base_url=running.url, timeout=60) as asking:
            for turn in range(10_000):
                try:
                    sent = await asking.post(f"{STREAMS}/s{number % 4}/images", files=form(png(100 * number + turn)))
                except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                    return
                if sent.status_code != 200:
                    assert (sent.status_code, sent.json()["code"]) == (503, "closing")
                    return
                answered.append(sent.json())

    async def end() -> None:
        while len(answered) < enough:
            await asyncio.sleep(0.01)
        running.process.send_signal(signal.SIGTERM)

    await asyncio.gather(end(), *(caller(number) for number in range(16)))
    return answered


def test_a_corrupt_pool_is_refused_and_named(pool: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(pool, bad)
    weights = sorted(bad.glob("[!b]*/weights.safetensors"))[0]
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=rf"{weights.parent.name}.*weights\.safetensors"):
        serve(ServeOptions(bad, port=0, state=tmp_path / "state"))


@pytest.mark.slow
def test_a_watched_folder_is_answered_and_a_service_without_a_log_says_so(pool: Path, tmp_path: Path) -> None:
    watched = tmp_path / "in"
    watched.mkdir()
    (watched / "one.png").write_bytes(png(1))
    (watched / f"{SECRET}.dcm").write_bytes(colour_dicom(2))
    more = {"watch": watched, "watch_reports": True, "no_audit": True, "json_log": True}
    with LocalService(pool, tmp_path / "state", **more) as running, running.client() as client:
        assert answer(client, "a", png(1))["audit"] is None
        deadline = time.monotonic() + 30
        while len(list((watched / "done").glob("*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.2)
        (stream,) = [stream for stream in client.get(STREAMS).json()["streams"] if stream["name"] != "a"]
        assert stream["images"] == 2
        assert running.stop() == 0
    response = json.loads((watched / "answers" / "one.png.json").read_text())["answers"][0]
    assert response["stream"] == "watched-folder"
    assert pydicom.dcmread(watched / "answers" / f"{SECRET}.dcm.sr.dcm").Modality == "SR"
    assert "No audit log is kept." in running.words()
    assert SECRET not in running.words()
    assert not running.log.exists()
    requests = [json.loads(line) for line in running.said if line.startswith("{")]
    assert any(line.get("route") == "/v1/streams/{stream}/batches" and line["status"] == 200 for line in requests)
