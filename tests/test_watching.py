"""The watched folder: complete files only, nothing lost and nothing answered twice, whatever happens in between."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from PIL import Image

from dicoms import SECRET, dicom
from mergestream.data.intake.limits import Limits
from mergestream.data.intake.pictures import Picture
from mergestream.runtime.errors import InputError, OutputError
from mergestream.serving.dropbox import ImageAnswer
from mergestream.serving.reports.structured_report import write_report
from mergestream.serving.watched_folder import Watcher
from mergestream.serving.worker_thread import Pace
from services import ANSWER

FAST = Pace(batch_size=4, batch_seconds=0.1, look_seconds=0.03, retry_seconds=0.2)


def png(seed: int, size: int = 8) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


class Model:
    """Answers with the mean of each picture, and remembers its batches."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.seen: list[str] = []

    def __call__(self, pictures: list[Picture]) -> list[dict[str, Any]]:
        self.batches.append(len(pictures))
        self.seen += [picture.sha256 for picture in pictures]
        return [{"mean": float(picture.pixels.mean()), "frame": picture.frame} for picture in pictures]


def answered_by(answer: Any) -> Any:
    """The documents of a model as answers to images, with a report for those from DICOM."""

    def answers(pictures: list[Picture]) -> list[ImageAnswer]:
        documents = answer(pictures)
        return [ImageAnswer(*pair) for pair in zip(documents, map(report, pictures), strict=True)]

    def report(picture: Picture) -> bytes | None:
        return write_report(picture, ANSWER, 0)

    return answers


@contextmanager
def watched(folder: Path, answer: Any, **options: Any) -> Iterator[None]:
    watcher = Watcher(folder, answered_by(answer), **{"pace": FAST, **options})
    watcher.start()
    try:
        yield
    finally:
        watcher.end(20)
        assert not watcher.failed


def until(true: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def waiting(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def test_files_are_answered_and_moved(tmp_path: Path) -> None:
    model = Model()
    for number in range(6):
        (tmp_path / f"case {number}.png").write_bytes(png(number))
    with watched(tmp_path, model):
        until(lambda: len(names(tmp_path / "done")) == 6)
    assert waiting(tmp_path) == []
    assert names(tmp_path / "answers") == [f"case {number}.png.json" for number in range(6)]
    answer = json.loads((tmp_path / "answers" / "case 3.png.json").read_text())
    expected = np.asarray(Image.open(io.BytesIO(png(3)))).mean()
    assert answer["answers"] == [{"mean": pytest.approx(expected), "frame": None}]
    assert (tmp_path / "done" / "case 3.png").read_bytes() == png(3)
    assert model.batches == [4, 2]


def test_a_few_files_wait_for_others_only_so_long(tmp_path: Path) -> None:
    model = Model()
    with watched(tmp_path, model, pace=Pace(batch_size=100, batch_seconds=0.4, look_seconds=0.02)):
        (tmp_path / "a.png").write_bytes(png(1))
        time.sleep(0.15)
        (tmp_path / "b.png").write_bytes(png(2))
        assert names(tmp_path / "done") == []
        until(lambda: len(names(tmp_path / "done")) == 2)
    assert model.batches == [2]


def test_a_file_that_still_grows_or_has_a_passing_name_is_left_alone(tmp_path: Path) -> None:
    whole = png(1, size=40)
    for name in ("scan.png.part", ".hidden.png", "b.tmp"):
        (tmp_path / name).write_bytes(whole)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.png").symlink_to(tmp_path / "b.tmp")
    os.mkfifo(tmp_path / "pipe.png")
    with watched(tmp_path, Model()), (tmp_path / "slow.png").open("wb") as slow:
        for start in range(0, len(whole), 200):
            slow.write(whole[start : start + 200])
            slow.flush()
            time.sleep(0.02)
        assert names(tmp_path / "refused") == []
        slow.close()
        until(lambda: names(tmp_path / "done") == ["slow.png"])
    assert names(tmp_path / "refused") == []
    assert {"scan.png.part", ".hidden.png", "b.tmp", "link.png", "pipe.png"} <= set(names(tmp_path))


def test_what_cannot_be_read_is_refused_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text(f"Dear {SECRET}")
    (tmp_path / "large.png").write_bytes(png(1) + bytes(5000))
    (tmp_path / "good.png").write_bytes(png(2))
    with watched(tmp_path, Model(), limits=Limits(file_bytes=4000)):
        until(lambda: not waiting(tmp_path))
        (tmp_path / "letter.txt").write_text("another one")
        until(lambda: not waiting(tmp_path))
    assert names(tmp_path / "done") == ["good.png"]
    refused = tmp_path / "refused"
    assert json.loads((refused / "letter.txt.reason.json").read_text())["code"] == "unsupported_format"
    assert json.loads((refused / "large.png.reason.json").read_text())["code"] == "too_large"
    assert (refused / "letter.txt").read_text() == f"Dear {SECRET}"
    assert (refused / "letter.txt.2").read_text() == "another one"


def test_a_refused_file_overwrites_no_other_ones_reason(tmp_path: Path) -> None:
    """Not even one that is called as the reason of another is."""
    own = {"letter.txt": "a", "letter.txt.reason.json": "{}", "letter.txt.2": "c"}
    with watched(tmp_path, Model()):
        for name in reversed(own):
            (tmp_path / name).write_text(own[name])
            until(lambda: not waiting(tmp_path))
        (tmp_path / "letter.txt").write_text("d")
        until(lambda: not waiting(tmp_path))
    refused = tmp_path / "refused"
    contents = sorted(path.read_text() for path in refused.iterdir() if len(path.read_text()) < 5)
    assert contents == ["a", "c", "d", "{}"]
    assert len(names(refused)) == 8
    assert all(json.loads((refused / name).read_text()) for name in names(refused) if len(name) > 30)


def test_another_file_of_the_same_name_has_an_answer_of_its_own(tmp_path: Path) -> None:
    model = Model()
    with watched(tmp_path, model):
        for seed in (1, 2, 1):
            (tmp_path / "image.png").write_bytes(png(seed))
            until(lambda: not waiting(tmp_path))
    assert len(names(tmp_path / "answers")) == len(names(tmp_path / "done")) == 2
    assert model.batches == [1, 1]  # the third is the first again


def test_frames_of_a_file_stay_together_and_reports_lie_beside_the_answer(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (48, 9), dtype=np.uint8)
    (tmp_path / "six.dcm").write_bytes(dicom(pixels, Rows=8, NumberOfFrames=6))
    (tmp_path / "one.dcm").write_bytes(dicom(pixels))
    (tmp_path / "bare.dcm").write_bytes(dicom(pixels, StudyInstanceUID=None))
    (tmp_path / "plain.png").write_bytes(png(1))

    with watched(tmp_path, Model()):
        until(lambda: len(names(tmp_path / "done")) == 4)
    answers = names(tmp_path / "answers")
    assert answers == sorted(
        [*(f"six.dcm.{n}.sr.dcm" for n in range(1, 7)), "one.dcm.sr.dcm",
         *(f"{name}.json" for name in ("six.dcm", "one.dcm", "bare.dcm", "plain.png"))]
    )  # fmt: skip
    six = json.loads((tmp_path / "answers" / "six.dcm.json").read_text())["answers"]
    assert [answer["frame"] for answer in six] == [1, 2, 3, 4, 5, 6]
    assert pydicom.dcmread(tmp_path / "answers" / "six.dcm.2.sr.dcm").Modality == "SR"


def test_stopping_answers_what_was_complete(tmp_path: Path) -> None:
    model = Model()
    with watched(tmp_path, model, pace=Pace(batch_size=100, batch_seconds=60, look_seconds=0.02)):
        for number in range(5):
            (tmp_path / f"{number}.png").write_bytes(png(number))
        time.sleep(0.3)
        assert model.batches == []
    assert model.batches == [5]
    assert len(names(tmp_path / "answers")) == 5


def test_one_bad_picture_holds_up_no_other_and_a_failing_model_loses_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, broken = Model(), threading.Event()
    broken.set()

    def answer(pictures: list[Picture]) -> list[dict[str, Any]]:
        if any(picture.pixels.shape[1] == 5 for picture in pictures):
            raise InputError(f"too small: {SECRET}")
        if broken.is_set():
            raise RuntimeError(SECRET)
        return model(pictures)

    for name, size in ((f"{SECRET}.png", 8), ("small.png", 5), ("other.png", 8)):
        (tmp_path / name).write_bytes(png(1, size))
    with watched(tmp_path, answer):
        until(lambda: "small.png" in names(tmp_path / "refused"))
        assert len(waiting(tmp_path)) == 2
        broken.clear()
        until(lambda: len(names(tmp_path / "done")) == 2)
    assert json.loads((tmp_path / "refused" / "small.png.reason.json").read_text())["code"] == "not_answered"
    assert SECRET not in caplog.text
    assert "tried again later" in caplog.text


def test_a_disk_that_cannot_be_written_keeps_the_inputs(tmp_path: Path) -> None:
    full = threading.Event()
    full.set()
    model = Model()

    def answer(pictures: list[Picture]) -> list[dict[str, Any]]:
        if full.is_set():
            raise OutputError("No space left on device")
        return model(pictures)

    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    with watched(tmp_path, answer):
        time.sleep(0.5)
        assert len(waiting(tmp_path)) == 3
        full.clear()
        until(lambda: len(names(tmp_path / "done")) == 3)
    assert sorted(model.batches) == [3]


def test_a_batch_that_timed_out_is_not_sent_file_by_file(tmp_path: Path) -> None:
    """Its step may be logged: each file alone would be one more step for each."""
    model, late = Model(), [True]

    def answer(pictures: list[Picture]) -> list[dict[str, Any]]:
        documents = model(pictures)
        if late.pop() if late else False:
            raise TimeoutError
        return documents

    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(png(number))
    with watched(tmp_path, answer):
        until(lambda: len(names(tmp_path / "done")) == 3)
    assert model.batches == [3, 3]


def test_a_folder_has_one_watcher(tmp_path: Path) -> None:
    with watched(tmp_path, Model()):
        until(lambda: (tmp_path / ".watching.lock").exists())
        time.sleep(0.1)
        with pytest.raises(OutputError, match="another mergestream"):
            Watcher(tmp_path, Model()).work()


def test_long_names_have_answers_too(tmp_path: Path) -> None:
    (tmp_path / ("x" * 251 + ".png")).write_bytes(png(1))
    with watched(tmp_path, Model()):
        until(lambda: len(names(tmp_path / "done")) == 1)
    assert len(names(tmp_path / "answers")) == 1


KILLED = """
import os, signal, sys, threading
from pathlib import Path
from mergestream.serving.dropbox import ImageAnswer
from mergestream.serving.watched_folder import Watcher
from mergestream.serving.worker_thread import Pace

folder, log = Path(sys.argv[1]), open(sys.argv[2], "a")
def answer(pictures):
    for picture in pictures:
        log.write(picture.sha256 + "\\n")
    log.flush()
    return [ImageAnswer({"frame": picture.frame}) for picture in pictures]
Watcher(folder, answer, pace=Pace(batch_size=2, batch_seconds=0.01, look_seconds=0.01)).work()
"""


@pytest.mark.slow
def test_a_kill_loses_nothing_and_answers_nothing_twice_that_has_an_answer(tmp_path: Path) -> None:
    folder, log, total, kills = tmp_path / "in", tmp_path / "log", 80, 3
    folder.mkdir()
    for number in range(total):
        (folder / f"{number}.png").write_bytes(png(number))
    for _ in range(kills):
        process = subprocess.Popen([sys.executable, "-c", KILLED, folder, log])
        before = len(names(folder / "answers"))
        until(lambda before=before: len(names(folder / "answers")) > before + 10, 30)
        process.send_signal(signal.SIGKILL)
        process.wait()
        answered = {path.name.removesuffix(".json") for path in (folder / "answers").glob("*.json")}
        assert {path.name for path in (folder / "done").iterdir()} <= answered
    process = subprocess.Popen([sys.executable, "-c", KILLED, folder, log])
    until(lambda: len(names(folder / "done")) == total, 30)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(list((folder / "answers").glob("*.json"))) == total
    assert waiting(folder) == []
    asked = log.read_text().split()
    # At most the batch under way at each kill was asked again.
    assert len(set(asked)) == total
    assert len(asked) - total <= kills * 2


def test_an_answer_that_a_killed_process_wrote_is_not_asked_for_again(tmp_path: Path) -> None:
    with watched(tmp_path, Model()):
        (tmp_path / "a.png").write_bytes(png(1))
        until(lambda: names(tmp_path / "done") == ["a.png"])
    (tmp_path / "done" / "a.png").rename(tmp_path / "a.png")  # as if it was killed before the move
    model = Model()
    with watched(tmp_path, model):
        until(lambda: names(tmp_path / "done") == ["a.png"])
    assert model.batches == []
