"""The small trainer: experts from one start, the same bits every time, never redone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import mergestream as ms
from mergestream.data.datasets import phantom
from mergestream.pool.expert_card import read_card
from mergestream.training import Recipe, split, train_base, train_expert
from mergestream.training.training_loop import fit_temperature

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


def test_a_diverging_fit_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ms.MergestreamError, match="lower learning_rate"):
        build(tmp_path, replace(RECIPE, learning_rate=1e30))
    assert not (tmp_path / "base").exists()
