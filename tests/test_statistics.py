"""What sites ship with their experts, what methods need, and how they refuse."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import mergestream as ms
from conftest import CLASSES, NAMES, HandWritten, make_base, make_experts, make_images, make_pool, micro_vit
from mergestream.methods import METHODS
from mergestream.pool.statistics import grams

IMAGES = {name: make_images(6, seed=60 + k) for k, name in enumerate(NAMES)}
FILE = "statistics.safetensors"


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[ms.ExpertPool, Path]:
    """A pool with statistics of all kinds, and its folder."""
    pool = ms.measure_statistics(make_pool("vit", base=True), IMAGES, ["gram", "fisher_exact", "gram_pp"])
    folder = tmp_path_factory.mktemp("measured") / "pool"
    pool.save(folder)
    return pool, folder


@pytest.fixture
def saved(measured: tuple[ms.ExpertPool, Path], tmp_path: Path) -> Path:
    return shutil.copytree(measured[1], tmp_path / "pool")


def load(folder: Path) -> ms.ExpertPool:
    return ms.ExpertPool.load(folder, network=micro_vit())


@pytest.mark.parametrize("name", ["regmean", "regmean_pp", "fisher"])
def test_statistics_travel_with_the_expert_folder(measured: tuple[ms.ExpertPool, Path], saved: Path, name: str) -> None:
    assert all((saved / expert / FILE).is_file() for expert in NAMES)
    pool = measured[0]
    batch = make_images(5)
    expected = ms.create_method(name, pool)(batch)
    assert torch.equal(ms.create_method(name, load(saved))(batch), expected)
    load(saved).save(saved.with_name("again"))
    assert torch.equal(ms.create_method(name, load(saved.with_name("again")))(batch), expected)


def test_statistics_follow_the_pool_without_an_expert(saved: Path) -> None:
    pool = load(saved).without("brest")
    expected = ms.measure_statistics(make_pool("vit", base=True).without("brest"), {n: IMAGES[n] for n in pool.names})
    for name in ("regmean", "fisher"):
        batch = make_images(4)
        assert torch.equal(ms.create_method(name, pool)(batch), ms.create_method(name, expected)(batch))


def test_a_site_measures_its_own_expert_alone_and_sends_the_folder(saved: Path, tmp_path: Path) -> None:
    whole = load(saved)
    for name in NAMES:
        (saved / name / FILE).unlink()
    for name in NAMES:  # at each site: a pool of one
        alone = load(saved).without(*(other for other in NAMES if other != name))
        ms.measure_statistics(alone, {name: IMAGES[name]}, ["gram"]).save(tmp_path / name)
        shutil.copy(tmp_path / name / name / FILE, saved / name / FILE)
    batch = make_images(4)
    assert torch.equal(ms.create_method("regmean", load(saved))(batch), ms.create_method("regmean", whole)(batch))


def test_the_file_holds_no_image_and_says_what_it_is_of(saved: Path) -> None:
    with safe_open(str(saved / "lyon" / FILE), framework="pt") as file:
        about, names = json.loads(file.metadata()["mergestream"]), list(file.keys())
    card = json.loads((saved / "lyon" / "expert.json").read_text())
    kinds = {name.split("/")[0] for name in names}
    assert about["schema_version"] == 1
    assert about["weights_sha256"] == card["weights_sha256"]
    assert about["images"] == dict.fromkeys(kinds, 6)
    assert {kind.split("-")[0] for kind in kinds} == {"gram", "fisher_exact", "gram_pp"}


def rewrite(path: Path, change, about_change=lambda about: about) -> None:
    with safe_open(str(path), framework="pt") as file:
        about = json.loads(file.metadata()["mergestream"])
    tensors = load_file(str(path))
    change(tensors)
    save_file(tensors, str(path), metadata={"mergestream": json.dumps(about_change(about))})


@pytest.mark.parametrize(
    ("method", "change", "about", "message"),
    [
        ("regmean", lambda t: None, lambda a: {**a, "weights_sha256": "0" * 64}, "other weights than those of 'brest'"),
        ("regmean", lambda t: None, lambda a: {**a, "schema_version": 9}, "schema_version 9"),
        ("regmean", lambda t: None, lambda a: {**a, "images": 3}, "how many images"),
        ("regmean", lambda t: None, lambda a: [], "schema_version None"),
        ("regmean", lambda t: t["gram/head.weight"].fill_(float("nan")), lambda a: a, "of 'brest' holds NaN"),
        (
            "regmean",
            lambda t: t.update({"gram/head.weight": torch.ones(1, 3, 3)}),
            lambda a: a,
            "fit a weight",
        ),
        ("regmean", lambda t: t.update({"gram/head.weight": torch.ones(4)}), lambda a: a, "fit a weight"),
        ("fisher", lambda t: t["fisher_exact/head.bias"].fill_(-1), lambda a: a, "at least 0"),
        ("fisher", lambda t: t["fisher_exact/head.bias"].fill_(float("inf")), lambda a: a, "must be finite"),
        ("fisher", lambda t: t.pop("fisher_exact/head.bias"), lambda a: a, "head.bias"),
        ("fisher", lambda t: t.update({"fisher_exact/head.bias": torch.ones(2)}), lambda a: a, "shaped"),
    ],
)
def test_damaged_statistics_are_refused(saved: Path, method: str, change, about, message: str) -> None:
    rewrite(saved / "brest" / FILE, change, about)
    pool = load(saved)
    assert torch.isfinite(ms.create_method("mean", pool)(make_images(2))).all()  # who does not need them does not care
    with pytest.raises(ms.MergestreamError, match=message):
        ms.create_method(method, pool)(make_images(2))


def test_a_statistics_file_that_is_none_is_refused(saved: Path) -> None:
    (saved / "brest" / FILE).write_bytes(b"no safetensors")
    with pytest.raises(ms.MergestreamError, match="not a safetensors file"):
        ms.create_method("regmean", load(saved))


def test_statistics_are_part_of_a_run_s_identity(saved: Path) -> None:
    pool = load(saved)
    first = ms.create_method("regmean", pool)
    other = ms.create_method("regmean", ms.measure_statistics(pool, {"lyon": make_images(6, seed=1)}, ["gram"]))
    assert first.provenance != other.provenance
    assert first.provenance["pool"] == other.provenance["pool"]
    with pytest.raises(ms.MergestreamError, match="another statistics"):
        other.load_state_dict(first.state_dict())


def test_the_base_is_part_of_a_run_s_identity() -> None:
    experts = make_experts(micro_vit)
    pools = [ms.ExpertPool.from_modules(experts, base=make_base(micro_vit, seed)) for seed in (0, 1)]
    arithmetic = [ms.create_method("task_arithmetic", pool).provenance for pool in pools]
    means = [ms.create_method("mean", pool).provenance for pool in pools]
    assert arithmetic[0] != arithmetic[1]
    assert means[0] == means[1]


def test_measuring_again_replaces_one_kind_and_keeps_the_others() -> None:
    pool = ms.measure_statistics(make_pool("vit"), IMAGES, ["gram", "fisher_mergelm"])
    again = ms.measure_statistics(pool, {"lyon": make_images(3)}, ["gram"])
    before, after = pool.statistics[0], again.statistics[0]
    assert after.images == {"fisher_mergelm": 6, "gram": 3}
    assert after.fingerprint("fisher_mergelm") == before.fingerprint("fisher_mergelm")
    assert after.fingerprint("gram") != before.fingerprint("gram")
    assert again.statistics[1] is pool.statistics[1]


@pytest.mark.parametrize(
    ("images", "kinds", "message"),
    [
        ({"lyon": torch.zeros(0, 3, 16, 16)}, ["gram"], "at least one image"),
        ({"lyon": []}, ["fisher_mergelm"], "at least one image"),
        ({"lyon": "images"}, ["gram"], "got str"),
        ({"lyon": None}, ["gram"], "got NoneType"),
        ({"lyon": torch.tensor(3.0)}, ["gram"], "4-d|\\[B"),
        ({"lyon": [3]}, ["gram"], "got int"),
        ({}, ["gram"], "by its name"),
        (None, ["gram"], "by its name"),
        ({"lyon": IMAGES["lyon"]}, [], "Which kinds"),
        ({"lyon": IMAGES["lyon"]}, None, "Which kinds"),
        ({"lion": IMAGES["lyon"]}, ["gram"], "Did you mean 'lyon'"),
        ({"lyon": IMAGES["lyon"]}, ["grams"], "Did you mean 'gram'"),
        ({"lyon": torch.zeros(2, 1, 16, 16)}, ["gram"], "channels"),
        ({"lyon": torch.full((2, 3, 16, 16), float("nan"))}, ["gram"], "NaN or Inf for image 0"),
        ({"lyon": torch.full((2, 3, 16, 16), float("nan"))}, ["fisher_exact"], "NaN or Inf for image 0"),
        (dict.fromkeys(NAMES, torch.full((2, 3, 16, 16), float("nan"))), ["gram_pp"], "NaN or Inf for image 0"),
        ({"lyon": torch.zeros(2, 3, 17, 17)}, ["fisher_mergelm"], "cannot take a batch"),
        (dict.fromkeys(NAMES, torch.zeros(2, 3, 17, 17)), ["gram_pp"], "cannot take a batch"),
    ],
)
def test_bad_images_are_refused_when_measuring(images: dict, kinds: list[str], message: str) -> None:
    with pytest.raises(ms.MergestreamError, match=message):
        ms.measure_statistics(make_pool("vit"), images, kinds)


@pytest.mark.parametrize(
    "settings",
    [
        {"ratio": 2},
        {"ratio": float("nan")},
        {"ratio": "x"},
        {"ridge": -1.0},
        {"ridge": None},
        {"convolutions": "no"},
        {"batch_size": 0},
        {"batch_size": 2.5},
        {"batch_size": None},
    ],
)
def test_bad_settings_are_refused_when_measuring(settings: dict) -> None:
    with pytest.raises(ms.MergestreamError, match=next(iter(settings))):
        ms.measure_statistics(make_pool("vit"), IMAGES, ["gram_pp"], **settings)


def test_settings_are_the_same_however_the_number_is_written() -> None:
    pool = ms.measure_statistics(make_pool("vit"), IMAGES, ["gram_pp"], ratio=1, ridge=np.float64(0.5))
    ms.create_method("regmean_pp", pool, ratio=1.0, ridge=0.5)
    with pytest.raises(ms.MergestreamError, match="another pool or of other options"):
        ms.create_method("regmean_pp", pool)


def test_images_may_come_in_batches_as_a_loader_gives_them() -> None:
    pool = make_pool("vit")
    at_once = ms.measure_statistics(pool, IMAGES, "gram", batch_size=2)
    labels = torch.zeros(2)
    streamed = ms.measure_statistics(
        pool, {name: ([part, labels] for part in own.split(2)) for name, own in IMAGES.items()}, (k for k in ["gram"])
    )
    for one, other in zip(at_once.statistics, streamed.statistics, strict=True):
        assert one.fingerprint("gram") == other.fingerprint("gram")


def test_stale_statistics_can_be_measured_again(saved: Path) -> None:
    rewrite(saved / "brest" / FILE, lambda t: None, lambda a: {**a, "weights_sha256": "0" * 64})
    pool = ms.measure_statistics(load(saved), {"brest": IMAGES["brest"]}, ["gram"])
    pool.save(saved)
    assert torch.isfinite(ms.create_method("regmean", load(saved))(make_images(2))).all()


def test_a_gram_that_one_expert_lacks_is_refused(saved: Path) -> None:
    rewrite(saved / "brest" / FILE, lambda t: t.pop("gram/head.weight"))
    with pytest.raises(ms.MergestreamError, match=r"no Gram matrix of 'head\.weight'"):
        ms.create_method("regmean", load(saved))(make_images(2))


def test_a_file_replaced_under_a_loaded_pool_is_noticed(saved: Path) -> None:
    method = ms.create_method("regmean", load(saved))
    ms.measure_statistics(load(saved), {"lyon": make_images(6, seed=1)}, ["gram"]).save(saved)
    with pytest.raises(ms.MergestreamError, match="changed or removed while it was in use"):
        method(make_images(2))
    assert torch.isfinite(ms.create_method("regmean", load(saved))(make_images(2))).all()


def test_only_statistics_are_statistics() -> None:
    with pytest.raises(ms.MergestreamError, match="got int for 'lyon'"):
        make_pool("vit").with_statistics({"lyon": 3})


@pytest.mark.parametrize("name", ["mean", "ties", "adamerging", "regmean", "fisher", "regmean_pp"])
def test_the_merged_model_can_be_taken_out(vit_pool: ms.ExpertPool, name: str) -> None:
    method, batch = ms.create_method(name, vit_pool), make_images(4)
    answer = method(batch)
    network = method.network()
    with torch.no_grad():
        assert torch.equal(network(vit_pool.prepare(batch)), answer)
        network.head.weight.zero_()  # its weights are its own
    assert torch.equal(vit_pool.forward(method.merged_weights(), batch), answer)
    assert not any(parameter.requires_grad for parameter in network.parameters())


@pytest.mark.parametrize("name", ["entropy_adaptive", "adamerging", "regmean", "fisher"])
def test_a_state_that_is_none_is_refused_and_changes_nothing(vit_pool: ms.ExpertPool, name: str) -> None:
    options = {"statistics": "target"} if name in ("regmean", "fisher") else {}
    method = ms.create_method(name, vit_pool, **options)
    method.step(make_images(3))
    good = method.state_dict()
    expected = ms.create_method(name, vit_pool, **options)
    expected.load_state_dict(good)
    for bad in (None, "x", [], {**good, "state": None}, {**good, "state": {"lambdas": torch.zeros(7), "grams": [{}]}}):
        if name in ("entropy_adaptive", "fisher") and isinstance(bad, dict) and bad["state"]:
            continue  # these know neither key
        with pytest.raises(ms.MergestreamError):
            method.load_state_dict(bad)
    assert torch.equal(method(make_images(3, seed=2)), expected(make_images(3, seed=2)))


# --- what methods need ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "needs"),
    [
        ("entropy_adaptive", {}, ()),
        ("mean", {}, ()),
        ("ensemble", {}, ()),
        ("task_arithmetic", {}, ("base",)),
        ("ties", {}, ("base",)),
        ("adamerging", {}, ("base", "gradients")),
        ("fisher", {}, ("statistics",)),
        ("fisher", {"statistics": "target"}, ("gradients",)),
        ("regmean", {}, ("statistics",)),
        ("regmean", {"statistics": "target"}, ()),
        ("regmean_pp", {}, ("statistics",)),
        ("regmean_pp", {"statistics": "target"}, ()),
    ],
)
def test_every_method_says_what_it_needs(vit_pool: ms.ExpertPool, name: str, options: dict, needs: tuple) -> None:
    assert ms.create_method(name, vit_pool, **options).needs == needs


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("task_arithmetic", {}, r"'task_arithmetic' needs the weights that all experts started from.*base="),
        ("ties", {}, r"'ties' needs the weights that all experts started from.*'base'"),
        ("adamerging", {}, r"'adamerging' needs the weights that all experts started from"),
        ("fisher", {}, r"lyon, brest, turin shipped none.*measure_statistics\(.*'fisher_exact'.*statistics='target'"),
        ("fisher", {"fisher": "mergelm"}, r"'fisher_mergelm'"),
        ("regmean", {}, r"shipped none.*measure_statistics\(.*'gram'.*statistics='target'"),
        ("regmean_pp", {}, r"shipped none.*'gram_pp'\], ratio=1.0, ridge=0.01, convolutions=True"),
        ("mean", {"variant": "all_runs"}, r"runs that the experts were chosen from.*\.candidates.*with_candidates"),
        ("mean", {"head_rows": "seen"}, r"card of 'lyon' has no class_counts"),
        ("ties", {"head_rows": "seen"}, "started from"),
        ("entropy_adaptive", {"head_rows": "seen"}, "class_counts"),
    ],
)
def test_a_method_without_what_it_needs_refuses_and_tells_how_to_get_it(name: str, options: dict, message: str) -> None:
    with pytest.raises(ms.MergestreamError, match=message):
        ms.create_method(name, make_pool("vit"), **options)


class NoGradients(HandWritten):
    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images)


@pytest.mark.parametrize(("name", "options"), [("adamerging", {}), ("fisher", {"statistics": "target"})])
def test_a_network_without_gradients_is_refused_by_those_who_need_them(name: str, options: dict) -> None:
    pool = ms.ExpertPool.from_modules(
        make_experts(NoGradients),
        classes=CLASSES,
        base=make_base(NoGradients),
        preprocessing=ms.Preprocessing(size=(16, 16)),
    )
    method = ms.create_method(name, pool, **options)
    with pytest.raises(ms.MergestreamError, match=r"needs gradients.*forward passes only"):
        method.step(make_images(3))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("task_arithmetic", {"lambda": "2/K"}, "one number, '1/K', or 3"),
        ("task_arithmetic", {"lambda": [0.1, 0.2]}, "3: one per expert"),
        ("task_arithmetic", {"lambda": float("nan")}, "finite number"),
        ("task_arithmetic", {"lamda": 0.3}, "Did you mean 'lambda'"),
        ("task_arithmetic", {"base_head": "none"}, "choice for 'base_head'"),
        ("ties", {"lambda": [0.1, 0.2, 0.3]}, "one number or '1/K'"),
        ("ties", {"keep": 0.0}, "keep"),
        ("ties", {"keep": 20}, "above 0|of at most 1"),
        ("ties", {"keep": 10**400}, "of at most 1"),
        ("ties", {"merge": np.array(["mean", "sum"])}, "one of mean, sum, max"),
        ("ties", {"keep_": 0.3}, "no option of 'ties' called 'keep_'"),
        ("task_arithmetic", {"lambda": "0.3"}, "one number, '1/K', or 3"),
        ("mean", {"runs": ["a", "a"]}, "names something twice"),
        ("ties", {"merge": "median"}, "choice for 'merge'"),
        ("ties", {"trim_scope": "layer"}, "choice for 'trim_scope'"),
        ("adamerging", {"granularity": "tensor"}, "choice for 'granularity'"),
        ("adamerging", {"learning_rate": -1.0}, "learning_rate"),
        ("adamerging", {"steps": 0}, "steps"),
        ("adamerging", {"clamp": 1}, "clamp"),
        ("fisher", {"fisher": "soft"}, "choice for 'fisher'"),
        ("fisher", {"floor": 0.0}, "floor"),
        ("fisher", {"statistics": "both"}, "choice for 'statistics'"),
        ("fisher", {"examples": 0}, "examples"),
        ("regmean", {"ratio": 1.5}, "ratio"),
        ("regmean", {"ridge": -0.1}, "ridge"),
        ("regmean_pp", {"convolutions": "no"}, "convolutions"),
        ("mean", {"variant": "best"}, "choice for 'variant'"),
        ("mean", {"head_rows": "some"}, "choice for 'head_rows'"),
    ],
)
def test_wrong_options_are_refused(vit_pool: ms.ExpertPool, name: str, options: dict, message: str) -> None:
    with pytest.raises(ms.MergestreamError, match=message):
        ms.create_method(name, vit_pool, **options)


def test_what_is_said_of_an_expert_is_saved_with_it(tmp_path: Path) -> None:
    pool = make_pool("vit").annotate("brest", class_counts={"ring": 4}, domain="Brest", temperature=1.5)
    pool.save(tmp_path / "pool")
    card = load(tmp_path / "pool").cards[1]
    assert (card.class_counts, card.domain, card.temperature) == ({"ring": 4}, "Brest", 1.5)
    assert make_pool("vit").cards[1].domain is None
    for details, message in (
        ({"class_count": {}}, "Did you mean 'class_counts'"),
        ({"classes": ("a",)}, "no detail of an expert"),
        ({"class_counts": {"ring": -1}}, "whole numbers by class"),
        ({"class_counts": {"rings": 3}}, "'rings', which is not one of its classes"),
        ({"temperature": 0}, "temperature"),
    ):
        with pytest.raises(ms.MergestreamError, match=message):
            pool.annotate("lyon", **details)
    with pytest.raises(ms.MergestreamError, match="Did you mean 'lyon'"):
        pool.annotate("lion", domain="x")


# --- head rows of classes an expert never saw --------------------------------------------------------------


def with_counts(pool: ms.ExpertPool, seen: dict[str, list[int]]) -> ms.ExpertPool:
    for name, counts in seen.items():
        pool = pool.annotate(name, class_counts={c: n for c, n in zip(CLASSES, counts, strict=True) if n})
    return pool


SEEN = {"lyon": [5, 5, 5, 0, 0], "brest": [5, 5, 0, 5, 0], "turin": [5, 5, 0, 0, 0]}


@pytest.mark.parametrize("kind", ["vit", "resnet", "hand_written"])
def test_the_mean_of_a_head_row_is_over_the_experts_that_saw_the_class(kind: str) -> None:
    pool = with_counts(make_pool(kind), SEEN)
    shares = [0.5, 0.3, 0.2]
    views = pool.layout.views(ms.create_method("mean", pool, coefficients=shares, head_rows="seen").merged_weights())
    plain = pool.layout.views(ms.create_method("mean", pool, coefficients=shares).merged_weights())
    head = next(n for n, m in pool.template.module.named_modules() if isinstance(m, nn.Linear) and len(m.weight) == 5)
    for part in ("weight", "bias"):
        rows = torch.stack([pool.layout.views(row)[f"{head}.{part}"] for row in pool.bank])
        for c, saw in enumerate(([0, 1, 2], [0, 1, 2], [0], [1], [0, 1, 2])):  # the last class nobody saw
            expected = sum(shares[k] * rows[k, c] for k in saw) / sum(shares[k] for k in saw)
            torch.testing.assert_close(views[f"{head}.{part}"][c], expected, rtol=1e-5, atol=1e-5)
    for name, view in plain.items():
        if not name.startswith(f"{head}."):
            assert torch.equal(view, views[name])


@pytest.mark.parametrize("name", [n for n in METHODS if "head_rows" in METHODS[n].option_names()])
def test_noise_in_unseen_rows_does_not_reach_any_merged_head(name: str) -> None:
    """Change what experts say of classes they never saw: with head_rows='seen' the merged model stays as it was."""
    if name in ("entropy_adaptive", "surgery"):
        pytest.skip("it learns from the experts' own answers; see the next test")
    answers = []
    for noise in (0.0, 3.0):
        experts = make_experts(micro_vit, head_noise=0.1)
        with torch.no_grad():
            for site, module in experts.items():
                for c, count in enumerate(SEEN[site]):
                    if not count and c != 4:
                        module.head.weight[c] += noise
        pool = ms.ExpertPool.from_modules(experts, classes=CLASSES, base=make_base(micro_vit))
        pool = ms.measure_statistics(with_counts(pool, SEEN), IMAGES, ["gram", "gram_pp"])
        options = {"statistics": "source"} if name.startswith("regmean") else {}
        if name == "fisher":  # information depends on the noisy answers; here only the averaging is at stake
            pool = pool.with_statistics(flat_information(pool))
        if name == "adamerging":
            options = {"learning_rate": 0.0}
        method = ms.create_method(name, pool, head_rows="seen", **options)
        answers.append(method(make_images(6)))
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-4, atol=1e-4)


def flat_information(pool: ms.ExpertPool) -> dict:
    from mergestream.pool.checkpoint import Statistics

    ones = {f"fisher_exact/{entry.name}": torch.ones(entry.shape) for entry in pool.layout.parameters}
    return {name: Statistics(ones, {"fisher_exact": 1}) for name in pool.names}


def test_entropy_adaptive_weighs_a_row_by_those_who_saw_it() -> None:
    pool = with_counts(make_pool("vit"), SEEN)
    method = ms.create_method("entropy_adaptive", pool, head_rows="seen")
    step = method.step(make_images(6))
    views = pool.layout.views(method.merged_weights())
    rows = torch.stack([pool.layout.views(row)["head.weight"] for row in pool.bank])
    shares = step.head_coefficients
    torch.testing.assert_close(views["head.weight"][2], rows[0, 2], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        views["head.weight"][0], torch.einsum("k,kd->d", shares, rows[:, 0]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("inputs", [8, 9, 37])
def test_a_gram_matrix_computed_in_half_is_whole(inputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grams, "LARGE", 8)
    rows = torch.randn(2, 11, inputs, generator=torch.Generator().manual_seed(inputs))
    mean = grams.gram_of([rows[:, :4], rows[:, 4:]]).mean
    torch.testing.assert_close(mean.double(), torch.einsum("gni,gnj->gij", rows.double(), rows.double()) / 11)
    assert torch.equal(mean, mean.transpose(-1, -2))
