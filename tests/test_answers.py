"""What an answer depends on, when there is none, and how long it takes to come: over HTTP, without a socket."""

import asyncio
import base64
import io
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from highdicom import sr
from PIL import Image

import engines
import mergestream as ms
from conftest import PREPROCESSING, make_pool
from dicoms import dicom
from mergestream.data.intake.input_files import read_upload
from mergestream.data.intake.limits import Limits
from mergestream.data.intake.pictures import Picture
from mergestream.runtime.errors import InputError
from mergestream.serving import decode_queue, startup
from mergestream.serving.audit.log_writer import AuditLog
from mergestream.serving.audit.replay import compare
from mergestream.serving.engine import engine as engine_module
from mergestream.serving.engine.engine import Engine
from mergestream.serving.engine.recomputation import recompute_step
from mergestream.serving.guards.findings import GuardSettings
from mergestream.serving.http.application import create_app
from mergestream.serving.http.request_limits import ServiceLimits
from mergestream.serving.service import Service

ALWAYS_THE_METHOD = GuardSettings(fallback="none")
PER_IMAGE = ("predictions", "probabilities", "encoder_coefficients", "entropies", "model_hash")


@pytest.fixture(scope="module")
def pool() -> ms.ExpertPool:
    return make_pool("hand_written", base=True)


def waves(seed: int, size: int = 24) -> np.ndarray:
    """A picture with content [H,W,3]: neither blank nor noise."""
    y, x = np.mgrid[0 : 4 : size * 1j, 0 : 4 : size * 1j]
    phases = np.random.default_rng(seed).uniform(0, 6, (2, 3))
    return np.uint8(127 + 60 * np.sin(x[..., None] + phases[0]) + 60 * np.cos(2 * y[..., None] + phases[1]))


def noise(seed: int = 0) -> np.ndarray:
    """Larger than the experts' images: what is left of it after resizing is near the limit."""
    return np.random.default_rng(seed).integers(0, 256, (40, 48, 3), dtype=np.uint8)


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def picture(seed: int) -> Picture:
    return read_upload(png(waves(seed)), Limits())[0]


class Running:
    """A service in this event loop over a real log; `post` sends files and returns the JSON of the answer."""

    def __init__(self, folder: Path, service: Service, client: httpx.AsyncClient) -> None:
        self.log, self.service, self.client = folder / "audit.jsonl", service, client

    async def post(self, stream: str, to: str, *files: bytes, status: int = 200, **query: str) -> Any:
        form = [("images", ("a", data)) for data in files]
        response = await self.client.post(f"/v1/streams/{stream}/{to}", files=form, params=query)
        assert response.status_code == status, response.text
        return response.json()

    def steps(self, stream: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line["body"] for line in lines if line["kind"] == "step" and line["body"]["stream"] == stream]


def run(
    folder: Path,
    pool: ms.ExpertPool,
    talk: Callable[[Running], Awaitable[None]],
    guards: GuardSettings | None = ALWAYS_THE_METHOD,
    limits: ServiceLimits | None = None,
    **options: Any,
) -> None:
    async def talked() -> None:
        with AuditLog(folder / "audit.jsonl") as log:
            more = {"state_folder": folder / "s", "guards": guards, **engines.around(pool, folder)}
            engine = Engine(pool, "entropy_adaptive", options, audit=log, **more)
            service = Service(lambda _: engine, limits)
            transport = httpx.ASGITransport(app=create_app(service))
            async with httpx.AsyncClient(transport=transport, base_url="http://inside") as client:
                await service.start()
                await talk(Running(folder, service, client))
                await service.stop()

    asyncio.run(asyncio.wait_for(talked(), 60))


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for name in PER_IMAGE:
        assert one[name] == other[name], name


# --- neighbours -------------------------------------------------------------------------------------------------------


def test_an_image_gets_the_same_answer_alone_and_beside_strangers(pool: ms.ExpertPool, tmp_path: Path) -> None:
    async def talk(running: Running) -> None:
        ours, strangers = png(waves(0)), [png(waves(seed)) for seed in (1, 2, 3)]
        alone = await running.post("alone", "images", ours)
        crowd = await asyncio.gather(*(running.post("crowd", "images", each) for each in (ours, *strangers)))
        same(crowd[0], alone)
        for answer in crowd:
            assert (answer["batch_size"], answer["depends_on_batch"], answer["position"]) == (1, False, 0)
        together = await running.post("batch", "batches", ours, *strangers)
        assert (together["batch_size"], together["depends_on_batch"]) == (4, True)
        assert together["probabilities"][0] != alone["probabilities"][0]

    run(tmp_path, pool, talk)


def test_it_depends_on_the_streams_past_which_the_log_holds(pool: ms.ExpertPool, tmp_path: Path) -> None:
    """Two streams with the same past; in one, three strangers' images wait behind ours."""
    past, ours, strangers = [picture(seed) for seed in (7, 8)], picture(0), [picture(seed) for seed in (1, 2, 3)]

    async def talk(running: Running) -> None:
        for stream in ("alone", "crowd"):
            await running.service.answer_batch(stream, past)
        alone = await running.service.answer_batch("alone", [ours], one=True)
        answers = [running.service.answer_batch("crowd", [each], one=True) for each in (ours, *strangers)]
        crowd = await asyncio.gather(*answers)
        assert crowd[0].probabilities == alone.probabilities
        assert crowd[0].weights_sha256 == alone.weights_sha256
        steps = running.steps("crowd")
        assert [len(step["inputs"]) for step in steps] == [2, 1, 1, 1, 1]
        for before, step, each in zip(steps, steps[1:], (ours, *strangers), strict=False):
            assert step["state_before"] == before["state_after"]
            assert not compare(step, json.loads(json.dumps(recompute_step(step, [each], pool))))

    run(tmp_path, pool, talk, momentum=0.9)


def test_a_batch_may_be_answered_image_by_image(pool: ms.ExpertPool, tmp_path: Path) -> None:
    files = [png(waves(seed)) for seed in range(4)]

    async def talk(running: Running) -> None:
        one_by_one = [await running.post("a", "images", file) for file in files]
        batch = await running.post("b", "batches", *files, single="true")
        for answer, each, row in zip(one_by_one, batch["images"], batch["probabilities"], strict=True):
            same(each, answer)
            assert each["step"] == answer["step"]
            assert row == answer["probabilities"][0]
        assert (batch["batch_size"], batch["depends_on_batch"]) == (1, False)
        assert batch["model_hash"] is batch["encoder_coefficients"] is None  # each image had its own
        assert len({each["audit"]["hash"] for each in batch["images"]}) == 4
        assert [step["step"] for step in running.steps("b")] == [0, 1, 2, 3]
        (stream,) = [each for each in running.service.engine.streams() if each["stream"] == "b"]
        assert (stream["steps"], stream["images"]) == (4, 4)

    run(tmp_path, pool, talk, momentum=0.9)


def test_the_service_may_answer_all_images_alone_or_all_together(pool: ms.ExpertPool, tmp_path: Path) -> None:
    from mergestream.serving.answer_queue import QueueSettings

    files = [png(waves(seed)) for seed in range(3)]

    async def alone(running: Running) -> None:
        assert (await running.post("a", "batches", *files))["depends_on_batch"] is False

    async def together(running: Running) -> None:
        answers = await asyncio.gather(*(running.post("a", "images", file) for file in files))
        assert [answer["batch_size"] for answer in answers] == [3, 3, 3]
        assert {answer["depends_on_batch"] for answer in answers} == {True}

    run(tmp_path / "1", pool, alone, limits=ServiceLimits(queue=QueueSettings(single=True)))
    run(tmp_path / "2", pool, together, limits=ServiceLimits(queue=QueueSettings(single=False, count=3, seconds=5)))


def test_of_images_answered_one_by_one_all_are_logged_or_none(
    pool: ms.ExpertPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = engine_module.take_step

    def refusing(lineup: Any, before: Any, pictures: Sequence[Picture], *more: Any) -> Any:
        if pictures[0].sha256 == picture(2).sha256:
            raise InputError("This image cannot be used.")
        return taken(lineup, before, pictures, *more)

    monkeypatch.setattr(engine_module, "take_step", refusing)

    async def talk(running: Running) -> None:
        sent = [png(waves(seed)) for seed in range(4)]
        await running.post("a", "batches", *sent, single="true", status=422)
        assert running.steps("a") == []
        answers = [running.post("a", "images", file, status=422 if i == 2 else 200) for i, file in enumerate(sent)]
        await asyncio.gather(*answers)  # strangers of a refused image are answered
        assert len(running.steps("a")) == 3

    run(tmp_path, pool, talk)


def test_a_method_without_an_answer_to_one_image_says_so(tmp_path: Path) -> None:
    options = startup.ServeOptions(tmp_path, options=["recalibrate_bn=true"], single_image_answers=True)
    with pytest.raises(InputError, match="one image alone has no defined answer"):
        startup.serve(options)


def test_the_description_of_the_interface_says_what_an_answer_depends_on(pool: ms.ExpertPool, tmp_path: Path) -> None:
    async def talk(running: Running) -> None:
        document = (await running.client.get("/openapi.json")).json()
        assert "depends_on_batch" in document["info"]["description"]
        fields = document["components"]["schemas"]["BatchAnswer"]["properties"]
        assert {"batch_size", "depends_on_batch", "abstained_because"} <= fields.keys()
        assert "depends_on_batch" in (await running.client.get("/docs")).text

    run(tmp_path, pool, talk)


# --- abstention -------------------------------------------------------------------------------------------------------


def texts(report: str) -> dict[str, list[str]]:
    (group,) = sr.srread(io.BytesIO(base64.b64decode(report))).content.get_image_measurement_groups()
    content: dict[str, list[str]] = {}
    for item in group.get_qualitative_evaluations():
        content.setdefault(item.name.value, []).append(item.value.meaning)
    return content | ({"class": ["…"]} if group.get_measurements() else {})


def test_noise_has_no_class_in_any_output(pool: ms.ExpertPool, tmp_path: Path) -> None:
    async def talk(running: Running) -> None:
        files = dicom(noise()), dicom(waves(0)), dicom(np.zeros((24, 24), np.uint8))
        answer = await running.post("a", "batches", *files, report="dicom-sr")
        assert [each is None for each in answer["predictions"]] == [True, False, True]
        assert answer["abstained_because"] == [["structureless_pictures"], None, ["blank_pictures"]]
        noisy, clear, black = map(texts, answer["reports"])
        for content, code in ((noisy, "structureless_pictures"), (black, "blank_pictures")):
            assert "predicted" not in content
            assert "class" not in content
            assert content["no_result"] == [f"The service abstains: {code.replace('_', ' ')}"]
            assert sum(code.replace("_", " ") in finding for finding in content["guard_finding"]) == 1
        assert clear["predicted"] == [answer["predictions"][1]]
        assert "no_result" not in clear
        assert "class" in clear
        assert not any("pictures" in finding for finding in clear.get("guard_finding", []))
        assert "together with other images" in clear["dependence"][0]
        (step,) = running.steps("a")
        assert (step["abstained"], step["abstained_because"]) == (
            [0, 2],
            [["structureless_pictures"], ["blank_pictures"]],
        )
        alone = await running.post("b", "images", files[1], report="dicom-sr")
        assert "alone" in texts(alone["reports"][0])["dependence"][0]

    run(tmp_path, pool, talk)


def test_experts_that_recognise_nothing_leave_the_batch_undecided(pool: ms.ExpertPool, tmp_path: Path) -> None:
    async def talk(running: Running) -> None:
        answer = await running.post("a", "batches", png(waves(0)), png(waves(1)))
        assert answer["predictions"] == [None, None]
        assert answer["abstained_because"] == [["near_uniform_entropies"]] * 2

    run(tmp_path, pool, talk, GuardSettings(near_uniform=0.0))


def test_abstentions_are_replayed(pool: ms.ExpertPool, tmp_path: Path) -> None:
    pictures = [read_upload(png(each), Limits())[0] for each in (noise(), waves(0))]

    def logged(folder: str, **guards: Any) -> dict[str, Any]:
        body: dict[str, Any] = {}

        async def talk(running: Running) -> None:
            await running.service.answer_batch("a", pictures)
            body.update(running.steps("a")[0])

        run(tmp_path / folder, pool, talk, GuardSettings(**guards))
        return body

    def differences(body: dict[str, Any]) -> list[str]:
        computed = json.loads(json.dumps(recompute_step(body, pictures, pool)))
        return [difference.field for difference in compare(body, computed)]

    body = logged("by finding")
    assert body["abstained"] == [0]
    assert differences(body) == []
    assert differences({**body, "abstained": [], "abstained_because": []}) == ["abstained", "abstained_because"]
    body = logged("by confidence", abstain_on=(), abstain_below=0.99)
    assert body["abstained_because"] == [["low_confidence"]] * len(body["abstained"]) != []
    assert differences(body) == []


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("none", ()),
        ("blank_pictures", ("blank_pictures",)),
        ("class_drift, blank_pictures", ("class_drift", "blank_pictures")),
    ],
)
def test_the_findings_that_make_it_abstain_are_chosen_on_the_command_line(text: str, codes: tuple[str, ...]) -> None:
    from mergestream.serving.open_engine import guard_settings

    assert guard_settings(startup.ServeOptions(Path("pool"), abstain_on=text)).abstain_on == codes
    with pytest.raises(ms.MergestreamError, match="abstain_on"):
        guard_settings(startup.ServeOptions(Path("pool"), abstain_on="noise"))


# --- waiting ----------------------------------------------------------------------------------------------------------


def test_a_busy_stream_does_not_hold_up_another_ones_image(
    pool: ms.ExpertPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while files are decoded, and not while they wait for the engine."""
    read_each = decode_queue.read_each

    def slowly(files: Sequence[bytes], limits: Limits) -> Any:
        time.sleep(0.01 * len(files))
        return read_each(files, limits)

    monkeypatch.setattr(decode_queue, "read_each", slowly)

    async def talk(running: Running) -> None:
        busy = [asyncio.create_task(running.post("busy", "images", png(waves(0)))) for _ in range(120)]
        await asyncio.sleep(0.05)
        await running.post("quiet", "images", png(waves(1)))
        assert sum(task.done() and task.exception() is None for task in busy) < 80
        await asyncio.gather(*busy, return_exceptions=True)  # on a slow machine some are refused

    run(tmp_path, pool, talk)


def test_work_that_would_wait_too_long_is_refused_and_told_when_to_come_back(
    pool: ms.ExpertPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mergestream.serving.answer_queue import QueueSettings

    take_step = engine_module.take_step
    monkeypatch.setattr(engine_module, "take_step", lambda *given: (time.sleep(0.05), take_step(*given))[1])

    async def talk(running: Running) -> None:
        for _ in range(3):  # to know how long an image takes
            await running.post("a", "images", png(waves(0)))

        async def waited(number: int) -> tuple[httpx.Response, float]:
            started, files = time.perf_counter(), [("images", ("a", png(waves(number))))]
            response = await running.client.post(f"/v1/streams/s{number}/images", files=files)
            return response, time.perf_counter() - started

        answers = await asyncio.gather(*(waited(number) for number in range(40)))
        refused = [response for response, _ in answers if response.status_code == 503]
        assert len([response for response, _ in answers if response.status_code == 200]) + len(refused) == 40
        assert len(refused) > 20
        for response in refused:
            assert response.json()["code"] == "overloaded"
            assert int(response.headers["retry-after"]) >= 1
        assert max(seconds for _, seconds in answers) < 2.5  # all 40 would take two seconds and more
        assert (await running.post("a", "images", png(waves(0))))["step"] == 3  # and then it goes on

    run(tmp_path, pool, talk, limits=ServiceLimits(queue=QueueSettings(longest_wait=0.4)))


# --- cards and pools --------------------------------------------------------------------------------------------------


def test_a_text_in_a_cards_risk_table_is_no_fault_of_the_service(pool: ms.ExpertPool, tmp_path: Path) -> None:
    rows = [["high", 0.9, 0.1], [0.5, 0.9, 0.1]]
    try:
        annotated = pool.annotate("lyon", metrics={"validation": {"accuracy": 0.75, "risk_by_confidence": rows}})
    except ms.MergestreamError as error:  # refused where the card is read: better still
        assert "risk_by_confidence" in str(error)  # noqa: PT017
        return

    async def talk(running: Running) -> None:
        answer = await running.post("a", "batches", png(waves(0)))
        expert = answer["abstention"]["source_validation"]["lyon"]
        assert expert == {"error": 0.25, "coverage": None, "risk": None}

    run(tmp_path, annotated, talk, GuardSettings(fallback="none", abstain_below=0.1))


def test_a_pool_of_one_class_is_refused_and_no_image_is_blamed(tmp_path: Path) -> None:
    class OneClass(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(3, 1)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.head(images.mean(dim=(2, 3)))

    pool = ms.ExpertPool.from_modules(
        {"a": OneClass(), "b": OneClass()}, classes=("only",), preprocessing=PREPROCESSING
    )

    async def talk(_: Running) -> None:
        pytest.fail("it started")

    with pytest.raises(ms.MergestreamError, match="class"):
        run(tmp_path, pool, talk)
