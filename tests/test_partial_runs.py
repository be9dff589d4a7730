"""A run that is killed in the middle goes on from what was written, for every method, to the same bits."""

from pathlib import Path

import pytest
import torch

import mergestream as ms
from conftest import CLASSES, make_images
from mergestream.methods import METHODS
from mergestream.runtime.state_file import SavedState


class Killed(Exception):
    """Stands for kill -9: nothing after it runs."""


@pytest.fixture(scope="module")
def data() -> ms.DomainData:
    images = make_images(30)
    return ms.DomainData("test", "nice", CLASSES, images, torch.arange(30) % len(CLASSES))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "single_expert"])
def test_it_goes_on(name: str, vit_pool: ms.ExpertPool, data: ms.DomainData, tmp_path: Path) -> None:
    stream = ms.streams.iid(data.labels, batch_size=5)
    options = {"momentum": 0.7} if name == "entropy_adaptive" else {}
    if name in ("fisher", "regmean", "regmean_pp"):
        options = {"statistics": "target"}
    whole = ms.evaluate(ms.create_method(name, vit_pool, **options), data, stream)
    taken: list[int] = []

    def tick() -> None:
        taken.append(1)
        if len(taken) == 3:
            raise Killed

    partial = SavedState(tmp_path / "partial")
    with pytest.raises(Killed):
        ms.evaluate(ms.create_method(name, vit_pool, **options), data, stream, partial=partial, on_step=tick)
    again = ms.create_method(name, vit_pool, **options)
    resumed = ms.evaluate(
        again, data, stream, partial=SavedState(tmp_path / "partial", seconds=20), on_step=lambda: taken.append(1)
    )
    assert len(taken) == len(stream)  # three before, three after: none twice
    assert torch.equal(resumed.probabilities, whole.probabilities)
    for one, other in zip(resumed.steps, whole.steps, strict=True):
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


@pytest.mark.parametrize("damage", ["torn", "foreign", "empty"])
def test_what_is_not_sound_is_begun_again(damage: str, vit_pool: ms.ExpertPool, data, tmp_path: Path) -> None:
    stream = ms.streams.iid(data.labels, batch_size=5)
    path = tmp_path / "partial"
    method = ms.create_method("entropy_adaptive", vit_pool, momentum=0.5)
    ms.evaluate(method, data, stream, partial=SavedState(path))
    whole = path.read_bytes()
    path.write_bytes({"torn": whole[: len(whole) // 2], "foreign": b"hello", "empty": b""}[damage])
    taken: list[int] = []
    run = ms.evaluate(method, data, stream, partial=SavedState(path, seconds=20), on_step=lambda: taken.append(1))
    assert len(taken) == len(stream)
    assert torch.equal(run.probabilities, ms.evaluate(method, data, stream).probabilities)
