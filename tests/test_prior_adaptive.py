"""The head's bias follows the stream's mix of classes; heads of odd size; what merging loses, given back."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mergestream as ms
from conftest import CLASSES, NAMES, make_images, make_pool, trained_with_weights
from mergestream.methods.expert_rows import even_heads, restored
from mergestream.runtime.errors import MergestreamError, PoolError

STREAM = [make_images(8, seed=seed) for seed in range(5)] + [make_images(3, seed=9), make_images(1, seed=10)]


def softmax(values: np.ndarray) -> np.ndarray:
    raised = np.exp(values - values.max(axis=-1, keepdims=True))
    return raised / raised.sum(axis=-1, keepdims=True)


class Reference:
    """The page's equations in float64, one line each."""

    def __init__(
        self, home: np.ndarray, anchor: float, memory: float, before: float, tilt: np.ndarray | float = 0.0
    ) -> None:
        self.home, self.anchor, self.memory, self.before, self.tilt = home, anchor, memory, before, tilt
        self.untilted = np.zeros(len(home))
        self.counts, self.clumped, self.clumps = np.zeros(len(home)), 0.0, 0.0

    def shift(self, logits: np.ndarray) -> np.ndarray:
        p, images = softmax(logits), len(logits)
        faded = np.exp(-images / self.memory)
        if self.counts.sum() > 0 and images > 1:
            usual = self.counts / self.counts.sum()
            departure = ((p.mean(axis=0) - usual) ** 2).sum() / (usual * (1 - usual)).sum()
            self.clumped = faded * self.clumped + (departure - 1 / images) / (1 - 1 / images)
            self.clumps = faded * self.clumps + 1
        else:
            self.clumped, self.clumps = faded * self.clumped, faded * self.clumps
        self.counts = faded * self.counts + p.sum(axis=0)
        assumed = self.counts + self.before * self.home
        assumed = assumed / assumed.sum()
        self.untilted = faded * self.untilted + softmax(logits + self.tilt).sum(axis=0)
        usual = self.untilted + self.before * self.home
        expected = assumed * (self.home / (usual / usual.sum())) ** self.anchor
        expected = expected / expected.sum()
        clumping = np.clip((self.clumped + 4 / 101) / (self.clumps + 4), 1e-4, 2 / 3)
        concentration, mix = 1 / clumping - 1, expected
        for _ in range(10):
            q = p * mix / assumed
            q = (q / q.sum(axis=1, keepdims=True)).sum(axis=0)
            mix = (q + concentration * expected) / (images + concentration)
        return np.log(mix) - np.log(assumed)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("options", [{}, {"anchor": 0.3, "memory": 20, "before": 5}], ids=str)
def test_a_stream_is_followed_as_the_page_says(vit_pool: ms.ExpertPool, options: dict, weighted: bool) -> None:
    home = [0.4, 0.3, 0.1, 0.1, 0.1]
    settings = {"anchor": 1.0, "memory": 4096, "before": 32, **options}
    logs = np.log(home)
    pool, tilt = (trained_with_weights(vit_pool), logs - logs.mean()) if weighted else (vit_pool, 0.0)
    reference = Reference(np.array(home), tilt=tilt, **settings)
    plain_head = {"refit": False, "match_scale": False, "temperature": 1.0, "score": "entropy"}
    method = ms.create_method("prior_adaptive", pool, home=home, **plain_head, **options)
    plain = ms.create_method("entropy_adaptive", vit_pool, head="shared")
    for images in STREAM:
        step, own = method.step(images), plain.step(images).logits
        expected = reference.shift(own.double().numpy())
        torch.testing.assert_close(step.class_shift.double(), torch.tensor(expected), rtol=5e-3, atol=1e-3)
        torch.testing.assert_close(step.logits, own + step.class_shift)


@pytest.mark.parametrize("match_scale", [False, True])
@pytest.mark.parametrize("refit", [False, True])
def test_the_merged_weights_are_what_answered(vit_pool: ms.ExpertPool, refit: bool, match_scale: bool) -> None:
    method = ms.create_method("prior_adaptive", vit_pool, anchor=0.5, refit=refit, match_scale=match_scale)
    for images in STREAM:
        step = method.step(images)
        assert step.class_shift.abs().max() > 0
        answers = vit_pool.forward(method.merged_weights(), images)
        torch.testing.assert_close(answers, step.logits, rtol=1e-4, atol=1e-5)


def test_a_model_that_says_one_class_to_everything_is_brought_back() -> None:
    """A bias that drowns the pictures: what it says in the long run becomes what experts say at home."""

    def drowned(number: int, network: nn.Module) -> None:
        network.fc.bias[2] += 4.5

    torch.manual_seed(0)
    pool = one_layer(4, drowned)
    labels = torch.randint(4, (40, 16))
    stream = [pictures(batch) for batch in labels]
    predictions = torch.cat([ms.create_method("mean", pool).step(images).logits for images in stream]).argmax(dim=1)
    ours = ms.create_method("prior_adaptive", pool, views=(), home="uniform")
    answered = torch.cat([ours.step(images).logits for images in stream]).argmax(dim=1)
    assert (predictions == 2).float().mean() > 0.85
    late = slice(320, None)
    assert (answered == labels.flatten())[late].float().mean() > 0.85
    shares = torch.bincount(answered[late], minlength=4) / 320
    torch.testing.assert_close(shares, torch.bincount(labels.flatten()[late]) / 320, rtol=0, atol=0.1)


def test_a_rare_class_survives_the_mean_of_unrelated_heads() -> None:
    """Every expert is right, each in a basis of its own; their mean is flat, and home says that one class is rare.

    At the experts' scale, or with a head that is fitted to what they say, it is found.
    """
    torch.manual_seed(0)
    experts = {f"site{number}": Rotated(torch.linalg.qr(torch.randn(16, 16)).Q) for number in range(5)}
    pool = ms.ExpertPool.from_modules(experts, head="fc", classes=("normal", "atypical"))
    labels = (torch.rand(60, 16) < 0.15).long()
    signal = 1.2 * (2 * labels - 1)[..., None] * Rotated.DIRECTION + 0.3 * torch.randn(60, 16, 16)
    stream = list(signal.reshape(60, 16, 1, 4, 4))
    options: dict = {"views": (), "home": (0.85, 0.15), "temperature": 1.0}
    rates = {}
    for refit, match_scale in ((False, False), (False, True), (True, False), (True, True)):
        method = ms.create_method("prior_adaptive", pool, refit=refit, match_scale=match_scale, **options)
        predictions = torch.stack([method.step(images).logits.argmax(dim=1) for images in stream])[10:]
        rates[refit, match_scale] = float((predictions == 1)[labels[10:] == 1].float().mean())
        right = float((predictions == 0)[labels[10:] == 0].float().mean())
        assert right > 0.8
    assert rates.pop((False, False)) < 0.3
    assert min(rates.values()) > 0.8


class Rotated(nn.Module):
    """A right answer through a basis of its own: the encoder turns into it, the head reads it there."""

    DIRECTION = torch.ones(16) / 4

    def __init__(self, basis: Tensor) -> None:
        super().__init__()
        self.encoder, self.fc = nn.Linear(16, 16, bias=False), nn.Linear(16, 2)
        with torch.no_grad():
            self.encoder.weight.copy_(basis)
            along = basis @ self.DIRECTION
            self.fc.weight.copy_(torch.stack([-along, along]))
            self.fc.bias.zero_()

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.encoder(images.flatten(1)))


def test_a_batch_of_one_class_is_believed_only_where_batches_are_like_that() -> None:
    """The same batch, after batches of one class each, and after mixed ones."""
    torch.manual_seed(0)
    pool = one_layer(4)
    mixed = [pictures(torch.arange(16) % 4) for _ in range(12)]
    sorted_ones = [pictures(torch.full((16,), number % 4)) for number in range(12)]
    unsure = pictures(torch.zeros(16, dtype=torch.long), strength=0.4)
    moved = {}
    for name, stream in (("mixed", mixed), ("sorted", sorted_ones)):
        method = ms.create_method("prior_adaptive", pool, views=(), home="uniform")
        for images in stream:
            method.step(images)
        shift = method.step(unsure).class_shift
        moved[name] = float(shift[0] - shift[1:].mean())
    assert moved["sorted"] > 1.5
    assert moved["mixed"] < 0.5 * moved["sorted"]


def pictures(labels: Tensor, strength: float = 3.0) -> Tensor:
    """Four numbers a picture, the label's the largest, with noise."""
    signal = strength * torch.nn.functional.one_hot(labels, 4) + 0.5 * torch.randn(len(labels), 4)
    return signal.reshape(-1, 1, 2, 2)


class OneLayer(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4, bias=False)
        self.fc = nn.Linear(4, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.encoder(images.flatten(1)))


def one_layer(
    classes: int, change: Callable[[int, OneLayer], None] | None = None, base: nn.Module | None = None
) -> ms.ExpertPool:
    experts = {}
    for number, name in enumerate(NAMES[:2]):
        network = OneLayer(classes)
        with torch.no_grad():
            network.encoder.weight.copy_(torch.eye(4))
            network.fc.weight.copy_(torch.eye(classes, 4))
            network.fc.bias.zero_()
            if change is not None:
                change(number, network)
        experts[name] = network
    preprocessing = ms.Preprocessing(size=(2, 2), mean=(0.0,), std=(1.0,))
    return ms.ExpertPool.from_modules(
        experts, classes=CLASSES[:classes], preprocessing=preprocessing, base=base, head="fc"
    )


def test_where_heads_read_their_own_encoders_restoring_gives_the_ensemble() -> None:
    """Heads at right angles, each expert's change seen by its own head alone: the mean loses half, exactly."""
    start = OneLayer(2)
    with torch.no_grad():
        start.encoder.weight.copy_(torch.randn(4, 4))
        start.fc.bias.zero_()

    def apart(number: int, network: OneLayer) -> None:
        own = slice(2 * number, 2 * number + 2)
        network.encoder.weight.copy_(start.encoder.weight)
        network.encoder.weight[own] += torch.randn(2, 4)
        network.fc.weight.zero_()
        network.fc.weight[:, own] = torch.tensor([[1.0, 0.5], [-1.0, 0.5]])

    pool = one_layer(2, apart, base=start)
    images = torch.randn(6, 1, 2, 2)
    rows, scale = restored(pool, pool.rows)
    assert scale == pytest.approx(2.0)
    assert len(rows.encoder) == 3
    options = {"views": (), "encoder": "uniform", "even_heads": False, "refit": False, "match_scale": False}
    step = ms.create_method("prior_adaptive", pool, restore=True, **options).step(images)
    ensemble = ms.create_method("ensemble", pool).step(images).logits
    torch.testing.assert_close(step.logits - step.class_shift, ensemble, rtol=1e-4, atol=1e-5)
    lossy = ms.create_method("prior_adaptive", pool, restore=False, **options).step(images)
    assert not torch.allclose(lossy.logits - lossy.class_shift, ensemble, atol=1e-2)


def test_a_fitted_head_answers_as_the_experts_do_where_their_mean_cannot() -> None:
    """Heads at right angles, linear encoders: what experts say together is linear in what the merged encoder gives."""

    def apart(number: int, network: OneLayer) -> None:
        network.encoder.weight.copy_(torch.linalg.qr(torch.randn(4, 4)).Q)
        network.fc.weight.copy_(torch.randn(3, 4))

    torch.manual_seed(0)
    pool = one_layer(3, apart)
    stream = [torch.randn(8, 1, 2, 2) for _ in range(40)]
    off = {}
    for refit in (False, True):
        options = {"views": (), "encoder": "uniform", "refit": refit, "refit_before": 1, "match_scale": False}
        method = ms.create_method("prior_adaptive", pool, home="uniform", **options)
        steps = [method.step(images) for images in stream]
        expected = [pool.logits(images).mean(dim=0) for images in stream]
        late = [
            (step.logits - step.class_shift - right).abs().max() for step, right in zip(steps, expected, strict=True)
        ]
        off[refit] = float(torch.stack(late[20:]).mean())
    assert off[True] < 0.05 * off[False]


def test_the_experts_views_are_heard_together() -> None:
    """One expert that answers a picture and its mirror image otherwise: the fitted head answers between the two."""
    torch.manual_seed(0)
    pool = one_layer(2).without(NAMES[1])
    stream = [torch.randn(16, 1, 2, 2) for _ in range(30)]
    options = {"home": "uniform", "refit_before": 0.1, "match_scale": False}
    method = ms.create_method("prior_adaptive", pool, **options)
    for images in stream:
        step = method.step(images)
        both = torch.stack([pool.logits(images)[0], pool.logits(images, "hflip")[0]]).mean(dim=0)
    torch.testing.assert_close(step.logits - step.class_shift, both, rtol=0, atol=0.02)
    assert not torch.allclose(both, pool.logits(images)[0], atol=0.5)


def test_restoring_needs_the_base() -> None:
    with pytest.raises(PoolError, match="base"):
        ms.create_method("prior_adaptive", one_layer(2), restore=True)


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_a_head_of_odd_size_does_not_capture_the_pool(factor: float) -> None:
    """It counts as one of the median's size would, whatever it was multiplied by."""
    border = make_pool("vit").layout.encoder_size
    sizes = make_pool("vit").rows.head.norm(dim=1)
    honest, tampered = make_pool("vit"), make_pool("vit")
    tampered.bank[0, border:] *= factor
    _, factors = even_heads(tampered)
    honest.bank[0, border:] *= factors[0] * factor
    assert factors[1:].tolist() == [1.0, 1.0]
    assert float(honest.rows.head[0].norm()) == pytest.approx(float(sizes[1:].max() if factor > 1 else sizes[1:].min()))
    one, other = ms.create_method("prior_adaptive", honest), ms.create_method("prior_adaptive", tampered)
    for images in STREAM:
        expected, result = one.step(images), other.step(images)
        torch.testing.assert_close(result.encoder_coefficients, expected.encoder_coefficients, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(result.logits, expected.logits, rtol=1e-2, atol=1e-2)


def test_heads_of_natural_sizes_are_left_alone(vit_pool: ms.ExpertPool) -> None:
    rows, factors = even_heads(vit_pool)
    assert factors.tolist() == [1.0] * len(vit_pool)
    assert rows.head.data_ptr() == vit_pool.rows.head.data_ptr()


def test_home_comes_from_the_cards(vit_pool: ms.ExpertPool) -> None:
    counts = dict(zip(CLASSES, (50, 30, 10, 5, 5), strict=True))
    pool = vit_pool
    for name in NAMES[:2]:
        pool = pool.annotate(name, class_counts=counts)
    method = ms.create_method("prior_adaptive", pool)
    torch.testing.assert_close(method._prior.home, torch.tensor([0.5, 0.3, 0.1, 0.05, 0.05]))
    predictions = dict(zip(CLASSES, (0.2, 0.2, 0.2, 0.2, 0.2), strict=True))
    told = pool.annotate(NAMES[0], metrics={"validation": {"mean_probability": predictions}})
    method = ms.create_method("prior_adaptive", told)
    torch.testing.assert_close(method._prior.home, torch.tensor([0.35, 0.25, 0.15, 0.125, 0.125]))
    assert method.provenance["cards"] != ms.create_method("prior_adaptive", pool).provenance["cards"]


@pytest.mark.parametrize(("accuracy", "expected"), [(1.0, 1.0), (0.99, 0.07), (None, 0.07)])
def test_a_temperature_of_a_split_without_errors_is_not_believed(
    vit_pool: ms.ExpertPool, accuracy: float | None, expected: float
) -> None:
    """It is near 0 however sure the expert was, and would take all coefficients."""
    told = {} if accuracy is None else {"validation": {"accuracy": accuracy}}
    pool = vit_pool.annotate(NAMES[0], temperature=0.07, metrics=told).annotate(NAMES[1], temperature=1.5)
    for name in ("prior_adaptive", "entropy_adaptive"):
        result = ms.create_method(name, pool, temperature="card")._temperature
        torch.testing.assert_close(result, torch.tensor([expected, 1.5, 1.0]))


def test_a_loss_without_weights_tilts_nothing(vit_pool: ms.ExpertPool) -> None:
    counts = dict(zip(CLASSES, (50, 30, 10, 5, 5), strict=True))
    pool = vit_pool
    for name in NAMES:
        pool = pool.annotate(name, class_counts=counts, recipe={"loss": "plain"})
    ours, left = (ms.create_method("prior_adaptive", pool, untilt=untilt) for untilt in (True, False))
    for images in STREAM:
        assert torch.equal(ours.step(images).logits, left.step(images).logits)
    assert "tilt" not in ours.provenance["cards"]


def test_a_weighted_model_that_knows_nothing_is_not_taken_for_a_biased_one() -> None:
    """It says every class equally often, as its loss asked for. Compared with home as it is, rare classes would go."""
    counts = dict(zip(CLASSES, (900, 40, 30, 20, 10), strict=True))
    predictions = dict(zip(CLASSES, (0.9, 0.04, 0.03, 0.02, 0.01), strict=True))  # at home it knew its classes
    pool = make_pool("vit")
    for name in NAMES:
        told = {"class_counts": counts, "metrics": {"validation": {"mean_probability": predictions}}}
        pool = pool.annotate(name, recipe={"loss": "weighted"}, **told)
    pool.bank[:, pool.layout.encoder_size :] *= 0.01
    shifts = {}
    for untilt in (True, False):
        method = ms.create_method("prior_adaptive", pool, untilt=untilt, refit=False, match_scale=False)
        for seed in range(40):
            step = method.step(make_images(8, seed=seed))
        shifts[untilt] = float(step.class_shift.max() - step.class_shift.min())
    assert shifts[True] < 0.2 < 3 < shifts[False]


def test_the_tilt_of_cards_is_that_of_their_counts(vit_pool: ms.ExpertPool) -> None:
    counts = np.array([[4 + 10 * (number + place) for number in range(5)] for place in range(3)], dtype=float)
    odds = (np.log(counts) - np.log(counts).mean(axis=1, keepdims=True)).mean(axis=0)
    method = ms.create_method("prior_adaptive", trained_with_weights(vit_pool))
    assert method._prior.tilt is not None
    torch.testing.assert_close(method._prior.tilt, torch.from_numpy(odds).float())
    shares = (counts / counts.sum(axis=1, keepdims=True)).mean(axis=0)
    torch.testing.assert_close(method._prior.untilted_home, torch.from_numpy(shares).float())


@pytest.mark.parametrize("given", ["uniform", [0.2] * 5, np.full(5, 0.2)], ids=["name", "list", "array"])
def test_where_home_is_even_a_weighted_model_is_right_as_it_is(vit_pool: ms.ExpertPool, given: object) -> None:
    assert ms.create_method("prior_adaptive", trained_with_weights(vit_pool), home=given)._prior.tilt is None


def test_even_classes_tilt_nothing_whatever_their_number(vit_pool: ms.ExpertPool) -> None:
    pool = vit_pool
    for place, name in enumerate(NAMES):
        pool = pool.annotate(name, class_counts=dict.fromkeys(CLASSES, 37 + place), recipe={"loss": "weighted"})
    assert ms.create_method("prior_adaptive", pool)._prior.tilt is None


def test_a_class_that_an_expert_lacks_is_not_tilted_by_it(vit_pool: ms.ExpertPool) -> None:
    lacking = dict(zip(CLASSES, (40, 10, 0, 10, 40), strict=True))
    pool = vit_pool.annotate(NAMES[0], class_counts=lacking, recipe={"loss": "weighted"})
    tilt = ms.create_method("prior_adaptive", pool)._prior.tilt
    assert tilt is not None
    assert tilt[2] == 0
    torch.testing.assert_close(tilt, torch.tensor([2.0, -2.0, 0.0, -2.0, 2.0]).mul(np.log(2) / 2 / len(NAMES)))
    assert (
        ms.create_method("prior_adaptive", vit_pool.annotate(NAMES[0], recipe={"loss": "weighted"}))._prior.tilt is None
    )


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"anchor": 1.5}, "anchor"),
        ({"memory": 0}, "memory"),
        ({"before": 0}, "before"),
        ({"refit": "yes"}, "refit"),
        ({"untilt": 2}, "untilt"),
        ({"refit_before": 0}, "refit_before"),
        ({"home": [0.5, 0.5]}, "5 classes"),
        ({"home": [0, 0, 0, 0, 0]}, "5 classes"),
        ({"home": "here"}, "home"),
    ],
    ids=str,
)
def test_bad_options_are_refused(vit_pool: ms.ExpertPool, options: dict, told: str) -> None:
    with pytest.raises(MergestreamError, match=told):
        ms.create_method("prior_adaptive", vit_pool, **options)
