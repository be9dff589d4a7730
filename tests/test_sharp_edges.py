"""The first hour of a new user: wrong usage, former spellings and easy mistakes get a short, right sentence."""

import socket
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

import mergestream as ms
from benching import NETWORK, command, network
from conftest import CLASSES, HandWritten, make_images
from mergestream.data.datasets.standins import drawing
from mergestream.networks.architecture import create_network
from mergestream.networks.batch_checks import require_batch, require_preprocessed
from mergestream.pool.expert_card import ExpertCard
from mergestream.runtime.errors import InputError, unknown_name
from mergestream.training.published_weights import is_reachable
from mergestream.training.python_calls import training_warnings

# --- the command line ---------------------------------------------------------------------------------------

NOWHERE = "/nowhere/at/all"
TRAIN = ("train", "--network", "vit_tiny_patch16_224", "--init", "random", "--out", "pool", "--dataset")
WRONG = {
    "a missing pool": ("pool", "list", NOWHERE),
    "a missing expert": ("pool", "add", ".", NOWHERE),
    "a missing checkpoint": ("pool", "import", NOWHERE, "out", "--network", "resnet18", "--classes", "a,b"),
    "a missing root": ("data", "verify", "folder", NOWHERE),
    "an unknown data set": ("data", "verify", "pcas", "."),
    "an option without a value": ("data", "verify", "folder", ".", "--data-option", "group"),
    "an unknown loss": (*TRAIN, "phantom", "--loss", "heavy"),
    "an argument that the network does not take": (*TRAIN, "phantom", "--arg", "wings=2"),
    "an argument that an imported network does not take": (
        *("pool", "import", "site.safetensors", "out", "--network", "resnet18", "--classes", "a,b", "--arg", "wings=2"),
    ),
    "an unknown device": (*TRAIN, "phantom", "--device", "tpu"),
    "a missing pool to serve": ("serve", NOWHERE, "--port", "0"),
    "an unknown method": ("bench", "--dataset", "phantom", "--pool", "pool", "--methods", "men"),
    "no pool to choose for": ("choose", NOWHERE, "--dataset", "phantom"),
    "no runs": ("report", NOWHERE),
    "no log": ("audit", "verify", NOWHERE),
    "no pool for drift": ("drift", NOWHERE, "--out", "out"),
    "no pool for a landscape": ("landscape", NOWHERE, "--dataset", "phantom", "--target", "graz", "--out", "out"),
    "a missing site report": ("matrix", NOWHERE, "--out", "out"),
    "a missing part of a choice": ("choose", ".", "--join", NOWHERE),
    "no expert to sign": ("pool", "sign", NOWHERE, "--key", "key"),
    "a name of a key that is taken": ("pool", "key", "file.txt"),
    "a name of an audit key that is taken": ("audit", "key", "file.txt"),
    "no expert's card": ("pool", "card", NOWHERE, "--contact", "me"),
    "no expert to export": ("pool", "export", NOWHERE, "--hf", "out"),
    "a folder that is no expert": ("pool", "card", ".", "--contact", "me"),
    "a folder without experts": ("drift", ".", "--out", "out"),
    "an unknown network of timm": ("pool", "init", "new", "--network", "resnet_18", "--classes", "a,b"),
    "no file of first weights": (*TRAIN[:3], "--init", NOWHERE, "--out", "pool", "--dataset", "phantom"),
    "a file where a folder goes": ("demo", "--quick", "--out", "file.txt"),
    "no state of a shadow service": ("shadow-report", NOWHERE, "--readings", "readings.csv"),
    "no site report to make": ("site-report", NOWHERE, "--dataset", "phantom", "--out", "out.json"),
    "nothing to revoke": ("pool", "revoke", NOWHERE, "lyon", "--key", "key", "--reason", "withdrawn"),
    "an unknown role": ("serve-token", "--name", "ct", "--tokens", "tokens", "--role", "boss"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_usage_ends_with_2_and_one_sentence(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("taken")
    save_file({"weight": torch.zeros(2)}, tmp_path / "site.safetensors")
    done = command(*WRONG[what])
    assert done.returncode == 2, done.stderr
    lines = done.stderr.splitlines()[-1:] if "serve" in WRONG[what] else done.stderr.splitlines()
    assert [line[:13] for line in lines] == ["mergestream: "], done.stderr


def test_the_device_is_an_option_of_one_name() -> None:
    for verb in ("train", "bench", "choose", "landscape", "serve"):
        assert "--device" in command(verb, "--help").stdout, verb


def test_a_checkpoint_is_imported_from_a_file_to_a_folder(tmp_path: Path) -> None:
    file, out = tmp_path / "site.safetensors", tmp_path / "graz"
    save_file(network().state_dict(), file)
    options = [word for name, value in NETWORK.items() for word in ("--arg", f"{name}={value}")]
    options += ["--network", "vit_tiny_patch16_224", "--classes", ",".join(drawing.CLASSES)]
    former = command("pool", "import", str(out), str(file), *options)
    assert former.returncode == 2
    assert f"mergestream pool import {file} {out}" in former.stderr
    done = command("pool", "import", str(file), str(out), *options)
    assert done.returncode == 0, done.stderr
    assert (out / "weights.safetensors").is_file()


@pytest.mark.parametrize("words", [("--landscape", "phantom"), ("--landscape=phantom", "--target", "graz")])
def test_the_former_option_names_the_command_landscape(words: tuple[str, ...]) -> None:
    done = command("drift", "pool", "--out", "out", *words)
    assert done.returncode == 2
    assert "mergestream landscape POOL --dataset" in done.stderr


def test_the_shell_completes_commands_and_options() -> None:
    # A test has no shell for typer to detect.
    script = command("--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert script.returncode == 0, script.stderr
    assert "_MERGESTREAM_COMPLETE=complete_bash" in script.stdout
    for words, completed in (("mergestream lan", "landscape"), ("mergestream train --dev", "--device")):
        place = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        asked = command(**place, _MERGESTREAM_COMPLETE="complete_bash")
        assert asked.stdout.split() == [completed]


# --- long lists ---------------------------------------------------------------------------------------------


def test_long_lists_are_shortened_in_errors() -> None:
    names = [f"site_{number:04d}" for number in range(1000)]
    error = str(unknown_name("expert", "site_04", names))
    assert "and 994 more" in error
    assert len(error) < 200
    assert "and 14 more" in str(unknown_name("expert", "?", names[:20]))
    assert "site_0004 and 14 more" in str(unknown_name("expert", "xyz", [*names[:19], "xyz_of"]))  # near ones first
    networks = ["gcvit_tiny", "vit_base_patch16_224", "vit_tiny_patch16_224"]
    assert "Did you mean 'vit_tiny_patch16_224'?" in str(unknown_name("network", "vit_tinny", networks))
    assert "Did you mean" not in str(unknown_name("network", "unet", networks))
    assert str(unknown_name("expert", "x", names[:3])).endswith("Known: site_0000, site_0001, site_0002.")


# --- training -----------------------------------------------------------------------------------------------


def card_with(confusion: list[list[int]], temperature: float = 1.0) -> ExpertCard:
    hits, counts = sum(row[i] for i, row in enumerate(confusion)), [sum(row) for row in confusion]
    recalls = [row[i] / count for i, (row, count) in enumerate(zip(confusion, counts, strict=True)) if count]
    validation = {"accuracy": hits / sum(counts), "balanced_accuracy": sum(recalls) / len(recalls)}
    metrics = {"validation": {**validation, "confusion": confusion}}
    built = create_network("vit_tiny_patch16_224", num_classes=len(confusion), **NETWORK)
    classes = tuple("abc"[: len(confusion)])
    return ExpertCard.for_network("lyon", built, classes, domain="lyon", metrics=metrics, temperature=temperature)


def test_an_expert_at_chance_is_a_warning() -> None:
    majority = card_with([[90, 0], [10, 0]])  # right on 90 %, and has learned nothing
    assert "lyon is at chance: balanced accuracy 50.0%" in training_warnings(majority)[0]
    assert "90.0% of them" in training_warnings(majority)[0]
    assert training_warnings(card_with([[30, 10, 10], [14, 26, 10], [10, 15, 25]])) == []
    assert len(training_warnings(card_with([[2, 1], [1, 2]]))) == 1  # six images show nothing
    assert training_warnings(card_with([[90, 10], [0, 0]])) == []  # one class: no chance to compare with


def test_a_temperature_at_the_limit_is_a_warning() -> None:
    confused = [[20, 5], [5, 20]]
    assert "temperature 20, the limit" in training_warnings(card_with(confused, 20.0))[0]
    assert "no error to learn from" in training_warnings(card_with([[20, 0], [0, 20]], 0.05))[0]
    assert training_warnings(card_with(confused, 2.5)) == []


def test_train_prints_its_warnings(tmp_path: Path) -> None:
    card = card_with([[90, 0], [10, 0]])
    card.metrics["validation"]["nll"] = card.metrics["best_step"] = 1
    options = ("--network", "vit_tiny_patch16_224", "--init", "random", "--out", str(tmp_path / "pool"))
    with mock.patch("mergestream.training.python_calls.run_training", return_value=[(card, [])]):
        done = command("train", "--dataset", "phantom", *options, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("Warning: lyon is at chance")


def test_pretrained_weights_without_a_network_fail_at_once_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    started = time.perf_counter()
    options = ("--out", str(tmp_path / "pool"), "--network", "vit_tiny_patch16_224", "--jobs", "1")
    done = command("train", "--dataset", "phantom", *options)
    assert time.perf_counter() - started < 30  # a second of its own; the hub's client tries for 50
    assert done.returncode == 1
    assert "http://127.0.0.1:9 cannot be reached" in done.stderr
    assert "--init FILE.safetensors" in done.stderr


def test_a_server_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.perf_counter()
        assert not is_reachable(f"http://127.0.0.1:{silent.getsockname()[1]}", patience=0.2)
        assert time.perf_counter() - started < 10  # by default urllib waits without an end


# --- images and modules in Python ---------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "words"), [(1, "pixels in 0 to 1"), (255, "pixels in 0 to 255")])
def test_floats_that_look_like_pixels_are_refused(vit_pool: ms.ExpertPool, scale: int, words: str) -> None:
    pixels = make_images().float() / 255 * scale
    method = ms.create_method("mean", vit_pool)
    for entry in (method, method.step, vit_pool.logits, vit_pool.prepare, partial(vit_pool.expert_logits, 0)):
        with pytest.raises(InputError, match=words) as refused:
            entry(pixels)
        assert "preprocessed=True" in str(refused.value)
        entry(pixels, preprocessed=True)
    with pytest.raises(InputError, match=words):
        ms.measure_statistics(vit_pool, {"lyon": pixels}, ["gram"])
    ms.measure_statistics(vit_pool, {"lyon": pixels}, ["gram"], preprocessed=True)


def test_preprocessed_floats_pass(vit_pool: ms.ExpertPool) -> None:
    images = make_images()
    method = ms.create_method("mean", vit_pool)
    prepared = vit_pool.prepare(images)
    assert float(prepared.min()) < 0
    assert torch.equal(method(prepared), method(images))
    white = vit_pool.prepare(torch.full((2, 3, 16, 16), 255, dtype=torch.uint8))
    assert method(white).shape == (2, len(vit_pool.classes))
    assert method(torch.zeros(2, 3, 16, 16)).shape == (2, len(vit_pool.classes))
    dark = images.clamp(128, 160).float() / 255
    require_preprocessed(dark, None)  # of a network whose input is not on record
    require_preprocessed(dark, ms.Preprocessing((16, 16), mean=(0.0,) * 3, std=(1.0,) * 3))
    require_preprocessed(255 * dark, ms.Preprocessing((16, 16), mean=(0.0,) * 3, std=(1 / 255,) * 3))
    with pytest.raises(InputError, match="0 to 255"):
        require_preprocessed(255 * dark, ms.Preprocessing((16, 16), mean=(0.0,) * 3, std=(1.0,) * 3))


@pytest.mark.parametrize(("channels", "remedy"), [(1, "expand(-1, 3, -1, -1)"), (4, "images[:, :3]"), (2, None)])
def test_the_remedy_fits_the_number_of_channels(channels: int, remedy: str | None) -> None:
    with pytest.raises(InputError, match=rf"takes 3 channels, the batch has {channels}") as refused:
        require_batch(torch.zeros(2, channels, 16, 16, dtype=torch.uint8), 3)
    assert (remedy in str(refused.value)) if remedy else ("images" not in str(refused.value))
    with pytest.raises(InputError, match=r"images\.to\(torch\.uint8\)"):
        require_batch(torch.zeros(2, 3, 16, 16, dtype=torch.int64), 3)


@pytest.mark.parametrize(
    ("shape", "remedy"), [((2, 20, 16, 3), "permute(0, 3, 1, 2)"), ((20, 16, 3), "permute(2, 0, 1)[None]")]
)
def test_channels_last_is_named(vit_pool: ms.ExpertPool, shape: tuple[int, ...], remedy: str) -> None:
    images = torch.zeros(shape, dtype=torch.uint8)
    unknown = ms.ExpertPool.from_modules({"a": HandWritten()}, classes=CLASSES)
    for pool, given in ((vit_pool, images), (unknown, images.float())):
        with pytest.raises(InputError) as refused:
            pool.logits(given)
        assert "channels come last" in str(refused.value)
        assert remedy in str(refused.value)
        assert len(str(refused.value)) < 140
    assert unknown.logits(torch.randn(2, 3, 20, 3)).shape[1] == 2  # narrow images, not channels


def test_a_list_and_an_array_are_told_how_to_become_a_batch(vit_pool: ms.ExpertPool) -> None:
    images = make_images()
    for given, remedy in ((list(images), "torch.stack(images)"), (images.numpy(), "torch.from_numpy(images)")):
        with pytest.raises(InputError) as refused:
            vit_pool.logits(given)
        assert remedy in str(refused.value)


def test_modules_without_names_get_a_short_sentence() -> None:
    modules = [HandWritten(), HandWritten()]
    with pytest.raises(InputError, match=r"Give the modules by name: \{'lyon': …, 'brest': …\}; got list\."):
        ms.ExpertPool.from_modules(modules)
    with pytest.raises(InputError, match=r"not an nn.Module but a OrderedDict. Use from_state_dicts"):
        ms.ExpertPool.from_modules({"lyon": modules[0].state_dict()})
    with pytest.raises(InputError, match="Give the state dicts by name"):
        ms.ExpertPool.from_state_dicts([modules[0].state_dict()], modules[0])
