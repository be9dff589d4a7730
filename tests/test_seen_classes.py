"""An expert has no say on a class that it never saw, by the class counts in its card."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mergestream as ms
from conftest import CLASSES, make_images, make_pool
from mergestream.functional import partial_votes
from mergestream.methods.seen_classes import SeenClasses

SEEN = torch.tensor([[1, 1, 1, 0, 1], [1, 0, 1, 1, 0], [0, 1, 1, 1, 1]], dtype=torch.bool)
APART = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]], dtype=torch.bool)


def random_logits(seen: Tensor, images: int = 6, seed: int = 0) -> Tensor:
    return 3 * torch.randn(len(seen), images, seen.shape[1], generator=torch.Generator().manual_seed(seed))


def with_counts(pool: ms.ExpertPool, seen: Tensor) -> ms.ExpertPool:
    for name, row in zip(pool.names, seen.tolist(), strict=True):
        counts = {label: 7 for label, saw in zip(pool.classes, row, strict=True) if saw}
        pool = pool.annotate(name, class_counts=counts)
    return pool


@pytest.mark.parametrize("name", ["ensemble", "entropy_adaptive", "select_expert", "merge_and_fit", "corrected"])
def test_cards_of_all_classes_change_no_bit(name: str) -> None:
    pool = make_pool("vit")
    options = {"home": "uniform"} if name == "corrected" else {}
    options |= {"score": "entropy_agreement"} if name == "entropy_adaptive" else {}
    plain = ms.create_method(name, pool, **options)
    full = ms.create_method(name, with_counts(pool, torch.ones(3, 5)), **options)
    partly = ms.create_method(name, with_counts(pool, SEEN), **options)
    for seed in range(2):
        images = make_images(seed=seed)
        answer = plain(images)
        assert torch.equal(full(images), answer)
        assert not torch.equal(partly(images), answer)
    key = "base_seen_classes" if name == "corrected" else "seen_classes"
    assert key not in full.provenance.get("cards", {})
    assert partly.provenance["cards"][key] == SEEN.tolist()


def test_silent_cards_and_classes_that_nobody_saw_leave_all_as_it_is() -> None:
    pool = make_pool("vit")
    assert SeenClasses.of(pool).mask is None
    nobody = torch.ones(3, 5)
    nobody[:, 2] = 0
    assert SeenClasses.of(with_counts(pool, nobody)).mask is None
    one = pool.annotate("brest", class_counts={"round": 3, "ring": 0})
    assert SeenClasses.of(one).mask.tolist() == [[True] * 5, [True, False, False, False, False], [True] * 5]


def test_filled_logits_are_the_least_squares() -> None:
    """z_kc = t_c + b_k over the seen cells, by numpy's solver, one image at a time."""
    logits, (experts, classes) = random_logits(SEEN), SEEN.shape
    ours = partial_votes.filled(logits, SEEN, partial_votes.alignment(SEEN))
    cells = [(k, c) for k in range(experts) for c in range(classes) if SEEN[k, c]]
    design = np.zeros((len(cells), classes + experts))
    for row, (k, c) in enumerate(cells):
        design[row, c] = design[row, classes + k] = 1
    for image in range(logits.shape[1]):
        values = np.array([float(logits[k, image, c]) for k, c in cells])
        solved = np.linalg.lstsq(design, values, rcond=None)[0]
        common, offset = solved[:classes], solved[classes:]
        for k in range(experts):
            for c in range(classes):
                expected = float(logits[k, image, c]) if SEEN[k, c] else common[c] + offset[k]
                assert float(ours[k, image, c]) == pytest.approx(expected, abs=1e-4)
        mean = ours[:, image].mean(dim=0).numpy()
        np.testing.assert_allclose(mean - mean.mean(), common - common.mean(), atol=1e-4)


def test_an_expert_does_not_move_the_odds_of_classes_that_it_never_saw() -> None:
    logits = random_logits(SEEN)
    louder = logits.clone()
    louder[1, :, [1, 4]] += 50.0  # two classes that the second expert never saw
    fill = partial_votes.alignment(SEEN)
    assert torch.equal(partial_votes.filled(logits, SEEN, fill), partial_votes.filled(louder, SEEN, fill))


def test_experts_without_a_common_class_are_aligned_by_their_means() -> None:
    logits = random_logits(APART)
    filled = partial_votes.filled(logits, APART, partial_votes.alignment(APART))
    mean = filled.mean(dim=0)
    for k, own in enumerate(([0, 1], [2, 3])):
        expected = logits[k][:, own] - logits[k][:, own].mean(dim=1, keepdim=True)
        centred = mean[:, own] - mean[:, own].mean(dim=1, keepdim=True)
        torch.testing.assert_close(centred, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mean[:, :2].mean(dim=1), mean[:, 2:].mean(dim=1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["entropy", "max_softmax", "entropy_agreement"])
@pytest.mark.parametrize("padded", [False, True])
def test_scores_are_over_seen_classes(kind: str, padded: bool) -> None:
    seen = torch.cat([SEEN, torch.tensor([[False, False, True, False, False]])])
    logits, tau = random_logits(seen), [0.5, 1.0, 2.0, 1.0]
    shares = [0.25] * 4 + [0.0] * 2 if padded else [1 / 6] * 6
    ours = partial_votes.scores(kind, seen, logits, torch.tensor(tau), torch.tensor(shares) if padded else None)
    predictions = [
        [max((c for c in range(5) if seen[k, c]), key=lambda c, k=k, x=x: float(logits[k, x, c])) for x in range(6)]
        for k in range(4)
    ]
    for k in range(4):
        own = [c for c in range(5) if seen[k, c]]
        doubt = 0.0
        for x, share in enumerate(shares):
            odds = [math.exp(float(logits[k, x, c]) / tau[k]) for c in own]
            p = [value / sum(odds) for value in odds]
            doubt += share * (1 - max(p) if kind == "max_softmax" else -sum(v * math.log(v) for v in p))
        most = {n: 1 - 1 / n if kind == "max_softmax" else math.log(n) for n in (5, len(own))}
        expected = most[5] if len(own) == 1 else doubt * most[5] / most[len(own)]
        if kind == "entropy_agreement":
            pairs = [(x, other) for other in range(4) if other != k for x in range(6) if seen[other, predictions[k][x]]]
            asked = sum(shares[x] for x, _ in pairs)
            alike = sum(shares[x] for x, other in pairs if predictions[other][x] == predictions[k][x])
            expected /= max(alike / asked if asked else 1.0, 0.1) ** 4
        assert float(ours[k]) == pytest.approx(expected, rel=1e-4)


class Colour(nn.Module):
    """The class of an image by its mean colour."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.fc = nn.Conv2d(3, 8, 1), nn.Linear(8, len(CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.encoder(images)).mean(dim=(2, 3)))


def coloured(labels: Tensor, seed: int) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    centres = 1.5 * torch.randn(len(CLASSES), 3, generator=torch.Generator().manual_seed(5))
    return centres[labels][:, :, None, None] + 0.3 * torch.randn(len(labels), 3, 2, 2, generator=random)


def trained_on(classes: list[int], seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Colour()
    labels = torch.tensor(classes).repeat(24)
    images, adam = coloured(labels, seed), torch.optim.Adam(module.parameters(), 0.05)
    for _ in range(150):
        adam.zero_grad()
        nn.functional.cross_entropy(module(images), labels).backward()
        adam.step()
    return module.eval()


@pytest.mark.parametrize("options", [{}, {"average": "probabilities"}])
def test_experts_trained_without_a_class_do_not_veto_it(options: dict) -> None:
    """Only the first expert saw the last class; the two others would never answer it."""
    every, some = list(range(5)), list(range(4))
    experts = {"a": trained_on(every, 1), "b": trained_on(some, 2), "c": trained_on(some, 3)}
    pool = ms.ExpertPool.from_modules(experts, classes=CLASSES)
    seen = torch.ones(3, 5)
    seen[1:, 4] = 0
    labels = torch.arange(5).repeat(20)
    right = {}
    for what, each in (("silent", pool), ("by card", with_counts(pool, seen))):
        answers = ms.create_method("ensemble", each, **options)(coloured(labels, 4)).argmax(dim=-1)
        right[what] = (answers == labels).view(20, 5).float().mean(dim=0)
    assert float(right["silent"][4]) < 0.5
    assert float(right["by card"][4]) > 0.9
    assert float(right["by card"][:4].min()) > 0.9
