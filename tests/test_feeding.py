"""Batches made ready ahead: the same pixels in the same order, overlapped, and nothing left behind."""

import io
import json
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

import mergestream as ms
from conftest import CLASSES, make_images
from mergestream.data.datasets import file_source_of, lazy
from mergestream.data.datasets.jpeg import can_decode_on_gpu, is_plain_jpeg
from mergestream.data.datasets.lazy import FileDomain, decoding_threads, piece_size
from mergestream.data.feeding import Copying, _ahead, feed
from mergestream.data.pinned import PinnedRing
from mergestream.runtime.errors import DataError, InputError

PATIENCE = 20.0  # seconds until a test gives up


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pacs")
    file_source_of("pacs").write_standin(folder)
    return folder


@pytest.fixture(scope="module")
def decoded(root: Path) -> ms.DomainData:
    return ms.load_dataset("pacs", root, size=32)["photo"]


@pytest.fixture
def files(root: Path) -> FileDomain:
    domain = ms.load_dataset("pacs", root, size=32, lazy=True, workers=2)["photo"]
    assert isinstance(domain, FileDomain)
    return domain


@pytest.fixture(scope="module")
def numbered() -> ms.DomainData:
    """Every image is its own number."""
    images = torch.arange(60, dtype=torch.uint8)[:, None, None, None].expand(60, 3, 2, 2)
    return ms.DomainData("test", "here", CLASSES, images, torch.arange(60) % len(CLASSES))


class Watched(ms.DomainData):
    """A domain that is not in memory; every image passes through `decode` of its number first."""

    in_memory = False
    decoders = 1

    def pieces(self, positions: Sequence[int], out: Tensor) -> list[Callable[[], Any]]:
        return [partial(self._one, position, row) for position, row in zip(positions, out, strict=True)]

    def _one(self, position: int, row: Tensor) -> None:
        vars(self)["decode"](position)
        row.copy_(self.images[position])


def watched(data: ms.DomainData, decode: Callable[[int], object]) -> Watched:
    domain = Watched(data.dataset, data.name, data.classes, data.images, data.labels)
    vars(domain)["decode"] = decode
    return domain


def split(count: int, size: int) -> list[Tensor]:
    return list(torch.arange(count).split(size))


# --- the same pixels, in order ----------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["iid", "dirichlet:0.05", "iid reversed", "in order"])
@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_fed_batches_are_the_datas_own(files: FileDomain, decoded: ms.DomainData, spec: str, ahead: int) -> None:
    if spec == "in order":
        batches = list(ms.streams.in_order(len(decoded), 5))
    else:
        batches = list(ms.streams.create_stream(spec.split()[0], decoded.labels, batch_size=5, seed=1))
        batches = batches[::-1] if "reversed" in spec else batches
    for data in (files, decoded):
        fed = list(feed(data, batches, "cpu", ahead=ahead))
        assert len(fed) == len(batches)
        for images, indices in zip(fed, batches, strict=True):
            assert torch.equal(images, decoded.batch(torch.as_tensor(indices)))


def test_few_batches_none_and_empty_ones(files: FileDomain, numbered: ms.DomainData) -> None:
    assert list(feed(files, [], "cpu")) == []
    (one,) = feed(files, [torch.tensor([3])], "cpu", ahead=4)
    assert torch.equal(one, files.batch(torch.tensor([3])))
    (empty,) = feed(files, [torch.tensor([], dtype=torch.long)], "cpu")
    assert empty.shape == (0, 3, 32, 32)
    mask = torch.arange(60) % 7 == 0
    (some,) = feed(watched(numbered, lambda _: None), [mask], "cpu")
    assert torch.equal(some, numbered.batch(mask))


def test_batches_stay_the_callers(files: FileDomain) -> None:
    """Memory is used again on a GPU's way only: what was handed out on a CPU is not written to."""
    fed = list(feed(files, [torch.tensor([n]) for n in range(8)], "cpu"))
    assert len({images.data_ptr() for images in fed}) == 8


def test_what_lies_in_memory_is_handed_over_without_a_thread(numbered: ms.DomainData) -> None:
    before = threading.active_count()
    fed = feed(numbered, split(60, 8), "cpu")
    next(fed)
    assert threading.active_count() == before
    fed.close()


def test_a_caller_in_inference_mode(files: FileDomain) -> None:
    with torch.inference_mode():
        fed = list(feed(files, split(len(files), 6), "cpu"))
    assert torch.equal(torch.cat(fed), files.images)


@pytest.mark.parametrize("ahead", [0, -1, 1.5, "2"])
def test_ahead_is_a_whole_number(numbered: ms.DomainData, ahead: Any) -> None:
    with pytest.raises(InputError, match="ahead"):
        feed(numbered, [], "cpu", ahead=ahead)


# --- overlap ----------------------------------------------------------------------------------------------------


def test_batches_ahead_are_decoded_while_the_caller_works(numbered: ms.DomainData) -> None:
    begun = [threading.Event() for _ in range(60)]
    fed = feed(watched(numbered, lambda n: begun[n].set()), split(60, 10), "cpu", ahead=2)
    next(fed)  # the caller now works on batch 0 and asks for nothing
    assert all(event.wait(PATIENCE) for event in begun[:30])
    assert not any(event.is_set() for event in begun[30:])
    fed.close()


def test_the_caller_gets_a_batch_while_the_next_is_still_decoded(numbered: ms.DomainData) -> None:
    gate = threading.Event()
    fed = feed(watched(numbered, lambda n: n < 10 or gate.wait(PATIENCE)), split(60, 10), "cpu", ahead=2)
    assert next(fed)[:, 0, 0, 0].tolist() == list(range(10))  # batch 1 waits for the gate all this time
    gate.set()
    assert next(fed)[:, 0, 0, 0].tolist() == list(range(10, 20))
    fed.close()


def test_images_of_one_batch_are_decoded_side_by_side(numbered: ms.DomainData, monkeypatch: Any) -> None:
    together = threading.Barrier(3)
    monkeypatch.setattr(Watched, "decoders", 3)
    data = watched(numbered, lambda _: together.wait(PATIENCE))  # breaks unless three threads meet
    (images,) = feed(data, [torch.arange(6)], "cpu")
    assert images[:, 0, 0, 0].tolist() == list(range(6))


def test_as_many_decoders_as_cores_and_one_where_torch_is_held_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy.os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert decoding_threads() == 6
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # OMP_NUM_THREADS=1, and bench's workers
    assert decoding_threads() == 1
    assert decoding_threads(5) == 5


def test_decoders_keep_to_one_core_and_nobody_else_has_to(numbered: ms.DomainData, monkeypatch: Any) -> None:
    """Else sixteen decoders have sixteen helpers each, for every copy of an image."""
    monkeypatch.setattr(Watched, "decoders", 3)
    together, seen = threading.Barrier(3), []

    def decode(_: int) -> None:
        together.wait(PATIENCE)
        seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        list(feed(watched(numbered, decode), [torch.arange(6)], "cpu"))
        elsewhere: list[int] = []
        thread = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (seen, elsewhere, torch.get_num_threads()) == ([1] * 6, [5], 5)
    finally:
        torch.set_num_threads(before)


# --- what goes wrong --------------------------------------------------------------------------------------------


def test_an_error_comes_at_its_batch_with_its_own_traceback(numbered: ms.DomainData) -> None:
    def fail(position: int) -> None:
        if position in (23, 27):
            raise OSError(f"no image {position}")

    fed = feed(watched(numbered, fail), split(60, 10), "cpu", ahead=3)
    next(fed), next(fed)
    with pytest.raises(OSError, match="no image 23") as caught:
        next(fed)
    assert "fail" in [frame.name for frame in traceback.extract_tb(caught.tb)]


def test_a_damaged_file_is_named(root: Path, tmp_path: Path) -> None:
    file_source_of("pacs").write_standin(tmp_path)
    data = ms.load_dataset("pacs", tmp_path, size=32, lazy=True)["photo"]
    name = data.ids[9].removeprefix("photo/")
    (tmp_path / "kfold" / "photo" / name).write_bytes(b"\xff\xd8\xff damaged")
    fed = feed(data, split(len(data), 4), "cpu")
    next(fed), next(fed)
    with pytest.raises(DataError, match=f"{name}.*skip_bad"):
        next(fed)


def test_an_index_outside_the_data_comes_at_its_batch(files: FileDomain) -> None:
    fed = feed(files, [torch.tensor([0]), torch.tensor([10_000])], "cpu")
    next(fed)
    with pytest.raises(IndexError):
        next(fed)


@pytest.mark.parametrize("way", ["break", "raise", "close", "forgotten"])
def test_whoever_leaves_early_leaves_no_thread(numbered: ms.DomainData, way: str) -> None:
    decoded = []
    gate = threading.Event()

    def decode(position: int) -> None:
        decoded.append(position)
        if position >= 10:
            gate.wait(0.2)

    fed = feed(watched(numbered, decode), split(60, 10), "cpu", ahead=4)
    if way == "break":
        for _ in fed:
            break
        fed.close()
    elif way == "raise":
        with pytest.raises(KeyError):
            _raise_at_the_first(fed)
        fed.close()
    else:
        next(fed)
        if way == "close":
            fed.close()
    del fed
    assert len(decoded) <= 12  # the image under way, not the 50 that were asked for


def _raise_at_the_first(fed: Iterator[Tensor]) -> None:
    for _ in fed:
        raise KeyError


def test_a_generator_that_was_never_begun(numbered: ms.DomainData) -> None:
    feed(watched(numbered, lambda _: None), split(60, 10), "cpu").close()


# --- pinned memory, on a device that is slow to copy -------------------------------------------------------------


class LateCopies:
    """A device that copies at the last moment: when the host waits for it. Until then its memory holds 255."""

    def __init__(self) -> None:
        self.late: list[tuple[Tensor, Tensor]] = []
        self.pinned_shapes: list[tuple[int, ...]] = []
        self.waits = 0

    def pinned(self, shape: tuple[int, ...]) -> Tensor:
        self.pinned_shapes.append(shape)
        return torch.empty(shape, dtype=torch.uint8)

    def send(self, host: Tensor) -> tuple[Tensor, "LateEvent"]:
        images = torch.full_like(host, 255)
        self.late.append((images, host))
        return images, LateEvent(self, len(self.late))

    def receive(self, images: Tensor, copied: "LateEvent") -> Tensor:
        return images

    def here(self) -> "LateEvent":
        return LateEvent(self, 0)

    def run(self, until: int) -> None:
        for place, (images, host) in enumerate(self.late[:until]):
            images.copy_(host)
            self.late[place] = (images, images)


class LateEvent:
    def __init__(self, device: LateCopies, until: int) -> None:
        self._device, self._until = device, until

    def synchronize(self) -> None:
        self._device.waits += 1
        self._device.run(self._until)


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=14),
    ahead=st.integers(1, 4),
    eager=st.lists(st.booleans(), min_size=14, max_size=14),
)
def test_pinned_memory_is_not_overwritten_before_it_is_copied(
    numbered: ms.DomainData, sizes: list[int], ahead: int, eager: list[bool]
) -> None:
    device, taken = LateCopies(), []
    batches = [
        torch.randint(0, 60, (size,), generator=torch.Generator().manual_seed(n)) for n, size in enumerate(sizes)
    ]
    for images, soon in zip(_ahead(Copying(numbered, device, ahead), batches, ahead), eager[: len(sizes)], strict=True):
        taken.append(images)
        if soon:
            device.run(len(device.late))
    device.run(len(device.late))
    assert len(taken) == len(batches)
    for images, indices in zip(taken, batches, strict=True):
        assert torch.equal(images, numbered.batch(indices))


def test_pinned_memory_is_used_in_turn(numbered: ms.DomainData) -> None:
    device = LateCopies()
    sizes = [len(images) for images in _ahead(Copying(numbered, device, 2), split(60, 7), 2)]
    assert sizes == [7] * 8 + [4]
    assert device.pinned_shapes == [(7, 3, 2, 2)] * 4  # the last, smaller batch lies in a larger slot


def test_a_ring_waits_for_the_copy_and_grows_where_a_batch_is_larger() -> None:
    device = LateCopies()
    ring = PinnedRing(2, (3, 1, 1), device)
    first, second = ring.take(2), ring.take(2)
    assert device.waits == 0
    for slot in (first, second):
        _, slot.copied = device.send(slot.memory)
    assert ring.take(1) is first
    assert device.waits == 1
    again = ring.take(5)
    assert again is second
    assert len(again.memory) == 5
    with pytest.raises(AssertionError, match="not sent"):
        ring.take(1)


def test_an_error_behind_a_batch_does_not_come_before_it_on_the_way_to_a_device(numbered: ms.DomainData) -> None:
    """Batches that are decoded are sent ahead of their turn; one that failed is not looked at before it."""
    failed = threading.Event()

    def fail(position: int) -> None:
        if position == 10:
            failed.set()
            raise OSError("no image 10")

    fed = _ahead(Copying(watched(numbered, fail), LateCopies(), 2), split(60, 5), 2)
    next(fed)
    assert failed.wait(PATIENCE)
    next(fed)
    with pytest.raises(OSError, match="no image 10"):
        next(fed)


def test_the_host_does_not_run_far_ahead_of_the_device(numbered: ms.DomainData) -> None:
    device = LateCopies()
    marks: list[int] = []
    device.here = lambda: Mark(marks)  # type: ignore[method-assign]
    for number, _ in enumerate(_ahead(Copying(numbered, device, 2), split(60, 5), 2)):
        assert len(marks) == max(0, number - 2)  # having asked for batch t, batch t-4 has been worked on


class Mark:
    def __init__(self, waited: list[int]) -> None:
        self._waited = waited

    def synchronize(self) -> None:
        self._waited.append(1)


# --- domains whose images stay files ----------------------------------------------------------------------------


def test_a_lazy_domain_is_the_decoded_one(files: FileDomain, decoded: ms.DomainData) -> None:
    picked = torch.tensor([5, 2, 2, 11])
    assert torch.equal(files.batch(picked), decoded.batch(picked))
    assert files.shape == decoded.shape
    assert files.fingerprint() == decoded.fingerprint()
    assert not files.in_memory
    part = files.subset(picked[:2])
    assert isinstance(part, FileDomain)
    assert not part.in_memory
    assert part.fingerprint() == decoded.subset(picked[:2]).fingerprint()
    assert part.ids == decoded.subset(picked[:2]).ids
    assert torch.equal(files.images, decoded.images)
    assert files.in_memory  # from now on
    assert torch.equal(files.batch(picked), decoded.batch(picked))
    renamed = replace(files, name="elsewhere")
    assert torch.equal(renamed.images, decoded.images)
    assert torch.equal(ms.concatenate([files, part])[0].images[-2:], decoded.batch(picked[:2]))


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize("workers", [1, 5])
def test_pictures_of_all_sizes_and_kinds_have_the_bits_of_their_own(
    tmp_path: Path, interpolation: str, workers: int
) -> None:
    """A thread resizes neighbours of one size together; WebP's pixels lie otherwise than PNG's."""
    random = np.random.RandomState(0)
    for number in range(24):
        size = ((20, 31, 3), (20, 31, 3), (40, 16, 3))[random.randint(3)]
        folder = tmp_path / "photo" / ("dog", "cat")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        kind = ("webp", "png")[random.randint(2)]
        Image.fromarray(random.randint(0, 256, size, dtype=np.uint8)).save(folder / f"{number:02}.{kind}", quality=90)
    options: dict[str, Any] = {"size": 23, "interpolation": interpolation, "workers": workers}
    here, there = (ms.load_dataset("folder", tmp_path, lazy=lazy, **options)["photo"] for lazy in (False, True))
    assert torch.equal(torch.cat(list(feed(there, split(24, 11), "cpu"))), here.images)


@pytest.mark.parametrize(("images", "threads", "size"), [(32, 16, 4), (32, 2, 8), (3, 16, 1), (0, 1, 1), (32, 64, 1)])
def test_a_piece_of_a_batch_leaves_work_for_every_thread(images: int, threads: int, size: int) -> None:
    assert piece_size(images, threads) == size


def test_rows_of_an_array_stay_there_too(tmp_path: Path) -> None:
    file_source_of("organ_mnist").write_standin(tmp_path)
    here, there = (ms.load_dataset("organ_mnist", tmp_path, size=16, lazy=lazy) for lazy in (False, True))
    for name in here.domains:
        fed = list(feed(there[name], split(len(here[name]), 3), "cpu"))
        assert torch.equal(torch.cat(fed), here[name].images)


def test_choices_that_make_no_sense_are_refused(root: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="lazy=True"):
        ms.load_dataset("pacs", root, decode_on="cuda")
    with pytest.raises(InputError, match="cache_folder"):
        ms.load_dataset("pacs", root, lazy=True, cache_folder=tmp_path)
    with pytest.raises(ms.MergestreamError, match="decode_on"):
        ms.load_dataset("pacs", root, lazy=True, decode_on="tpu")


# --- evaluation -------------------------------------------------------------------------------------------------


def test_a_run_from_files_is_the_run_from_memory(vit_pool: ms.ExpertPool, tmp_path: Path) -> None:
    labels = torch.arange(23) % len(CLASSES)
    eager, from_files = _two_domains(vit_pool, tmp_path, make_images(23), labels)
    method = ms.create_method("entropy_adaptive", vit_pool)
    stream = ms.streams.create_stream("iid", labels, batch_size=5, seed=0)
    runs = [ms.evaluate(method, data, stream) for data in (eager, from_files)]
    assert runs[0].arguments == runs[1].arguments
    assert torch.equal(torch.as_tensor(runs[0].probabilities), torch.as_tensor(runs[1].probabilities))


def _two_domains(pool: ms.ExpertPool, folder: Path, images: Tensor, labels: Tensor) -> list[ms.DomainData]:
    """From memory and from files, with the pool's order of classes."""
    here, there = _two_domains_of(folder, images, labels, size=pool.preprocessing.size)
    return [replace(here, classes=pool.classes), _with_classes(there, pool.classes)]


def _two_domains_of(folder: Path, images: Tensor, labels: Tensor, size: Any) -> list[ms.DomainData]:
    for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        path = folder / "here" / CLASSES[label] / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return [ms.load_dataset("folder", folder, size=size, lazy=lazy)["here"] for lazy in (False, True)]


def _with_classes(data: ms.DomainData, classes: tuple[str, ...]) -> ms.DomainData:
    assert isinstance(data, FileDomain)
    known = {name: getattr(data, name) for name in ("labels", "acquired", "ids", "groups", "subgroups")}
    return FileDomain(data.dataset, data.name, classes, data.files, **known)


def test_an_evaluation_that_fails_leaves_no_thread(vit_pool: ms.ExpertPool, tmp_path: Path) -> None:
    def fail() -> None:
        raise KeyError("the caller's own")

    labels = torch.arange(23) % len(CLASSES)
    _, from_files = _two_domains(vit_pool, tmp_path, make_images(23), labels)
    method = ms.create_method("mean", vit_pool)
    with pytest.raises(KeyError):
        ms.evaluate(method, from_files, split(23, 3), on_step=fail)


def test_the_benchmark_times_both_ways(root: Path, tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "pacs_stream.py"
    network = ["--network", "vit_tiny_patch16_224", "--arg", "img_size=32", "--arg", "depth=1", "--arg", "embed_dim=48"]
    options = [
        "--root",
        str(root),
        *network,
        "--device",
        "cpu",
        "--repeats",
        "1",
        "--json",
        str(tmp_path / "found.json"),
    ]
    subprocess.run([sys.executable, str(script), *options], check=True, capture_output=True)
    found = json.loads((tmp_path / "found.json").read_text())
    for way in ("memory", "files"):
        assert found[way]["images"] == 4 * 28
        assert found[way]["batches"] == 4
        (timed,) = found[way]["timings"]
        assert set(timed) == {"art_painting", "cartoon", "photo", "sketch"}
        assert found[way]["seconds"] == pytest.approx(sum(timed.values()), abs=1e-3)
    assert str(root) not in (tmp_path / "found.json").read_text()
    assert {"commit", "command", "machine"} <= set(found)


# --- JPEG on a GPU ----------------------------------------------------------------------------------------------


def jpeg(mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    noise = torch.randint(0, 256, (24, 24, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).numpy()
    Image.fromarray(noise, "RGBA").convert("RGB").convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


def test_only_grey_and_rgb_jpegs_are_for_the_gpu(tmp_path: Path) -> None:
    assert is_plain_jpeg(jpeg())
    assert is_plain_jpeg(jpeg("L"))
    assert is_plain_jpeg(jpeg(progressive=True))
    assert not is_plain_jpeg(jpeg("CMYK"))
    assert not is_plain_jpeg(b"\xff\xd8\xff damaged")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    assert not is_plain_jpeg((tmp_path / "a.png").read_bytes())


def test_a_gpu_is_given_bytes_of_jpegs_and_pixels_of_all_else(files: FileDomain, tmp_path: Path) -> None:
    assert isinstance(files.files.for_gpu(0), bytes)
    here, there = _two_domains_of(tmp_path, make_images(5), torch.arange(5), size=16)
    assert torch.equal(there.files.for_gpu(2), here.images[2])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_cpu_decodes_and_it_is_said_once(
    root: Path, decoded: ms.DomainData, caplog: pytest.LogCaptureFixture
) -> None:
    can_decode_on_gpu.cache_clear()
    data = ms.load_dataset("pacs", root, size=32, lazy=True, decode_on="cuda")
    (images,) = feed(data["photo"], [torch.arange(4)], "cpu")
    assert torch.equal(images, decoded.images[:4])
    assert data["sketch"].fingerprint() == ms.load_dataset("pacs", root, size=32)["sketch"].fingerprint()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "CPU decodes" in caplog.text


# --- on a GPU ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    def test_fed_batches_are_the_datas_own(self, files: FileDomain, decoded: ms.DomainData) -> None:
        batches = list(ms.streams.create_stream("iid", decoded.labels, batch_size=5, seed=1)) * 20
        for data in (files, decoded):
            for images, indices in zip(list(feed(data, batches, "cuda")), batches, strict=True):
                assert images.is_cuda
                assert torch.equal(images.cpu(), decoded.batch(torch.as_tensor(indices)))

    def test_a_late_reader_finds_its_batch(self) -> None:
        """The device is kept busy while memory is handed out again: no batch may be overwritten before it is read."""
        images = torch.randint(0, 256, (640, 3, 64, 64), dtype=torch.uint8)
        data = ms.DomainData("test", "here", CLASSES, images, torch.zeros(640, dtype=torch.long))
        sums, batches = [], split(640, 8)
        for batch in feed(data, batches, "cuda"):
            torch.cuda._sleep(2_000_000)
            sums.append(batch.sum(dtype=torch.long))
        assert [int(each) for each in sums] == [int(images[b].sum(dtype=torch.long)) for b in batches]

    def test_the_host_waits_for_nothing(self, decoded: ms.DomainData, files: FileDomain) -> None:
        batches = split(len(decoded), 4) * 40
        list(feed(decoded, batches[:8], "cuda"))
        torch.cuda.set_sync_debug_mode("error")
        try:
            for data in (decoded, files):
                for images in feed(data, batches, "cuda"):
                    images.float().mean()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_a_graph_may_be_captured_meanwhile(self, files: FileDomain) -> None:
        batches = split(len(files), 4) * 10
        shown = torch.zeros(4, 3, 32, 32, dtype=torch.uint8, device="cuda")
        for number, images in enumerate(feed(files, batches, "cuda")):
            if number in (1, 5):
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    total = shown.float().sum()
            shown.copy_(images)
            if number >= 1:
                graph.replay()
                assert float(total) == float(images.float().sum())

    def test_memory_of_a_long_stream_is_that_of_a_few_batches(self) -> None:
        images = torch.zeros(64, 3, 224, 224, dtype=torch.uint8)
        data = ms.DomainData("test", "here", CLASSES, images, torch.zeros(64, dtype=torch.long))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in feed(data, split(64, 32) * 60, "cuda"):
            torch.cuda._sleep(1_000_000)
        grown = torch.cuda.max_memory_allocated() - before
        assert grown <= 10 * 32 * 3 * 224 * 224

    def test_jpegs_decoded_there_are_nearly_the_cpus(self, root: Path, decoded: ms.DomainData) -> None:
        if not can_decode_on_gpu():
            pytest.skip("this build has no nvJPEG")
        data = ms.load_dataset("pacs", root, size=32, lazy=True, decode_on="cuda")["photo"]
        batches = split(len(data), 5)
        for device in ("cuda", "cpu"):
            fed = list(feed(data, batches, device))
            assert {images.device.type for images in fed} == {device}
            assert torch.equal(torch.cat(fed).cpu(), data.batch(torch.arange(len(data))))
        apart = (torch.cat(fed).int() - decoded.images.int()).abs()
        print(f"nvJPEG against libjpeg: mean {apart.float().mean():.3f}, most {int(apart.max())} of 255")  # noqa: T201
        assert float(apart.float().mean()) < 3
        assert data.fingerprint() != decoded.fingerprint()
