"""DiWA's variants of the mean: which runs are averaged, and where they come from."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mergestream as ms
from conftest import CLASSES, NAMES, make_experts, make_images, make_pool, micro_resnet, micro_vit

RUNS = tuple(f"{site}-{number}" for site in NAMES for number in range(2))


def runs_pool() -> ms.ExpertPool:
    pool = ms.ExpertPool.from_modules(make_experts(micro_vit, RUNS, seed=3), classes=CLASSES)
    for name in RUNS:
        pool = pool.annotate(name, domain=name.rsplit("-", 1)[0])
    return pool


def validation(seed: int = 5, count: int = 60) -> list[ms.DomainData]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, len(CLASSES), (count,), generator=generator)
    images = make_images(count, seed=seed)
    half = count // 2
    return [
        ms.DomainData("test", name, CLASSES, images[part], labels[part])
        for name, part in (("lyon", slice(half)), ("brest", slice(half, None)))
    ]


def naive(runs: ms.ExpertPool, data: list[ms.DomainData], strict: bool) -> list[str]:
    def score(members: list[str]) -> float:
        share = [1 / len(members) if name in members else 0.0 for name in runs.names]
        network = runs.network(encoder=share)
        images = torch.cat([runs.prepare(each.images) for each in data])
        with torch.no_grad():
            answers = network(images).argmax(-1)
        return (answers == torch.cat([each.labels for each in data])).double().mean().item()

    order = sorted(runs.names, key=lambda name: (-score([name]), name))
    members, best = [], float("-inf")
    for name in order:
        value = score([*members, name])
        if value > best or (value == best and not strict):
            members, best = [*members, name], value
    return members


@pytest.mark.parametrize("rule", ["restricted", "greedy"])
@pytest.mark.parametrize("seed", range(4))
def test_runs_are_chosen_as_published(rule: str, seed: int) -> None:
    runs, data = runs_pool(), validation(seed)
    assert ms.soups.select_runs(runs, data, rule) == naive(runs, data, strict=rule == "greedy")


def test_ties_are_accepted_by_restricted_and_refused_by_greedy() -> None:
    expert = make_experts(micro_vit, ("a",))["a"]
    runs = ms.ExpertPool.from_modules(dict.fromkeys(("a", "b", "c"), expert), classes=CLASSES)
    assert ms.soups.select_runs(runs, validation(), "restricted") == ["a", "b", "c"]
    assert ms.soups.select_runs(runs, validation(), "greedy") == ["a"]


def test_the_mean_of_runs() -> None:
    runs, batch = runs_pool(), make_images(4)
    pool = make_pool("vit").with_candidates(runs)
    every = ms.create_method("mean", pool, variant="all_runs")
    assert every.needs == ("candidates",)
    torch.testing.assert_close(every(batch), runs.forward(runs.merge([1 / 6] * 6), batch))
    chosen = ["brest-1", "lyon-0"]
    for variant in ("restricted", "greedy"):
        method = ms.create_method("mean", pool, variant=variant, runs=chosen)
        assert method.options()["runs"] == chosen  # so every record says what was averaged
        weights = runs.merge([0.5 if name in chosen else 0.0 for name in runs.names])
        torch.testing.assert_close(method(batch), runs.forward(weights, batch))
        assert method.provenance["candidates"] == runs.fingerprint()
    assert "candidates" not in ms.create_method("mean", pool).provenance


def test_who_leaves_the_pool_takes_its_runs_along() -> None:
    pool = make_pool("vit").with_candidates(runs_pool())
    assert pool.without("brest").candidates.names == tuple(run for run in RUNS if not run.startswith("brest"))
    assert pool.without("brest", "lyon").without().candidates.names == ("turin-0", "turin-1")
    with pytest.raises(ms.MergestreamError, match="no run among this pool's candidates called 'brest-1'"):
        ms.create_method("mean", pool.without("brest"), variant="greedy", runs=["brest-1"])


def test_candidates_lie_beside_the_pool(tmp_path: Path) -> None:
    make_pool("vit").save(tmp_path / "pool")
    assert ms.ExpertPool.load(tmp_path / "pool", network=micro_vit()).candidates is None
    runs = runs_pool()
    runs.save(tmp_path / "pool.candidates")
    pool = ms.ExpertPool.load(tmp_path / "pool", network=micro_vit()).without("turin")
    assert pool.candidates.names == tuple(run for run in RUNS if not run.startswith("turin"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"variant": "restricted"},
            r"only a simulation has.*soups.select_runs\(pool.candidates, validation, 'restricted'",
        ),
        ({"variant": "greedy"}, "select_runs"),
        ({"variant": "greedy", "runs": ["lyon-0"], "coefficients": [0.5, 0.5]}, "leave 'coefficients' out"),
        ({"variant": "all_runs", "runs": ["lyon-0"]}, "'restricted' or 'greedy'"),
        ({"variant": "uniform", "runs": ["lyon-0"]}, "'restricted' or 'greedy'"),
        ({"variant": "greedy", "runs": [3]}, "list of names"),
    ],
)
def test_wrong_uses_are_refused(options: dict, message: str) -> None:
    pool = make_pool("vit").with_candidates(runs_pool())
    with pytest.raises(ms.MergestreamError, match=message):
        ms.create_method("mean", pool, **options)


def test_integer_buffers_of_averaged_runs_are_the_runs_own() -> None:
    experts, names = make_experts(micro_resnet), ("lyon-0", "brest-0")
    runs = make_experts(micro_resnet, names, seed=4)
    for module in runs.values():
        module.bn1.num_batches_tracked.fill_(77)
    pools = [
        ms.ExpertPool.from_modules(each, preprocessing=ms.Preprocessing(size=(16, 16))) for each in (experts, runs)
    ]
    candidates = pools[1].annotate("lyon-0", domain="lyon").annotate("brest-0", domain="brest")
    method = ms.create_method("mean", pools[0].with_candidates(candidates), variant="all_runs")
    assert method.network().bn1.num_batches_tracked.item() == 77


def test_candidates_of_another_network_are_refused() -> None:
    pool = make_pool("vit").with_candidates(make_pool("hand_written"))
    with pytest.raises(ms.MergestreamError, match="another network"):
        ms.create_method("mean", pool, variant="all_runs")
    with pytest.raises(ms.MergestreamError, match="an ExpertPool of runs, got str"):
        pool.with_candidates("runs")


def test_runs_must_say_their_domain_or_leaving_one_out_would_leak() -> None:
    unnamed = ms.ExpertPool.from_modules(make_experts(micro_vit, RUNS, seed=3), classes=CLASSES)
    for runs in (unnamed, runs_pool().annotate("lyon-0", domain="Lyons")):
        with pytest.raises(ms.MergestreamError, match=r"candidate 'lyon-0'.*annotate\('lyon-0', domain"):
            ms.create_method("mean", make_pool("vit").with_candidates(runs), variant="all_runs")


def test_candidates_are_saved_with_the_pool(tmp_path: Path) -> None:
    pool = make_pool("vit").with_candidates(runs_pool())
    pool.save(tmp_path / "pool")
    again = ms.ExpertPool.load(tmp_path / "pool", network=micro_vit())
    assert again.candidates.fingerprint() == pool.candidates.fingerprint()


def test_bad_validation_is_refused() -> None:
    runs = runs_pool()
    with pytest.raises(ms.MergestreamError, match="at least one source"):
        ms.soups.select_runs(runs, [])
    for bad in (None, validation()[0], {"lyon": validation()[0]}, [3]):
        with pytest.raises(ms.MergestreamError, match="list of DomainData"):
            ms.soups.select_runs(runs, bad)
    with pytest.raises(ms.MergestreamError, match="pool of runs"):
        ms.soups.select_runs(None, validation())
    with pytest.raises(ms.MergestreamError, match="batch_size"):
        ms.soups.select_runs(runs, validation(), batch_size=0)
    with pytest.raises(ms.MergestreamError, match="Did you mean 'greedy'"):
        ms.soups.select_runs(runs, validation(), "gredy")
    other = [replace(data, classes=CLASSES[::-1]) for data in validation()]
    with pytest.raises(ms.MergestreamError, match="not those of the runs"):
        ms.soups.select_runs(runs, other)
