"""The benchmark on a real Ray cluster: two nodes on this machine, each with its own processes and object store."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import mergestream as ms
from benching import NETWORK, bench_arguments, contents, process, write_consortium
from mergestream.data.datasets.standins.drawing import write_table
from mergestream.runtime.errors import InputError, MergestreamError
from mergestream.runtime.parallel import run_jobs

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'mergestream[ray]'")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    yield cluster.address
    ray.shutdown()
    cluster.shutdown()


def test_jobs_spread_over_both_nodes_and_keep_their_order(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    done: list[int] = []

    def where(seconds: float) -> str:  # nested, so that it travels by value: workers do not know this file
        import time

        import ray

        time.sleep(seconds)
        return ray.get_runtime_context().get_node_id()

    nodes = run_jobs(where, [(1.0,)] * 6, workers=1, on_done=lambda: done.append(1), engine="ray")
    assert len(set(nodes)) == 2
    assert len(done) == len(nodes) == 6
    assert run_jobs(divmod, [(n, 3) for n in range(9)], workers=1, on_done=lambda: None, engine="ray") == [
        divmod(n, 3) for n in range(9)
    ]


def test_a_job_that_may_use_a_gpu_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that says it has a GPU: the cluster hands it out; a job of the CPU sees none."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 1, "include_dashboard": False})
    try:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)

        def visible() -> str:
            import os

            return os.environ.get("CUDA_VISIBLE_DEVICES", "")

        assert run_jobs(visible, [()], workers=1, on_done=lambda: None, engine="ray", device="auto") == ["0"]
        assert run_jobs(visible, [()], workers=1, on_done=lambda: None, engine="ray") == [""]
    finally:
        cluster.shutdown()


def test_an_error_of_a_job_arrives_as_itself(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)

    def refuse(number: int) -> int:
        from mergestream.runtime.errors import InputError

        if number == 2:
            raise InputError("job two cannot be done")
        return number

    with pytest.raises(InputError, match="job two cannot be done"):
        run_jobs(refuse, [(n,) for n in range(4)], workers=1, on_done=lambda: None, engine="ray")


def test_a_cluster_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    with pytest.raises(MergestreamError, match="No Ray cluster answers"):
        run_jobs(divmod, [(1, 1)], workers=1, on_done=lambda: None, engine="ray")


def test_the_cluster_gives_the_bits_of_one_machine(address: str, tmp_path: Path) -> None:
    write_consortium(tmp_path)
    methods = ("--methods", "mean,entropy_adaptive,ensemble,adamerging")
    here = process(*bench_arguments(tmp_path, tmp_path / "here", *methods))
    assert here.returncode == 0, here.stderr
    there = process(*bench_arguments(tmp_path, tmp_path / "there", *methods), "--engine", "ray", RAY_ADDRESS=address)
    assert there.returncode == 0, there.stderr
    assert contents(tmp_path / "there") == contents(tmp_path / "here")
    assert len(contents(tmp_path / "here")) > 20
    plans = [json.loads((tmp_path / out / "results.json").read_text())["results"] for out in ("here", "there")]
    timed = [[{**row, "milliseconds": None} for row in rows] for rows in plans]
    assert timed[0] == timed[1]
    assert os.environ.get("RAY_ADDRESS") is None


def test_the_cluster_trains_the_experts_of_one_machine(address: str, tmp_path: Path) -> None:
    write_table(tmp_path / "data")
    network = [word for name, value in NETWORK.items() for word in ("--arg", f"{name}={value}")]
    fixed = ["--dataset", "table", "--root", str(tmp_path / "data"), "--network", "vit_tiny_patch16_224", *network]
    quick = [
        "--init",
        "random",
        "--steps",
        "20",
        "--batch-size",
        "8",
        "--validate-every",
        "10",
        "--head-init",
        "linear_probe",
    ]
    here = process("train", *fixed, *quick, "--out", str(tmp_path / "here"), "--jobs", "1")
    assert here.returncode == 0, here.stderr
    there = process("train", *fixed, *quick, "--out", str(tmp_path / "there"), "--engine", "ray", RAY_ADDRESS=address)
    assert there.returncode == 0, there.stderr
    one, two = (ms.ExpertPool.load(tmp_path / out) for out in ("here", "there"))
    assert one.fingerprint() == two.fingerprint()
    assert one.base_fingerprint() == two.base_fingerprint()
