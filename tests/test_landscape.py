"""The loss landscape: geometry, a network whose loss has a closed form, the record, the figures, the command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mergestream as ms
from benching import command
from conftest import FACTORIES, NAMES, make_experts, make_images, make_pool
from mergestream.bench.landscape.landscape_figures import draw_plane, draw_segments, landscape_figure
from mergestream.bench.landscape.landscape_measurement import StreamedMethod, barrier_of, measure_landscape
from mergestream.bench.landscape.landscape_record import Landscape, LossDifference, describe_landscape
from mergestream.bench.landscape.landscape_run import LandscapeRequest, parse_path, run_landscape
from mergestream.bench.landscape.plane import Plane, Surface
from mergestream.bench.report.figures import new_figure
from mergestream.data.datasets import DataRequest
from mergestream.data.streams import in_order
from mergestream.runtime.errors import CheckpointError, InputError, MergestreamError, PoolError
from mergestream.runtime.parallel import quiet

SCHEMA = json.loads((Path(__file__).parent.parent / "docs" / "schemas" / "landscape.schema.json").read_text())
LABELS = torch.tensor([0, 1, 2, 3, 4, 0])


class Bowl(nn.Module):
    """Logits (−|place − bottom|², 0) for any image: with label 0 the loss is log(1 + exp(|place − bottom|²))."""

    bottom = (1.0, 1.0)

    def __init__(self, *place: float) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.tensor(place, dtype=torch.float32))
        self.head = nn.Linear(1, 2, bias=False)
        self.head.weight.data = torch.tensor([[1.0], [0.0]])

    def forward(self, images: Tensor) -> Tensor:
        height = -(self.place - torch.tensor(self.bottom)).square().sum()
        return self.head(height.expand(len(images), 1))


def bowls(*places: tuple[float, float]) -> ms.ExpertPool:
    return ms.ExpertPool.from_modules({f"e{k}": Bowl(*place) for k, place in enumerate(places)}, head="head")


def bowl_loss(x: float, y: float) -> float:
    return float(np.log1p(np.exp((x - 1) ** 2 + (y - 1) ** 2)))


def pixels() -> Tensor:
    return make_images(6).float() / 255 - 0.5


def nothing(count: int = 4) -> Tensor:
    return torch.zeros(count, 3, 2, 2)


def survey(pool: ms.ExpertPool, labels: Tensor | None = LABELS, **options: object) -> Landscape:
    return measure_landscape(pool, pixels(), labels, resolution=3, **options)  # type: ignore[arg-type]


def streamed(pool: ms.ExpertPool, name: str, **options: object) -> StreamedMethod:
    data = ms.DomainData("made up", "somewhere", pool.classes, make_images(6), LABELS)
    return StreamedMethod(ms.create_method(name, pool, **options), data, in_order(6, 2))


@pytest.fixture(scope="module")
def four() -> ms.ExpertPool:
    return make_pool("hand_written", names=(*NAMES, "graz"))


@pytest.fixture(scope="module")
def walked() -> Landscape:
    pool = make_pool("hand_written")
    return survey(pool, path=streamed(pool, "entropy_adaptive"))


# --- geometry -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", FACTORIES)
def test_distances_are_those_of_the_parameters(kind: str) -> None:
    modules = make_experts(FACTORIES[kind])
    pool = make_pool(kind)
    plane = Plane.through(pool, NAMES)
    flat = [nn.utils.parameters_to_vector(modules[name].parameters()).detach().double() for name in NAMES]
    places = np.array(plane.corner_coordinates)
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert np.hypot(*(places[i] - places[j])) == pytest.approx(float((flat[i] - flat[j]).norm()), rel=1e-6)
    for k, place in enumerate(plane.corner_coordinates):
        assert plane.project(pool.bank[k]) == pytest.approx((*place, 0), abs=1e-9)


def test_coefficients_sum_to_1_and_an_experts_own_are_exact(four: ms.ExpertPool) -> None:
    plane = Plane.through(four, ("graz", "lyon", "turin"))
    for name, place in zip(("graz", "lyon", "turin"), plane.corner_coordinates, strict=True):
        assert plane.coefficients(*place) == [float(name == other) for other in four.names]
    random = np.random.RandomState(0)
    for x, y in random.normal(size=(20, 2)) * 5:
        shares = plane.coefficients(x, y)
        assert sum(shares) == pytest.approx(1, abs=1e-12)
        assert shares[four.index("brest")] == 0
        blend = sum(share * row.double() for share, row in zip(shares, four.bank, strict=True))
        assert plane.project(blend) == pytest.approx((x, y, 0), abs=1e-6)  # type: ignore[arg-type]


def test_a_model_off_the_plane_keeps_pythagoras(four: ms.ExpertPool) -> None:
    plane = Plane.through(four, NAMES)
    x, y, distance = plane.project(four.bank[3])
    span, head = four.layout.buffers, four.layout.encoder_size
    assert span.start < span.stop  # BatchNorm's statistics have no part in it
    gap = four.bank[3].double() - four.bank[0].double()
    squared = float(gap[: span.start].square().sum() + gap[head:].square().sum())
    assert x**2 + y**2 + distance**2 == pytest.approx(squared, rel=1e-9)
    assert distance > 0.1


@pytest.mark.parametrize(
    "names", [("lyon", "brest"), ("lyon", "brest", "lyon"), (), ("lyon", "brest", "turin", "graz")]
)
def test_a_plane_needs_three_different_experts(four: ms.ExpertPool, names: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match="three different experts"):
        Plane.through(four, names)


def test_a_pool_of_two_and_an_unknown_expert_are_refused(four: ms.ExpertPool) -> None:
    with pytest.raises(InputError, match="three different experts"):
        survey(four.without("graz", "lyon"))
    with pytest.raises(MergestreamError, match="Did you mean 'lyon'"):
        survey(four, experts=("lyn", "brest", "turin"))


@pytest.mark.parametrize("third", [(2.0, 0.0), (0.0, 0.0), (4.0, 0.0), (1 / 3, 0.0)])
def test_experts_on_one_line_are_refused(third: tuple[float, float]) -> None:
    with pytest.raises(PoolError, match="are on one line"):
        measure_landscape(bowls((0, 0), (4, 0), third), nothing())
    with pytest.raises(PoolError, match="are on one line"):
        measure_landscape(bowls((1, 1), (1, 1), third), nothing())


# --- losses -------------------------------------------------------------------------------------------------


def test_the_plane_segments_and_barriers_of_a_bowl_are_its_formula() -> None:
    landscape = measure_landscape(
        bowls((0, 0), (3, 0), (0, 4)), nothing(), torch.zeros(4, dtype=torch.long), resolution=5, margin=0.5
    )
    assert (landscape.x[0], landscape.x[-1], landscape.y[0], landscape.y[-1]) == pytest.approx((-2, 5, -2, 6))
    assert landscape.loss == [[pytest.approx(bowl_loss(x, y), rel=1e-5) for x in landscape.x] for y in landscape.y]
    assert [segment.length for segment in landscape.segments] == pytest.approx([3, 4, 5])
    places = {"e0": (0, 0), "e1": (3, 0), "e2": (0, 4)}
    for segment in landscape.segments:
        start, end = np.array(places[segment.start]), np.array(places[segment.end])
        want = [bowl_loss(*((1 - t) * start + t * end)) for t in segment.positions]
        assert segment.loss == pytest.approx(want, rel=1e-5)
        assert segment.barrier is not None
        assert (segment.barrier.height, segment.barrier.at) == (0, 0)  # a bowl is convex
    (mean,) = landscape.of_kind("mean")
    assert (mean.x, mean.y, mean.distance, mean.loss) == pytest.approx((1, 4 / 3, 0, bowl_loss(1, 4 / 3)), abs=1e-6)
    assert "in a valley" in describe_landscape(landscape)[0]
    assert "no barrier" in describe_landscape(landscape)[1]


def test_a_hill_has_a_barrier_of_its_height_and_the_mean_on_its_ridge() -> None:
    landscape = measure_landscape(
        bowls((0, 0), (3, 0), (0, 4)), nothing(), torch.ones(4, dtype=torch.long), resolution=5, margin=0.5
    )

    def hill(x: float, y: float) -> float:  # label 1: the loss of the other class
        return bowl_loss(x, y) - (x - 1) ** 2 - (y - 1) ** 2

    longest = landscape.segments[2]
    want = [hill(3 - 3 * t, 4 * t) - ((1 - t) * hill(3, 0) + t * hill(0, 4)) for t in longest.positions]
    assert longest.barrier is not None
    assert longest.barrier.height == pytest.approx(max(want), rel=1e-5)
    assert longest.barrier.at == longest.positions[int(np.argmax(want))]
    words = describe_landscape(landscape)
    assert "on a ridge" in words[0]
    highest = max(segment.barrier.height for segment in landscape.segments if segment.barrier)
    assert f"highest barrier is {highest:.3f}" in words[1]


def test_a_barrier_has_the_interval_of_its_images() -> None:
    losses = [np.array([1.0, 3.0]), np.array([2.0, 6.0]), np.array([1.0, 5.0])]
    barrier = barrier_of([0, 0.5, 1], losses)
    rises = np.array([1.0, 2.0])  # 2 − 1 and 6 − 4
    half = 1.96 * rises.std(ddof=1) / np.sqrt(2)
    assert (barrier.height, barrier.at, barrier.low, barrier.high) == pytest.approx((1.5, 0.5, 1.5 - half, 1.5 + half))


@pytest.mark.parametrize("kind", FACTORIES)
def test_marks_are_the_experts_own_losses_and_the_mean_methods(kind: str) -> None:
    pool, images = make_pool(kind), pixels()
    landscape = survey(pool)
    answers = [pool.forward(row, images) for row in pool.bank] + [ms.create_method("mean", pool)(images)]
    for mark, logits in zip(landscape.marks, answers, strict=True):
        assert mark.loss == pytest.approx(float(F.cross_entropy(logits, LABELS)), rel=1e-6)
        assert mark.accuracy == float((logits.argmax(dim=-1) == LABELS).double().mean())
    for k, difference in enumerate(landscape.differences):
        each = F.cross_entropy(answers[3], LABELS, reduction="none") - F.cross_entropy(
            answers[k], LABELS, reduction="none"
        )
        assert difference.difference == pytest.approx(float(each.mean()), abs=1e-6)
        assert difference.high - difference.difference == pytest.approx(1.96 * float(each.std()) / 6**0.5, rel=1e-5)


@pytest.mark.parametrize("kind", FACTORIES)
def test_the_blend_at_an_experts_place_is_that_expert_bit_for_bit_however_many_threads(kind: str) -> None:
    pool = make_pool(kind)
    plane = Plane.through(pool, NAMES)
    surface = Surface(pool, pixels(), LABELS, batch_size=4, recalibrate_bn=False)
    blends = [plane.coefficients(*place) for place in (*plane.corner_coordinates, (0.3, 0.4), (-0.2, 0.1))]
    alone, together = (surface.at_blends(blends, workers=w, on_done=lambda: None) for w in (1, 3))
    for one, other in zip(alone, together, strict=True):
        assert np.array_equal(one.loss, other.loss)
    for k in range(3):
        assert np.array_equal(alone[k].loss, surface.at_weights(pool.bank[k]).loss)


def test_without_labels_the_loss_is_the_entropy() -> None:
    pool, images = make_pool("vit"), pixels()
    landscape = survey(pool, labels=None)
    assert (landscape.measure, landscape.accuracy) == ("entropy", None)
    for mark, row in zip(landscape.marks, pool.bank, strict=False):
        want = torch.distributions.Categorical(logits=pool.forward(row, images)).entropy().mean()
        assert mark.loss == pytest.approx(float(want), rel=1e-5)
        assert mark.accuracy is None
    assert "No labels were used" in describe_landscape(landscape)[-1]


def test_batchnorm_is_blended_or_re_estimated_from_every_batch() -> None:
    pool, images = make_pool("resnet"), pixels()
    plain = survey(pool, batch_size=3)
    fresh = survey(pool, batch_size=3, recalibrate_bn=True)
    before = pool.bank.clone()
    logits = [pool.forward(pool.bank[0].clone(), batch, recalibrate_bn=True) for batch in images.split(3)]
    assert fresh.marks[0].loss == pytest.approx(float(F.cross_entropy(torch.cat(logits), LABELS)), rel=1e-6)
    assert fresh.marks[0].loss != plain.marks[0].loss
    assert torch.equal(pool.bank, before)


def test_networks_without_finite_answers_are_holes_not_errors() -> None:
    """Far outside, a blended BatchNorm variance is negative, and its root no number."""
    pool = make_pool("hand_written")
    landscape = survey(pool, margin=40.0)
    assert any(value is None for row in landscape.loss for value in row)
    assert landscape.accuracy is not None
    assert [[v is None for v in row] for row in landscape.loss] == [
        [v is None for v in row] for row in landscape.accuracy
    ]
    assert "left blank" in describe_landscape(landscape)[-1]
    landscape_figure(landscape).canvas.draw()
    json.dumps(landscape.to_json(), allow_nan=False)


def test_bad_options_are_refused_with_a_sentence() -> None:
    pool = make_pool("vit")
    for options in ({"resolution": 1}, {"margin": -1}, {"batch_size": 0}, {"recalibrate_bn": 1}):
        with pytest.raises(InputError, match=next(iter(options))):
            measure_landscape(pool, pixels(), LABELS, **options)
    with pytest.raises(InputError, match="as many labels"):
        measure_landscape(pool, pixels(), LABELS[:3])
    with pytest.raises(InputError, match="at least two images"):
        measure_landscape(pool, pixels()[:1], LABELS[:1])


# --- the path -----------------------------------------------------------------------------------------------


def test_a_path_of_one_expert_lies_at_that_expert() -> None:
    pool = make_pool("hand_written")
    landscape = survey(pool, path=streamed(pool, "single_expert", expert="brest"))
    expert = landscape.marks[pool.index("brest")]
    assert len(landscape.path) == 3
    for point in landscape.path:
        assert (point.x, point.y, point.distance) == pytest.approx((expert.x, expert.y, 0), abs=1e-9)
        assert (point.loss, point.accuracy) == (expert.loss, expert.accuracy)
    assert "they are in the plane" in describe_landscape(landscape)[2]


def test_the_mean_methods_path_lies_at_the_mean(four: ms.ExpertPool) -> None:
    """Of four experts it is the pool's mean, off the plane through three of them."""
    landscape = survey(four, path=streamed(four, "mean"), experts=NAMES)
    (mean,), (whole,) = landscape.of_kind("mean"), landscape.of_kind("pool mean")
    assert mean.distance < 1e-5 < 0.01 < whole.distance
    point = landscape.path[0]
    assert (point.x, point.y, point.distance, point.loss) == (whole.x, whole.y, whole.distance, whole.loss)
    assert point.encoder_coefficients == [0.25] * 4


def test_a_head_of_its_own_takes_the_path_off_the_plane() -> None:
    pool = make_pool("hand_written")
    shared = survey(pool, path=streamed(pool, "entropy_adaptive", head="shared"))
    assert all(point.distance < 1e-5 for point in shared.path)
    plane = Plane.through(pool, NAMES)
    for point in shared.path:
        assert point.encoder_coefficients is not None
        assert plane.coefficients(point.x, point.y) == pytest.approx(point.encoder_coefficients, abs=1e-5)
    apart = survey(pool, path=streamed(pool, "entropy_adaptive", head="select"))
    assert all(point.distance > 0.01 for point in apart.path)
    assert "coefficients of their own" in describe_landscape(apart)[2]
    for point in apart.path:  # the nearest point of the plane, by least squares over both segments
        merged = pool.merge(torch.tensor(point.encoder_coefficients), torch.tensor(point.head_coefficients))
        keep = torch.ones(len(merged), dtype=torch.bool)
        keep[pool.layout.buffers] = False
        rows = pool.bank[:, keep].double().numpy()
        edges, target = (rows[1:] - rows[0]).T, merged[keep].double().numpy() - rows[0]
        _, squared, *_ = np.linalg.lstsq(edges, target, rcond=None)
        assert point.distance == pytest.approx(float(squared[0]) ** 0.5, rel=1e-6)


def test_head_rows_seen_and_learning_methods_walk_with_the_weights_they_answered_with() -> None:
    counts = {name: dict.fromkeys(make_pool("hand_written").classes, 5) for name in NAMES}
    counts["lyon"]["ring"] = 0
    pool = make_pool("hand_written", base=True)
    for name, own in counts.items():
        pool = pool.annotate(name, class_counts=own)
    images = make_images(6)
    for walk in (streamed(pool, "entropy_adaptive", head_rows="seen"), streamed(pool, "adamerging", learning_rate=0.1)):
        landscape = measure_landscape(pool, images, LABELS, resolution=2, path=walk)
        walk.method.reset()
        for point, batch in zip(landscape.path, walk.stream, strict=True):
            picked = torch.as_tensor(batch)
            step = walk.method.step(images[picked])
            own = measure_landscape(pool, images[picked], LABELS[picked], resolution=2, path=walk).path[point.batch]
            walk.method.reset()
            for earlier in walk.stream[: point.batch + 1]:
                walk.method.step(images[torch.as_tensor(earlier)])
            assert own.loss == pytest.approx(float(F.cross_entropy(step.logits, LABELS[picked])), rel=1e-5)


def test_an_ensemble_has_no_place_in_a_landscape() -> None:
    pool = make_pool("vit")
    pool = ms.ExpertPool.from_modules(
        {name: pool.network_with(row) for name, row in zip(pool.names, pool.bank, strict=True)},
        classes=pool.classes,
        preprocessing=ms.Preprocessing(size=(16, 16)),
    )
    with pytest.raises(InputError, match="not with one merged model"):
        survey(pool, path=streamed(pool, "ensemble"))


# --- the record and the figures -----------------------------------------------------------------------------


def test_the_record_survives_json_and_keeps_its_schema(walked: Landscape, tmp_path: Path) -> None:
    walked.save(tmp_path / "landscape.json")
    assert Landscape.load(tmp_path / "landscape.json") == walked
    jsonschema.validate(json.loads((tmp_path / "landscape.json").read_text()), SCHEMA)
    record = walked.to_json()
    (tmp_path / "other.json").write_text(json.dumps({**record, "schema_version": 2}))
    with pytest.raises(CheckpointError, match="schema_version 2"):
        Landscape.load(tmp_path / "other.json")
    with pytest.raises(CheckpointError, match="not a landscape"):
        Landscape.from_json({key: value for key, value in record.items() if key != "segments"})
    with pytest.raises(CheckpointError, match="not a landscape"):
        Landscape.from_json({**record, "marks": [{"name": "lyon"}]})


def test_words_follow_the_intervals(walked: Landscape) -> None:
    def sentence(*bounds: tuple[float, float]) -> str:
        differences = [LossDifference(n, sum(b) / 2, *b) for n, b in zip(walked.experts, bounds, strict=True)]
        return describe_landscape(replace(walked, differences=differences))[0]

    assert "in a valley: lower than every expert" in sentence((-3, -1), (-2, -1), (-9, -0.1))
    assert "on a ridge: higher than every expert" in sentence((1, 3), (0.1, 1), (2, 3))
    mixed = sentence((1, 3), (-1, 1), (-3, -2))
    assert "lower than turin; higher than lyon; not clearly different from brest" in mixed


def test_figures_show_every_expert_the_mean_the_path_and_units(walked: Landscape) -> None:
    figure, axes = new_figure(10, 5, columns=2)
    draw_plane(axes[0, 0], walked)
    draw_segments(axes[0, 1], walked)
    figure.canvas.draw()
    plane, segments = axes[0]
    assert {text.get_text() for text in plane.texts} == {*NAMES, "mean"}
    assert plane.get_aspect() == 1
    named = [text.get_text() for text in plane.get_legend().get_texts()]
    assert "entropy_adaptive on in_order" in named
    assert [line.get_label() for line in segments.lines[::2]] == ["lyon → brest", "lyon → turin", "brest → turin"]
    assert "nats" in segments.get_ylabel()
    assert "distance" in plane.get_xlabel()
    assert ("barrier" in "".join(text.get_text() for text in segments.texts)) == any(
        segment.barrier and segment.barrier.height > 0 for segment in walked.segments
    )


# --- the command line ---------------------------------------------------------------------------------------


def test_a_path_is_spelt_method_slash_stream() -> None:
    variant, stream = parse_path("entropy_adaptive(head=shared, momentum=0.9)/dirichlet:0.05")
    assert (str(variant), stream) == ("entropy_adaptive(head=shared, momentum=0.9)", "dirichlet:0.05")
    for wrong in (
        "entropy_adaptive",
        "men/iid",
        "mean/iidd",
        "mean,ties/iid",
        "entropy_adaptive(head=shared|select)/iid",
    ):
        with pytest.raises(MergestreamError):
            parse_path(wrong)


def test_the_command_writes_record_figures_and_words(consortium: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    names = sorted(path.name for path in (consortium / "pool").iterdir() if path.name != "base" and path.is_dir())
    arguments = ["landscape", str(consortium / "pool"), "--out", str(out), "--dataset", "table"]
    arguments += ["--root", str(consortium / "data"), "--target", names[0]]
    small = ["--resolution", "3", "--images", "8", "--stream-batch-size", "4", "--device", "cpu"]
    done = command(*arguments, *small, "--experts", ",".join(names), "--path", "entropy_adaptive/iid")
    assert done.returncode == 0, done.stderr
    assert "The mean of the three experts is" in done.stdout
    for kind in ("png", "pdf", "svg"):
        assert (out / "figures" / f"landscape.{kind}").stat().st_size > 1000
    record = json.loads((out / "landscape.json").read_text())
    jsonschema.validate(record, SCHEMA)
    landscape = Landscape.load(out / "landscape.json")
    assert (landscape.experts, landscape.images, landscape.measure) == (tuple(names), 8, "cross-entropy")
    assert landscape.provenance["trained_on_target"] == [names[0]]
    assert landscape.provenance["pool"] == ms.ExpertPool.load(consortium / "pool").fingerprint()
    assert landscape.provenance["path"]["stream"]["batches"] == len(landscape.path)
    assert not (out / "drift.json").exists()
    with mock.patch("mergestream.bench.landscape.landscape_run.run_landscape", return_value=landscape) as run:
        again = command(*arguments, *small, "--unlabelled", "--json")
    assert json.loads(again.stdout) == record
    assert not run.call_args.args[0].use_labels


def test_the_targets_own_expert_is_left_out_unless_it_is_named(consortium: Path, tmp_path: Path) -> None:
    request = LandscapeRequest(str(consortium / "pool"), DataRequest("table", str(consortium / "data")), "lyon")
    with pytest.raises(InputError, match="three different experts; got brest, turin"):
        run_landscape(request, tmp_path, quiet)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "nowhere"}, "no domain in 'table' called 'nowhere'"),
        ({"target": None}, "Name the target: --target and one of 'brest', 'lyon', 'turin'"),
        ({"experts": ("lyn", "brest", "turin")}, "Did you mean 'lyon'"),
        ({"path": "mean"}, "method/stream"),
        ({"path": "temporal/mean"}, "no method called"),
        ({"resolution": 1}, "'resolution' is a whole number of at least 2"),
        ({"device": "tpu"}, "tpu"),
    ],
)
def test_wrong_usage_is_a_sentence(consortium: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    data = DataRequest("table", str(consortium / "data"))
    arguments = {"target": "lyon", "experts": ("brest", "lyon", "turin"), **changes}
    with pytest.raises(MergestreamError, match=message):
        run_landscape(LandscapeRequest(str(consortium / "pool"), data, **arguments), tmp_path, quiet)
