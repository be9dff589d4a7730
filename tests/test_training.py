"""The small trainer: experts from one start, the same bits every time, never redone."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mergestream as ms
from mergestream.data.datasets import DataRequest, phantom
from mergestream.pool.checkpoint import Statistics
from mergestream.pool.expert_card import read_card, require_name
from mergestream.training import (
    Recipe,
    expert_training,
    pool_statistics,
    split,
    train_base,
    train_expert,
    training_loop,
)
from mergestream.training.recipe import PAPER_SWEEP, TrainPlan, parse_settings, start_from
from mergestream.training.training_loop import fit_temperature
from mergestream.training.training_run import expert_name, fits_at_once

MICRO = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
RECIPE = Recipe(
    steps=6, batch_size=16, validate_every=2, learning_rate=1e-3, weight_decay=0.01, optimiser="adamw",
    schedule="one_cycle", augmentation=0,
)  # fmt: skip


def build(root: Path, recipe: Recipe = RECIPE, on_step=lambda: None) -> None:
    dataset = ms.load_dataset("phantom", images=60)
    archive = phantom.archive(80, 0)
    train_base(root / "base", "vit_tiny_patch16_224", MICRO, archive, dataset.classes, recipe, on_step)
    for domain in ("lyon", "brest"):
        train_expert(root / domain, root / "base", dataset[domain], recipe, on_step)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    build(folder)
    return folder


def test_same_recipe_same_bits(root: Path, tmp_path: Path) -> None:
    torch.manual_seed(123)  # the caller's randomness is no part of the recipe
    before = torch.get_rng_state()
    build(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert ms.ExpertPool.load(tmp_path).fingerprint() == ms.ExpertPool.load(root).fingerprint()


def test_cached_by_content(root: Path) -> None:
    steps = []
    build(root, on_step=lambda: steps.append(1))
    assert not steps
    weights = (root / "lyon" / "weights.safetensors").read_bytes()
    build(root, replace(RECIPE, learning_rate=2e-3), on_step=lambda: steps.append(1))
    assert len(steps) == 3 * RECIPE.steps
    assert (root / "lyon" / "weights.safetensors").read_bytes() != weights
    build(root)
    assert (root / "lyon" / "weights.safetensors").read_bytes() == weights


def test_a_damaged_expert_is_trained_again(root: Path) -> None:
    path = root / "lyon" / "weights.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    build(root)
    assert path.read_bytes() == whole


def test_the_card_tells_the_whole_story(root: Path) -> None:
    card = read_card(root / "lyon")
    assert card.domain == "lyon"
    assert card.classes == phantom.CLASSES
    assert sum(card.class_counts.values()) == 60
    assert card.base_sha256 == read_card(root / "base").weights_sha256
    assert 0.05 <= card.temperature <= 20
    assert card.recipe["steps"] == 6
    assert card.metrics["best_step"] in (2, 4, 6)
    assert 0 <= card.metrics["validation"]["accuracy"] <= 1
    counts = torch.tensor(card.metrics["validation"]["confusion"])  # what label_shift(method=bbse) reads
    assert counts.shape == (len(card.classes), len(card.classes))
    assert float(counts.diagonal().sum() / counts.sum()) == pytest.approx(card.metrics["validation"]["accuracy"])
    assert set(card.library_versions) >= {"torch", "timm", "mergestream"}


def test_experts_leave_the_shared_start(root: Path) -> None:
    pool = ms.ExpertPool.load(root)
    assert pool.base is not None
    for row in pool.bank:
        assert float((row - pool.base).norm()) > 0


def test_calibrated_temperatures_come_from_the_cards(root: Path) -> None:
    pool = ms.ExpertPool.load(root)
    cards = [card.temperature for card in pool.cards]
    by_card = ms.create_method("entropy_adaptive", pool, temperature="card")
    by_hand = ms.create_method("entropy_adaptive", pool, temperature=cards)
    images = ms.load_dataset("phantom", images=60)["graz"].images[:8]
    assert torch.equal(by_card.step(images).encoder_coefficients, by_hand.step(images).encoder_coefficients)


def test_temperature_scaling_finds_the_temperature() -> None:
    generator = torch.Generator().manual_seed(0)
    true = 2 * torch.randn(4000, 5, generator=generator)
    labels = torch.multinomial(torch.softmax(true, -1), 1, generator=generator).flatten()
    assert fit_temperature(3 * true, labels) == pytest.approx(3, rel=0.1)
    assert fit_temperature(0.5 * true, labels) == pytest.approx(0.5, rel=0.1)
    certain = torch.eye(3)[torch.tensor([0, 1, 2])] * 100
    assert fit_temperature(certain, torch.tensor([0, 1, 2])) >= 0.05


def test_split_is_disjoint_and_seeded() -> None:
    training, validation = split(50, 0.2, seed=1)
    assert sorted([*training.tolist(), *validation.tolist()]) == list(range(50))
    assert len(validation) == 10
    assert torch.equal(split(50, 0.2, seed=1)[0], training)


def test_one_image_is_not_split() -> None:
    with pytest.raises(ms.MergestreamError, match="One image cannot be split"):
        split(1, 0.2, seed=0)


def grouped(groups: list[str]) -> ms.DomainData:
    """A domain whose n-th image is uniformly of the grey n, so that it can be recognised anywhere."""
    greys = torch.arange(len(groups), dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 32, 32).contiguous()
    return ms.DomainData("test", "lyon", ("a", "b"), greys, torch.arange(len(groups)) % 2, groups=groups)


def groups_of(data: ms.DomainData, indices: torch.Tensor) -> set[str]:
    return {data.groups[int(index)] for index in indices}


@given(
    st.lists(st.sampled_from("abcdefg"), min_size=2, max_size=60).filter(lambda groups: len(set(groups)) > 1),
    st.floats(0.01, 0.99),
    st.integers(0, 1000),
    st.none() | st.integers(0, 1000),
)
def test_no_group_is_on_both_sides_of_a_split(groups: list[str], share: float, seed: int, own: int | None) -> None:
    data = grouped(groups)
    recipe = Recipe(validation_share=share, seed=seed, split_seed=own)
    training, validation = training_loop.split_of(data, asdict(recipe))
    assert sorted([*training.tolist(), *validation.tolist()]) == list(range(len(groups)))
    assert len(training) > 0
    assert len(validation) > 0
    assert not groups_of(data, training) & groups_of(data, validation)


PATIENTS = [f"patient{n * n % 11}" for n in range(44)]
GROUPED = replace(RECIPE, augmentation=0, seed=3, split_seed=8, validation_share=0.4)


def test_everything_that_is_trained_or_measured_leaves_the_groups_of_the_validation_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = grouped(PATIENTS)
    _, validation = split(len(data), 0.4, 8, PATIENTS)
    held_out = groups_of(data, validation)
    train_base(tmp_path / "base", "vit_tiny_patch16_224", MICRO, data, data.classes, GROUPED)
    network = expert_training.load_network(tmp_path / "base", read_card(tmp_path / "base"))
    loop = training_loop._Loop(network, data, GROUPED, None)
    assert torch.equal(loop._validation, validation)
    assert not groups_of(data, loop.stepper._batches.unique()) & held_out

    inputs: list[torch.Tensor] = []
    monkeypatch.setattr(expert_training, "fit_probe", lambda _, batches, labels: inputs.extend(batches))
    expert_training.probe(tmp_path / "base", data, GROUPED)
    greys = ((torch.cat(inputs)[:, 0, 0, 0] * 0.5 + 0.5) * 255).round()
    assert not groups_of(data, greys) & held_out

    train_expert(tmp_path / "lyon", tmp_path / "base", data, GROUPED)
    monkeypatch.setattr(pool_statistics, "open_data", lambda *_: {"lyon": data})
    measured: list[torch.Tensor] = []

    def measure(pool: ms.ExpertPool, images: dict[str, torch.Tensor], *_: object, **__: object) -> ms.ExpertPool:
        measured.append(images["lyon"])
        return pool.with_statistics({"lyon": Statistics({}, {})})

    monkeypatch.setattr(pool_statistics, "measure_statistics", measure)
    pool_statistics.measure_pool(tmp_path, DataRequest("phantom", None), tmp_path, {"gram": 1000}, "cpu")
    assert not groups_of(data, measured[0][:, 0, 0, 0]) & held_out


def test_a_diverging_fit_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ms.MergestreamError, match="lower learning_rate"):
        build(tmp_path, replace(RECIPE, learning_rate=1e30))
    assert not (tmp_path / "base").exists()


def test_names_of_sites_in_any_script_become_plain_names_of_experts() -> None:
    assert expert_name("Real World") == "Real_World"
    assert expert_name("Lariboisière") == "Lariboisiere"
    names = [expert_name(site) for site in ("東京", "大阪", "Żory", "São Paulo")]
    assert len(set(names)) == len(names)
    for name in names:
        assert require_name(name) == name


def test_the_papers_recipe_sweeps_its_five_options_from_heads_of_their_own() -> None:
    start, settings, head_init = start_from("paper", {"steps": None, "batch_size": 16})
    assert (start.steps, start.batch_size, start.schedule, head_init) == (5000, 16, "constant", "independent")
    recipes = parse_settings(settings, start)
    assert len(recipes) == len(set(recipes)) == 20
    swept = {name for name in asdict(start) if len({getattr(recipe, name) for recipe in recipes}) > 1}
    assert swept == set(PAPER_SWEEP) == {"learning_rate", "weight_decay", "dropout", "augmentation", "optimiser"}
    assert all(getattr(recipe, name) in values for recipe in recipes for name, values in PAPER_SWEEP.items())
    assert parse_settings("paper:3", start) == recipes[:3]
    assert len(parse_settings("paper:1000", start)) == 72
    with pytest.raises(ms.MergestreamError, match="paper:20"):
        parse_settings("paper", start)


def test_the_default_recipe_is_gentle_and_what_is_given_replaces_it() -> None:
    start, settings, head_init = start_from("default", {})
    assert (start.optimiser, start.schedule, settings, head_init) == ("adamw", "cosine", "one", "shared")
    assert start.learning_rate < Recipe().learning_rate
    assert start_from("domainbed", {})[0] == Recipe()
    given = {"learning_rate": 1e-3, "settings": "diwa", "head_init": "zero", "seed": 4}
    changed, settings, head_init = start_from("paper", given)
    assert (changed.learning_rate, changed.seed, settings, head_init) == (1e-3, 4, "diwa", "zero")
    with pytest.raises(ms.MergestreamError, match="papers"):
        start_from("papers", {})


@pytest.mark.parametrize(
    ("gpus", "accelerator", "expected"), [(0, "auto", 4), (1, "auto", 1), (2, "auto", 2), (1, "cpu", 4)]
)
def test_fits_that_share_a_gpu_are_made_one_after_the_other(
    gpus: int, accelerator: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    plan = TrainPlan(DataRequest("phantom", None), "vit_tiny_patch16_224", (Recipe(accelerator=accelerator),))
    assert fits_at_once(plan, 4) == expected
