"""examples/my_method as a user has it: installed, listed, benchmarked and served."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from benching import bench_arguments, process
from live_service import LiveService
from services import form, png

EXAMPLE = Path(__file__).parent.parent / "examples" / "my_method"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The PYTHONPATH of an installation without network, beside what is here."""
    folder = tmp_path_factory.mktemp("site")
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", *offline, str(EXAMPLE)], check=True)
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.slow
def test_it_is_listed_benchmarked_and_served(installed: str, consortium: Path, tmp_path: Path) -> None:
    listed = process("methods", "confident_experts", PYTHONPATH=installed)
    assert listed.stdout.startswith("confident_experts [plugin: the package my-method 0.1.0]: The experts'"), listed

    text = "mean, confident_experts(power=4)"
    arguments = bench_arguments(
        consortium, tmp_path / "out", "--methods", text, "--jobs", "2", "--seeds", "0", "--streams", "iid"
    )
    done = process(*arguments, PYTHONPATH=installed)
    assert done.returncode == 0, done.stderr
    runs = [json.loads(path.read_text())["arguments"] for path in (tmp_path / "out" / "runs").glob("*/run.json")]
    (plugin,) = {json.dumps(run["plugin"]) for run in runs if run["method"] == "confident_experts"}
    assert json.loads(plugin).keys() == {"package", "source", "version"}

    with LiveService(tmp_path, consortium / "pool", "--method", "confident_experts", PYTHONPATH=installed) as service:
        answer = httpx.post(f"{service.url}/v1/streams/a/batches", files=form(png(1)))
    assert answer.status_code == 200, answer.text


@pytest.mark.slow
def test_its_own_test_runs_the_contract(installed: str) -> None:
    script = [sys.executable, str(EXAMPLE / "test_confident_experts.py")]
    environment = {**os.environ, "PYTHONPATH": installed, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(script, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


def test_it_is_short() -> None:
    written = [line for name in ("pyproject.toml", "my_method.py") for line in (EXAMPLE / name).open() if line.strip()]
    assert len(written) <= 40
