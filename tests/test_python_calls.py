"""ms.train, ms.bench and ms.report: the commands in Python, with the same names and defaults."""

import inspect
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import mergestream as ms
from benching import NETWORK
from mergestream.bench import python_calls as bench_calls
from mergestream.cli import app as cli
from mergestream.serving.open_engine import load_pool
from mergestream.serving.options import ServeOptions
from mergestream.training.python_calls import train

# Python registers its own methods, prints nothing, and starts no processes unless it is asked to.
ONLY_COMMANDS = {"plugin", "json", "init", "stages", "later"}  # the last three are of the project's own study
ONLY_PYTHON = {"track", "command"}
CALLS = {"train": train, "bench": bench_calls.bench, "report": bench_calls.report}


def options_of(verb: str) -> dict[str, Any]:
    """Names, as they are spelt in Python, and defaults of a command's options."""
    command = typer.main.get_command(cli.app).commands[verb]
    return {p.opts[0].removeprefix("--").replace("-", "_"): p.default for p in command.params if p.name != "help"}


@pytest.mark.parametrize("verb", CALLS)
def test_options_and_defaults_are_those_of_the_command(verb: str) -> None:
    parameters = inspect.signature(CALLS[verb]).parameters
    command = options_of(verb)
    study = ONLY_COMMANDS - {"init"} if verb == "train" else ONLY_COMMANDS
    assert set(parameters) - ONLY_PYTHON == set(command) - study
    for name, parameter in parameters.items():
        if name in command and name != "jobs" and parameter.default is not parameter.empty:
            stated = command[name]
            assert parameter.default == (str(stated) if isinstance(stated, Path) else stated), name


@pytest.mark.parametrize(("instructions", "chosen"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_the_type_that_this_processor_multiplies_fast(
    consortium: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instructions: bool, chosen: str
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    request = {"methods": "mean", "targets": "lyon", "root": consortium / "data", "device": "cpu", "dtype": "auto"}
    findings = ms.bench("table", consortium / "pool", out=tmp_path, **request)
    assert findings.plan["dtype"] == chosen
    about = ServeOptions(pool=consortium / "pool", device="cpu", dtype="auto")
    assert load_pool(about).bank.dtype == getattr(torch, chosen)
    assert load_pool(replace(about, dtype=None)).bank.dtype == torch.float32


def test_bench_and_report_in_python(consortium: Path, tmp_path: Path) -> None:
    findings = ms.bench(
        "table",
        consortium / "pool",
        root=consortium / "data",
        out=tmp_path / "runs",
        methods=["mean", "ensemble(average=probabilities)"],
        streams=["iid"],
        seeds=[0, 1],
        batch_size=4,
        reference="mean",
        device="cpu",
    )
    assert findings.methods == ["mean", "ensemble(average=probabilities)"]
    assert {run["stream_seed"] for run in findings.runs} == {0, 1}
    assert (tmp_path / "runs" / "results.md").is_file()
    page = ms.report(tmp_path / "runs", tmp_path / "page.html")
    assert page.bench.labels == findings.labels
    assert "mergestream.bench(...) in Python" in (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_train_in_python(tmp_path: Path) -> None:
    trained = ms.train(
        "phantom",
        "vit_tiny_patch16_224",
        tmp_path / "pool",
        init="random",
        arg=NETWORK,
        data_option={"images": 40},
        steps=4,
        validate_every=2,
        device="cpu",
    )
    assert [card.domain for card, _ in trained.experts] == list(ms.load_dataset("phantom", images=40))
    assert len(trained.warnings) >= 1  # four steps teach nobody
    assert ms.create_method("mean", trained.pool).step(ms.load_dataset("phantom", images=40)["graz"].images[:4])
    with pytest.raises(ms.MergestreamError, match="loss"):
        ms.train("phantom", "vit_tiny_patch16_224", tmp_path / "pool", loss="heavy")


def test_the_name_bench_can_be_called_whatever_was_imported_before() -> None:
    script = """
import mergestream as ms
first = ms.bench
import mergestream.bench.records
assert ms.bench is first is mergestream.bench
try:
    ms.bench("phantoms", "nowhere")
except ms.MergestreamError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "nowhere" in done.stdout or "phantoms" in done.stdout, done.stderr
