"""Rows on their way to a device: the order of copies and uses, sums of rows that come one by one, pinned memory."""

import gc
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mergestream.functional import merging
from mergestream.pool import staging
from mergestream.pool.staging import CudaLane, RunningSum, Staging
from mergestream.runtime.errors import InputError, PoolError


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@st.composite
def banks(draw: st.DrawFn) -> tuple[Tensor, list[float]]:
    """Rows [K,P] with zeros of both signs, and any coefficients, some of them 0."""
    count, size = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    numbers = st.one_of(st.just(0.0), st.just(-0.0), st.floats(-1e3, 1e3, width=16))
    rows = torch.tensor([draw(st.lists(numbers, min_size=size, max_size=size)) for _ in range(count)])
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    shares = st.one_of(st.just(0.0), st.just(1.0), st.floats(-2, 2, width=32))
    return rows.to(dtype), draw(st.lists(shares, min_size=count, max_size=count))


@given(banks(), st.sampled_from([None, torch.float32]))
def test_a_running_sum_is_the_weighted_sum_bit_for_bit(given_: tuple[Tensor, list[float]], wide: torch.dtype) -> None:
    rows, shares = given_
    streamed, whole = (torch.full((rows.shape[1],), 7.0, dtype=wide or rows.dtype) for _ in range(2))
    total = RunningSum(streamed, rows.dtype)
    for row, share in zip(rows, shares, strict=True):
        total.add(row, share)
    total.finish()
    assert torch.equal(bits(streamed), bits(merging.weighted_sum(rows, shares, whole)))


# --- in which order -----------------------------------------------------------------------------------------


class Simulated:
    """Two queues that run when they like, copies and computing; a task waits for its moments and nothing else."""

    def __init__(self, choose) -> None:
        self._choose, self._queues = choose, {"copies": [], "computing": []}
        self._done: set[object] = set()

    def _put(self, queue: str, task, after: object) -> object:
        moment = object()
        self._queues[queue].append((task, after, moment))
        return moment

    def copy(self, target: Tensor, source: Tensor, after: object) -> object:
        return self._put("copies", lambda: target.copy_(source), after)

    def wait(self, moment: object) -> None:
        self._put("computing", lambda: None, moment)

    def mark(self) -> object:
        return self._put("computing", lambda: None, None)

    def compute(self, task) -> None:
        self._put("computing", task, None)

    def run_some(self, at_most: int) -> None:
        for _ in range(at_most):
            ready = [q for q in self._queues.values() if q and (q[0][1] is None or q[0][1] in self._done)]
            if not ready:
                return
            task, _, moment = ready[self._choose(len(ready))].pop(0)
            task()
            self._done.add(moment)

    def finish(self) -> None:
        self.run_some(sum(map(len, self._queues.values())))
        assert not any(self._queues.values()), "nothing may wait for ever"


walks = st.lists(st.lists(st.integers(0, 5), unique=True, max_size=6), min_size=1, max_size=4)


@given(walks, st.integers(1, 6), st.data())
def test_a_row_is_read_after_it_came_and_before_the_next_comes(walk: list[list[int]], count: int, data) -> None:
    """However the device shuffles two queues, each use of a slot sees the expert that was asked for."""
    lane = Simulated(lambda ready: data.draw(st.integers(0, ready - 1)))
    bank = torch.arange(float(count))[:, None].expand(count, 4).contiguous()
    stage = Staging(bank, torch.device("cpu"), lane)
    seen: list[tuple[int, list[float]]] = []

    def use(expert: int, slot: int) -> None:
        lane.compute(lambda: seen.append((expert, stage.rows[slot].tolist())))
        lane.run_some(data.draw(st.integers(0, 3)))
        if data.draw(st.integers(0, 9)) == 0:
            raise InputError("a batch that is refused in the middle")

    asked = 0
    for experts in walk:
        try:
            asked += len(stage.map([k for k in experts if k < count], use))
        except InputError:
            asked += 0
    lane.finish()
    assert len(seen) >= asked
    assert all(row == [float(expert)] * 4 for expert, row in seen)


@pytest.mark.parametrize("missing", ["for the row", "for its reader"])
def test_the_simulation_finds_a_missing_wait(missing: str) -> None:
    lane = Simulated(lambda ready: ready - 1 if missing == "for the row" else 0)
    if missing == "for the row":
        lane.wait = lambda moment: None
    else:
        copy = lane.copy
        lane.copy = lambda target, source, after: copy(target, source, None)
    stage = Staging(torch.tensor([[1.0], [2.0], [3.0]]), torch.device("cpu"), lane)
    seen: list[float] = []
    stage.map([0, 1, 2], lambda expert, slot: lane.compute(lambda: seen.append(float(stage.rows[slot]))))
    lane.finish()
    assert seen != [1.0, 2.0, 3.0]


def test_the_next_row_is_asked_for_before_this_one_computes() -> None:
    asked: list[str] = []
    lane = SimpleNamespace(
        copy=lambda target, source, after: asked.append(f"copy {int(source)}"),
        wait=lambda moment: None,
        mark=lambda: None,
    )
    stage = Staging(torch.arange(4.0)[:, None], torch.device("cpu"), lane)
    stage.map([0, 1, 3], lambda expert, slot: asked.append(f"use {expert}"))
    assert asked == ["copy 0", "copy 1", "use 0", "copy 3", "use 1", "use 3"]


# --- pinned memory ------------------------------------------------------------------------------------------


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the driver was asked to pin, by address; the real one needs a GPU."""
    held: dict[int, int] = {}
    found = SimpleNamespace(held=held, error=0)

    def register(place: int, size: int, flags: int) -> int:
        assert place not in held
        assert flags == 1
        held[place] = size
        return found.error

    fake = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda place: held.pop(place))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(staging, "LEAST_PINNED", 16)
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: tensor.untyped_storage().data_ptr() in held)
    return found


def test_memory_is_pinned_once_and_until_the_last_one_lets_go(driver: SimpleNamespace) -> None:
    bank = torch.zeros(4, 3)
    place = bank.data_ptr()
    first, second = staging.pinned(bank), staging.pinned(bank[2:])
    assert first is second
    assert driver.held == {place: bank.nbytes}
    del first, bank
    gc.collect()
    assert driver.held  # and the memory with it: the second one holds both
    del second
    gc.collect()
    assert not driver.held


def test_memory_that_others_pinned_is_left_to_them(driver: SimpleNamespace) -> None:
    bank = torch.zeros(4)
    driver.held[bank.data_ptr()] = 0
    assert staging.pinned(bank) is None


def test_memory_that_may_share_its_pages_is_not_pinned(driver: SimpleNamespace) -> None:
    assert staging.pinned(torch.zeros(3)) is None
    assert not driver.held


def test_a_driver_that_refuses_is_reported(driver: SimpleNamespace) -> None:
    driver.error = 2
    with pytest.raises(PoolError, match=r"would not pin 0\.0 GiB .* locked memory"):
        staging.pinned(torch.zeros(4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rows_of_millions_survive_the_race_on_a_gpu(dtype: torch.dtype) -> None:
    """Rows large enough that copies and kernels truly overlap; sums of whole numbers are exact in any order."""
    bank = torch.arange(1.0, 17.0, dtype=dtype)[:, None].repeat(1, 20_000_000)
    stage = Staging(bank, torch.device("cuda"))
    assert isinstance(stage._lane, CudaLane)
    order, rows = [*range(16), *range(14, 0, -1)] * 4, stage.rows
    seen = stage.map(order, lambda _, slot: torch.stack([rows[slot].amin(), rows[slot].amax()]))
    wanted = torch.tensor([[expert + 1.0] * 2 for expert in order], dtype=dtype)
    assert torch.equal(torch.stack(seen).cpu(), wanted)
    del stage
    gc.collect()
    assert not bank.is_pinned()
