"""`mergestream pool statistics`: every expert measured on its own training images, for every leave-one-out pool."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

import mergestream as ms
from benching import SITES, command, write_consortium
from mergestream.data.datasets import DataRequest, open_data
from mergestream.pool.checkpoint import SIGNATURE
from mergestream.pool.statistics.measurement import KINDS
from mergestream.runtime import devices
from mergestream.runtime.errors import InputError, PoolError
from mergestream.training import pool_statistics
from mergestream.training.pool_statistics import measure_pool
from mergestream.training.training_loop import split_of

RECIPE = {"seed": 3, "split_seed": 5, "validation_share": 0.4}
COUNTS = {"gram": 5, "fisher_mergelm": 4, "gram_pp": 6}


@pytest.fixture
def consortium(tmp_path: Path) -> Path:
    write_consortium(tmp_path)
    for site in SITES:  # as if they had been trained
        card = tmp_path / "pool" / site / "expert.json"
        card.write_text(json.dumps({**json.loads(card.read_text()), "recipe": RECIPE}))
        (tmp_path / "pool" / site / "statistics.safetensors").unlink()
    return tmp_path


def measure(folder: Path, images: dict[str, int] = COUNTS, **options: object) -> dict[str, dict[str, int]]:
    request = DataRequest("table", str(folder / "data"))
    return measure_pool(folder / "pool", request, folder / "work", images, "cpu", **options)


def arguments(folder: Path, *more: str) -> tuple[str, ...]:
    return ("pool", "statistics", str(folder / "pool"), "--dataset", "table", "--root", str(folder / "data"), *more)


def test_the_command_measures_all_that_the_paper_needs_for_every_leave_one_out_pool(consortium: Path) -> None:
    counts = ("--gram", "5", "--fisher", "4", "--gram-pp", "6", "--device", "cpu")
    done = command(*arguments(consortium, *counts))
    assert done.returncode == 0, done.stderr
    for site in SITES:
        assert f"{site}: gram (5 images), fisher_mergelm (4 images), gram_pp for 2 pools (6 images)" in done.stdout
    pool, batch = ms.ExpertPool.load(consortium / "pool"), torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    for site in SITES:
        rest = pool.without(site)
        for name, options in (("regmean", {}), ("fisher", {"fisher": "mergelm"}), ("regmean_pp", {})):
            assert torch.isfinite(ms.create_method(name, rest, **options)(batch)).all()
    with pytest.raises(PoolError, match="another pool"):
        ms.create_method("regmean_pp", pool)
    assert command(*arguments(consortium, *counts[4:], "--leave-out", "none")).returncode == 0
    assert torch.isfinite(ms.create_method("regmean_pp", ms.ExpertPool.load(consortium / "pool"))(batch)).all()


def test_each_expert_is_measured_on_the_first_images_of_its_own_training_split(consortium: Path) -> None:
    measure(consortium, {"gram": 5, "fisher_exact": 1000})
    pool = ms.ExpertPool.load(consortium / "pool")
    dataset = open_data(DataRequest("table", str(consortium / "data")), pool.preprocessing, consortium / "work")
    for site, own in zip(pool.names, pool.statistics, strict=True):
        training, validation = split_of(dataset[site], RECIPE)
        assert own.images == {"gram": 5, "fisher_exact": len(training)}
        assert len(validation) > 0
        expected = ms.measure_statistics(pool, {site: dataset[site].batch(training[:5])}, ["gram"])
        for name, gram in expected.statistics_of(pool.index(site)).of("gram"):
            assert torch.equal(own.tensors[f"gram/{name}"], gram)


def test_regmean_pp_is_measured_for_the_pools_that_are_named(consortium: Path) -> None:
    first, second, third = SITES
    measure(consortium, {"gram_pp": 6}, leave_out=(f"{first}+{second}", third, third))
    pool = ms.ExpertPool.load(consortium / "pool")
    for absent, possible in (((first, second), True), ((third,), True), ((first,), False)):
        if possible:
            ms.create_method("regmean_pp", pool.without(*absent))
        else:
            with pytest.raises(PoolError, match="another pool"):
                ms.create_method("regmean_pp", pool.without(*absent))
    with pytest.raises(ms.MergestreamError, match="atlantis"):
        measure(consortium, {"gram_pp": 6}, leave_out=("atlantis",))
    with pytest.raises(PoolError, match="nothing is left"):
        measure(consortium, {"gram_pp": 6}, leave_out=("+".join(SITES),))


def test_nothing_is_measured_twice_and_other_kinds_are_kept(consortium: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure(consortium)
    before = {site: (consortium / "pool" / site / "statistics.safetensors").read_bytes() for site in SITES}
    calls: list[tuple[list[str], object]] = []
    original = pool_statistics.measure_statistics

    def counted(pool: ms.ExpertPool, images: dict[str, torch.Tensor], kinds: object, **options: object):
        calls.append((list(images), kinds))
        return original(pool, images, kinds, **options)

    monkeypatch.setattr(pool_statistics, "measure_statistics", counted)
    measure(consortium)
    assert not calls
    assert before == {site: (consortium / "pool" / site / "statistics.safetensors").read_bytes() for site in SITES}
    counts = measure(consortium, {"gram": 7}, experts=SITES[:1])
    assert calls == [([SITES[0]], ("gram",))]
    assert counts[SITES[0]]["gram"] == 7
    assert counts[SITES[0]]["fisher_mergelm"] == 4
    assert counts[SITES[1]]["gram"] == 5


def test_progress_counts_every_batch_of_every_block_once(consortium: Path) -> None:
    stages: dict[str, list[int]] = {}

    @contextmanager
    def track(title: str, total: int) -> Iterator[object]:
        stages[title] = [0, total]

        def advance(steps: int = 1, note: str = "") -> None:
            stages[title][0] += steps

        yield advance

    measure(consortium, track=track)
    assert len(stages) == 2 + len(SITES)
    assert [title for title, (done, total) in stages.items() if done != total] == []


def test_only_gram_matrices_take_larger_batches_on_a_gpu() -> None:
    pools = {kind: cast("ms.ExpertPool", SimpleNamespace(device=torch.device(kind))) for kind in ("cpu", "cuda")}
    sizes = {(kind, where): pool_statistics._batch_size(kind, pool) for kind in KINDS for where, pool in pools.items()}
    larger = {kind for (kind, where), size in sizes.items() if where == "cuda" and size > sizes[kind, "cpu"]}
    assert larger == {"gram", "gram_pp"}
    assert {size for (kind, _), size in sizes.items() if kind not in larger} == {32}


def test_a_killed_measurement_continues(consortium: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = pool_statistics.measure_statistics
    calls = []

    def killed(pool: ms.ExpertPool, images: dict[str, torch.Tensor], kinds: object, **options: object):
        calls.append(kinds)
        if kinds == ("gram_pp",):
            raise KeyboardInterrupt
        return original(pool, images, kinds, **options)

    monkeypatch.setattr(pool_statistics, "WRITE_AFTER_SECONDS", 0)
    monkeypatch.setattr(pool_statistics, "measure_statistics", killed)
    with pytest.raises(KeyboardInterrupt):
        measure(consortium)
    assert len(calls) == 7
    calls.clear()
    with pytest.raises(KeyboardInterrupt):
        measure(consortium)
    assert calls == [("gram_pp",)]


def test_a_signed_expert_is_refused_before_anything_is_measured(consortium: Path) -> None:
    (consortium / "pool" / SITES[1] / SIGNATURE).write_text("{}")
    with pytest.raises(PoolError, match=f"'{SITES[1]}' is signed"):
        measure(consortium)
    assert not (consortium / "pool" / SITES[0] / "statistics.safetensors").exists()


def test_wrong_usage_is_refused(consortium: Path) -> None:
    with pytest.raises(ms.MergestreamError, match="fisher_exakt"):
        measure(consortium, {"fisher_exakt": 3})
    with pytest.raises(ms.MergestreamError, match="atlantis"):
        measure(consortium, {"gram": 3}, experts=("atlantis",))
    assert command(*arguments(consortium, "--gram", "-3")).returncode == 2


def test_the_device_is_the_gpu_where_there_is_one(consortium: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    original = ms.ExpertPool.load

    def load(folder: Path, *, device: str) -> ms.ExpertPool:
        chosen.append(device)
        return original(folder)

    monkeypatch.setattr(pool_statistics.ExpertPool, "load", load)
    for available, device, expected in ((True, "auto", "cuda"), (True, "cpu", "cpu"), (False, "auto", "cpu")):
        monkeypatch.setattr(devices.torch.cuda, "is_available", lambda available=available: available)
        request = DataRequest("table", str(consortium / "data"))
        measure_pool(consortium / "pool", request, consortium / "work", {"gram": 2}, device)
        assert chosen[-1] == expected
    with pytest.raises(InputError, match="no CUDA device"):
        devices.resolve_device("cuda")
    with pytest.raises(InputError, match="auto, cpu or cuda"):
        devices.resolve_device("tpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_statistics_on_the_gpu_are_those_of_the_cpu(consortium: Path) -> None:
    every = {**COUNTS, "fisher_exact": 4}
    measure(consortium, every)
    on_cpu = {own: dict(each.tensors) for own, each in enumerate(ms.ExpertPool.load(consortium / "pool").statistics)}
    for site in SITES:
        (consortium / "pool" / site / "statistics.safetensors").unlink()
    request = DataRequest("table", str(consortium / "data"))
    measure_pool(consortium / "pool", request, consortium / "work", every, "cuda")
    for own, each in enumerate(ms.ExpertPool.load(consortium / "pool").statistics):
        assert set(each.tensors) == set(on_cpu[own])
        for key, tensor in on_cpu[own].items():
            torch.testing.assert_close(each.tensors[key], tensor, rtol=1e-3, atol=1e-5)
