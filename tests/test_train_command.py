"""`mergestream train`: a consortium or one site, candidates and choice, killed and resumed to the same bits."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import mergestream as ms
from benching import NETWORK, command
from mergestream.data.datasets import DataRequest
from mergestream.data.datasets.standins.drawing import CLASSES, SITES, write_table
from mergestream.networks.architecture import create_network
from mergestream.pool.expert_card import read_card
from mergestream.runtime import state_file
from mergestream.runtime.files import write_atomically
from mergestream.runtime.parallel import quiet
from mergestream.runtime.state_file import SavedState
from mergestream.training import Recipe, fit
from mergestream.training.augmentation import augment, draw
from mergestream.training.expert_training import probe
from mergestream.training.heads import DRAWN, HEAD_INITS, add_dropout
from mergestream.training.recipe import CHOICES, TrainPlan, parse_settings
from mergestream.training.stepper import set_rate
from mergestream.training.training_loop import balanced_loss, class_weights
from mergestream.training.training_run import run_training, work_folder

ARGUMENTS = tuple(sorted(NETWORK.items()))
QUICK = Recipe(steps=12, batch_size=8, learning_rate=1e-3, validate_every=4, accelerator="cpu")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_table(folder)
    return folder


def plan_for(data: Path, *settings: Recipe, **more) -> TrainPlan:
    request = DataRequest("table", str(data))
    return TrainPlan(request, "vit_tiny_patch16_224", settings or (QUICK,), ARGUMENTS, **{"init": "random", **more})


def line(data: Path, out: Path, *more: str, steps: int = 8) -> list[str]:
    network = [word for name, value in NETWORK.items() for word in ("--arg", f"{name}={value}")]
    fixed = ["--dataset", "table", "--root", str(data), "--network", "vit_tiny_patch16_224", "--init", "random"]
    quick = ["--steps", str(steps), "--batch-size", "8", "--learning-rate", "1e-3"]
    often = ["--validate-every", "2", "--keep-every", "0"]
    return ["train", *fixed, *network, *quick, *often, "--settings", "dropout=0|0.1", "--out", str(out), *more]


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "pool"
    result = command(*line(data, out, "--jobs", "1", "--keep-candidates", "--statistics", "8"))
    assert result.returncode == 0, result.stderr
    for site in SITES:
        assert f"{site}: accuracy" in result.stdout
    return out


def test_a_pool_is_ready_for_everything(trained: Path, data: Path, tmp_path: Path) -> None:
    pool = ms.ExpertPool.load(trained)
    assert pool.names == SITES
    assert pool.classes == CLASSES
    assert pool.base is not None
    assert len(pool.candidates) == 2 * len(SITES)
    for card, statistics in zip(pool.cards, pool.statistics, strict=True):
        assert card.domain == card.name
        assert sum(card.class_counts.values()) == 18
        assert card.temperature > 0
        assert set(statistics.images) == {"gram", "fisher_exact", "fisher_mergelm"}
    records = json.loads((work_folder(trained) / "candidates.json").read_text())["candidates"]
    assert len(records) == 2 * len(SITES)
    for site in SITES:  # the candidate with the lowest plain cross-entropy on the site's own validation split
        mine = [each for each in records if each["domain"] == site]
        lowest = min(each["validation_loss"] for each in mine)
        assert read_card(trained / site).metrics["validation"]["nll"] == lowest
    more = ["--methods", "all", "--jobs", "1", "--batch-size", "4", "--out", str(tmp_path / "runs")]
    result = command("bench", "--dataset", "table", "--root", str(data), "--pool", str(trained), *more)
    assert result.returncode == 0, result.stderr
    assert "Leakage" not in result.stdout


@pytest.mark.slow
def test_a_killed_training_continues_to_the_same_pool(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "pool"
    process = subprocess.Popen(
        [sys.executable, "-m", "mergestream", *line(data, out, "--jobs", "2", steps=60)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    candidates, deadline = work_folder(out) / "candidates", time.monotonic() + 120
    while not list(candidates.glob(".*.unfinished")) if candidates.exists() else True:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (out / SITES[-1]).exists()  # it was in the middle
    for folder, jobs in ((out, "2"), (tmp_path / "uninterrupted", "1")):
        result = command(*line(data, folder, "--jobs", jobs, steps=60))
        assert result.returncode == 0, result.stderr
    assert ms.ExpertPool.load(out).fingerprint() == ms.ExpertPool.load(tmp_path / "uninterrupted").fingerprint()


def test_one_site_alone_makes_the_same_expert_from_the_base(trained: Path, data: Path, tmp_path: Path) -> None:
    shutil.copytree(trained / "base", tmp_path / "site" / "base")
    result = command(*line(data, tmp_path / "site", "--domain", "lyon", "--jobs", "1"))
    assert result.returncode == 0, result.stderr
    assert read_card(tmp_path / "site" / "lyon").weights_sha256 == read_card(trained / "lyon").weights_sha256
    assert sorted(path.name for path in (tmp_path / "site").iterdir()) == ["base", "lyon"]
    with pytest.raises(ms.MergestreamError, match=r"base is missing: one site trains from the consortium's base"):
        run_training(plan_for(data, domain="lyon"), tmp_path / "none", quiet)
    with pytest.raises(ms.MergestreamError, match="no domain in 'table' called 'nice'"):
        run_training(plan_for(data, domain="nice"), tmp_path / "site", quiet)


@pytest.mark.parametrize("head_init", HEAD_INITS)
def test_where_heads_start(head_init: str, data: Path, tmp_path: Path) -> None:
    run_training(
        plan_for(data, replace(QUICK, steps=1, learning_rate=1e-9), head_init=head_init), tmp_path / "p", quiet
    )
    pool = ms.ExpertPool.load(tmp_path / "p")
    encoder, heads = pool.bank[:, : pool.layout.encoder_size], pool.bank[:, pool.layout.encoder_size :]
    start = pool.base[pool.layout.encoder_size :]
    assert torch.allclose(encoder, pool.base[: pool.layout.encoder_size].expand_as(encoder), atol=1e-6)
    cosine = torch.nn.functional.cosine_similarity(heads[0], heads[1], dim=0)
    if head_init in DRAWN:
        assert abs(float(cosine)) < 0.5
        assert float(heads.std()) == pytest.approx(DRAWN[head_init] * float(start.std()), rel=0.3)
    else:
        assert torch.allclose(heads, start.expand_as(heads), atol=1e-6)
    assert (start.abs().max() == 0) == (head_init == "zero")
    if head_init == "linear_probe":
        dataset = ms.load_dataset("table", root=data, size=16, interpolation="bicubic")
        own = [probe(work_folder(tmp_path / "p") / "base", dataset[site], QUICK) for site in SITES]
        mean = torch.stack([each["head.weight"] for each in own]).mean(dim=0)
        torch.testing.assert_close(pool.layout.views(pool.base)["head.weight"], mean, rtol=1e-3, atol=1e-4)


def test_another_base_in_the_folder_is_refused(data: Path, tmp_path: Path) -> None:
    run_training(plan_for(data), tmp_path / "p", quiet)
    with pytest.raises(ms.MergestreamError, match="The existing base has head_init 'shared'"):
        run_training(plan_for(data, head_init="zero"), tmp_path / "p", quiet)


def test_a_setting_that_fails_is_told_and_the_others_go_on(data: Path, tmp_path: Path) -> None:
    bad = replace(QUICK, learning_rate=1e30, optimiser="sgd")
    trained = run_training(plan_for(data, bad, QUICK), tmp_path / "p", quiet)
    for card, candidates in trained:
        assert [bool(candidate.failed) for candidate in candidates] == [True, False]
        assert "lower learning_rate" in candidates[0].failed
        assert card.recipe["learning_rate"] == QUICK.learning_rate
    with pytest.raises(ms.MergestreamError, match="No setting could be trained at 'brest'"):
        run_training(plan_for(data, bad), tmp_path / "q", quiet)


def test_a_full_disk_ends_its_candidate_and_no_other(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing the state of one of two settings meets a device that is truly full."""
    written = state_file.write_state

    def write(path: Path, state: dict) -> None:
        if state["optimiser"]["param_groups"][0]["weight_decay"]:
            write_atomically(path, lambda _: os.write(os.open("/dev/full", os.O_WRONLY), b"state"))
        written(path, state)

    monkeypatch.setattr(state_file, "write_state", write)
    trained = run_training(plan_for(data, QUICK, replace(QUICK, weight_decay=0.1)), tmp_path / "p", quiet)
    for card, (good, full) in trained:
        assert good.failed is None
        assert "No space left on device" in full.failed
        assert card.recipe["weight_decay"] == 0
    records = json.loads((work_folder(tmp_path / "p") / "candidates.json").read_text())["candidates"]
    assert sum("No space left" in (each["failed"] or "") for each in records) == len(SITES)


@pytest.mark.parametrize("schedule", CHOICES["schedule"])
def test_an_interrupted_fit_goes_on_to_the_same_bits(schedule: str, data: Path, tmp_path: Path) -> None:
    lyon = ms.load_dataset("table", root=data, size=16, interpolation="bicubic")["lyon"]
    recipe = replace(QUICK, dropout=0.3, schedule=schedule, optimiser="adamw", loss="weighted", label_smoothing=0.1)

    def network():
        torch.manual_seed(0)
        return create_network("vit_tiny_patch16_224", num_classes=3, **NETWORK)

    whole = fit(network(), lyon, recipe)
    taken: list[int] = []

    def tick() -> None:
        taken.append(1)
        if len(taken) == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(network(), lyon, recipe, tick, checkpoint=SavedState(tmp_path / "unfinished"))
    again = fit(network(), lyon, recipe, lambda: taken.append(1), checkpoint=SavedState(tmp_path / "unfinished"))
    assert len(taken) == 7 + 12 - 4  # from the last validation, at step 4
    assert again.history == whole.history
    assert all(torch.equal(again.state[name], tensor) for name, tensor in whole.state.items())
    assert not (tmp_path / "unfinished").exists()


def test_a_kill_costs_the_seconds_asked_for_and_no_more_is_written(data: Path, tmp_path: Path) -> None:
    lyon = ms.load_dataset("table", root=data, size=16, interpolation="bicubic")["lyon"]
    seen: list[bool] = []
    for seconds in (0.0, 3600.0):
        checkpoint = SavedState(tmp_path / "unfinished", seconds)
        torch.manual_seed(0)
        network = create_network("vit_tiny_patch16_224", num_classes=3, **NETWORK)
        fit(
            network,
            lyon,
            replace(QUICK, steps=5),
            lambda checkpoint=checkpoint: seen.append(checkpoint.path.exists()),
            checkpoint=checkpoint,
        )
    assert seen == [False] * 4 + [True] + [False] * 5


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_trains_float32_weights(precision: str, data: Path) -> None:
    if precision == "16-mixed" and not torch.cuda.is_available():
        pytest.skip("16-bit floats with a scaled loss are for CUDA")
    lyon = ms.load_dataset("table", root=data, size=16, interpolation="bicubic")["lyon"]
    fits = []
    for each in ("32-true", precision):
        torch.manual_seed(0)
        network = create_network("vit_tiny_patch16_224", num_classes=3, **NETWORK)
        fits.append(fit(network, lyon, replace(QUICK, precision=each)))
    exact, mixed = fits
    assert all(tensor.dtype == torch.float32 for tensor in mixed.state.values())
    assert mixed.history != exact.history
    assert mixed.metrics["nll"] == pytest.approx(exact.metrics["nll"], rel=0.05)


def test_the_criterion_chooses_the_step_and_the_setting(data: Path, tmp_path: Path) -> None:
    losses, labels = torch.tensor([1.0, 3.0, 5.0, 8.0]), torch.tensor([0, 0, 0, 2])
    assert balanced_loss(losses, labels) == pytest.approx((3 + 8) / 2)  # the class without images does not count
    recipe = replace(QUICK, criterion="balanced", loss="weighted")
    for card, candidates in run_training(plan_for(data, recipe), tmp_path / "p", quiet):
        record = candidates[0].to_json()
        assert record["criterion"] == card.metrics["criterion"]
        assert record["validation_loss"] == card.metrics["validation"]["nll"]
    for card, candidates in run_training(plan_for(data), tmp_path / "q", quiet):
        record = candidates[0].to_json()
        assert record["criterion"] == pytest.approx(record["validation_loss"], rel=1e-5)
        assert card.metrics["execution"] == "eager"


def test_every_candidate_leaves_its_curve_and_a_second_run_changes_nothing(trained: Path, data: Path) -> None:
    records = json.loads((work_folder(trained) / "candidates.json").read_text())["candidates"]
    for each in records:
        assert [line["step"] for line in each["curve"]] == [2, 4, 6, 8]
        best = min(each["curve"], key=lambda line: line["validation_loss"])
        assert each["metrics"]["best_step"] == best["step"]
        assert each["criterion"] == pytest.approx(best["validation_loss"])
        assert each["seconds"] > 0
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*") if path.is_file()}
    result = command(*line(data, trained, "--jobs", "1"))
    assert result.returncode == 0, result.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert json.loads((work_folder(trained) / "candidates.json").read_text())["candidates"] == records


def test_progress_shows_steps_and_losses_while_it_runs(data: Path, tmp_path: Path) -> None:
    shown: list[tuple[int, str]] = []

    @contextmanager
    def track(title: str, total: int):
        yield lambda steps=1, message="": shown.append((steps, message)) if title == "training the experts" else None

    run_training(plan_for(data, QUICK, replace(QUICK, dropout=0.1)), tmp_path / "p", track)
    assert sum(steps for steps, _ in shown) == 2 * 12 * len(SITES)
    note = r"[\d,]+ images/s, \w+-\w+: (loss [\d.]+, validation [\d.]+|step \d+)"
    assert all(re.fullmatch(note, message) for _, message in shown)
    assert any("validation" in message for _, message in shown)


def test_tensorboard_files_hold_the_curve(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "p"
    trained = run_training(plan_for(data, tensorboard=True), out, quiet)
    for _, (candidate,) in trained:
        events = EventAccumulator(str(work_folder(out) / "tensorboard" / candidate.folder.name)).Reload()
        assert set(events.Tags()["scalars"]) == {"loss/training", "loss/validation", "accuracy/validation"}
        curve = [(scalar.step, pytest.approx(scalar.value, rel=1e-5)) for scalar in events.Scalars("loss/validation")]
        assert [(line["step"], line["validation_loss"]) for line in candidate.progress["curve"]] == curve
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ms.MergestreamError, match=r"pip install 'mergestream\[tensorboard\]'"):
        run_training(plan_for(data, tensorboard=True), tmp_path / "q", quiet)


def test_what_cannot_be_done_here_is_refused(data: Path, tmp_path: Path) -> None:
    for wrong in ("precision=64", "accelerator=tpu", "compile=maybe", "criterion=best", "devices=2"):
        with pytest.raises(ms.MergestreamError):
            parse_settings(wrong, QUICK)
    if not torch.cuda.is_available():
        for other in ({"accelerator": "cuda"}, {"compile": "always"}, {"precision": "16-mixed"}):
            with pytest.raises(ms.MergestreamError, match="CUDA"):
                run_training(plan_for(data, replace(QUICK, **other)), tmp_path / "q", quiet)


def test_a_cosine_warms_up_and_ends_at_nothing() -> None:
    recipe = Recipe(steps=100, schedule="cosine", learning_rate=1.0)
    weight = torch.nn.Parameter(torch.zeros(1))
    plain, on_device = (torch.optim.SGD([weight], lr=rate) for rate in (1.0, torch.tensor(1.0)))
    rates = []
    for step in range(1, 101):
        for optimiser in (plain, on_device):
            set_rate(optimiser, recipe, step)
        rates.append(plain.param_groups[0]["lr"])
        assert float(on_device.param_groups[0]["lr"]) == pytest.approx(rates[-1], abs=1e-6)
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[54] == pytest.approx(0.5)
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0, abs=1e-12)


def test_hyper_parameter_sets() -> None:
    diwa = parse_settings("diwa", QUICK)
    assert len(set(diwa)) == 18
    assert (diwa[0].learning_rate, diwa[0].dropout) == (5e-5, 0.0)
    assert {recipe.weight_decay for recipe in diwa} == {1e-4, 1e-6}
    drawn = parse_settings("domainbed:20", QUICK)
    assert len(set(drawn)) == 20
    assert drawn[0] == QUICK
    assert drawn == parse_settings("domainbed:20", QUICK)
    assert all(1e-5 <= r.learning_rate <= 10**-3.5 and 8 <= r.batch_size <= 45 for r in drawn[1:])
    grid = parse_settings("learning_rate=1e-5|1e-4, views=()|(hflip,)", QUICK)
    assert [(r.learning_rate, r.views) for r in grid] == [(lr, v) for lr in (1e-5, 1e-4) for v in ((), ("hflip",))]
    seeds = parse_settings("seed=3|4", QUICK)
    assert [(recipe.seed, recipe.seed_of_split) for recipe in seeds] == [
        (3, 0),
        (4, 0),
    ]  # one validation split for both
    assert replace(QUICK, seed=5).seed_of_split == 5
    for wrong in ("diva", "domainbed:", "colour=red", "dropout=", "dropout=2", "optimiser=best", "steps=0"):
        with pytest.raises(ms.MergestreamError):
            parse_settings(wrong, QUICK)


def test_class_weights_are_inverse_to_counts() -> None:
    labels = torch.tensor([0] * 6 + [1] * 3 + [3])
    data = ms.DomainData("d", "x", ("a", "b", "c", "d"), torch.zeros(10, 3, 4, 4, dtype=torch.uint8), labels)
    weights = class_weights(data, torch.arange(10))
    np.testing.assert_allclose(weights, [10 / 18, 10 / 9, 0, 10 / 3], rtol=1e-6)
    assert float((weights[labels]).mean()) == pytest.approx(1)


def test_augmentation_keeps_range_differs_by_image_and_is_seeded() -> None:
    torch.manual_seed(0)
    pixels = torch.rand(64, 3, 24, 24)
    device = pixels.device
    assert augment(pixels, 0, draw(64, 0, (), device)) is pixels
    torch.manual_seed(1)
    one = augment(pixels[:1].expand(64, -1, -1, -1), 1.0, draw(64, 1.0, (), device))
    torch.manual_seed(1)
    again = augment(pixels[:1].expand(64, -1, -1, -1), 1.0, draw(64, 1.0, (), device))
    assert torch.equal(one, again)
    assert float(one.min()) >= 0
    assert float(one.max()) <= 1
    assert len(one.flatten(1).unique(dim=0)) == 64
    grey = (one - one.mean(dim=1, keepdim=True)).abs().amax(dim=(1, 2, 3)) < 1e-6
    assert 1 <= int(grey.sum()) <= 16  # about one in ten
    smooth = torch.linspace(0, 1, 24).expand(64, 3, 24, 24)
    mild, strong = (float((augment(smooth, s, draw(64, s, (), device)) - smooth).abs().mean()) for s in (0.01, 1.0))
    assert mild < 0.01 < 0.05 < strong


def test_dropout_before_the_head_only_while_training() -> None:
    network = create_network("vit_tiny_patch16_224", num_classes=3, **NETWORK)
    images = torch.rand(4, 3, 16, 16)
    plain = network.module.eval()(images)
    add_dropout(network, 0.5)
    assert torch.equal(network.module.eval()(images), plain)
    assert not torch.equal(network.module.train()(images), network.module.train()(images))


def test_initial_weights_from_a_file(data: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(5)
    source = create_network("vit_tiny_patch16_224", num_classes=9, **NETWORK).module.state_dict()
    save_file(source, tmp_path / "start.safetensors")
    plan = plan_for(data, replace(QUICK, steps=1, learning_rate=1e-9), init=str(tmp_path / "start.safetensors"))
    run_training(plan, tmp_path / "p", quiet)
    views = ms.ExpertPool.load(tmp_path / "p").layout.views(ms.ExpertPool.load(tmp_path / "p").base)
    assert torch.equal(views["blocks.1.mlp.fc1.weight"], source["blocks.1.mlp.fc1.weight"])
    assert views["head.weight"].shape == (3, 16)
    for name, content, sentence in (
        ("lacking.safetensors", {"norm.weight": torch.ones(16)}, "lack"),
        ("nan.safetensors", {**source, "norm.weight": torch.full((16,), torch.nan)}, "not finite in norm.weight"),
    ):
        save_file(content, tmp_path / name)
        with pytest.raises(ms.MergestreamError, match=sentence):
            run_training(plan_for(data, init=str(tmp_path / name)), tmp_path / name[:3], quiet)
    (tmp_path / "start.pth").write_bytes(b"pickle")
    with pytest.raises(ms.MergestreamError, match="may be a pickle and is not opened"):
        run_training(plan_for(data, init=str(tmp_path / "start.pth")), tmp_path / "q", quiet)
