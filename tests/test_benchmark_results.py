"""Figures in the docs are those of the records they cite."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def test_the_table_of_starts_is_that_of_its_record():
    driver = runpy.run_path(str(ROOT / "benchmarks" / "midog_starts.py"))
    rows = json.loads((RESULTS / "midog_starts.json").read_text())["rows"]
    assert len({(row["head_init"], row["loss"]) for row in rows}) == 8
    assert driver["table"](rows) in (ROOT / "docs" / "starts.md").read_text()


def test_the_speed_of_training_is_that_of_its_record():
    found = json.loads((RESULTS / "train_speed.json").read_text())
    told = (ROOT / "docs" / "training.md").read_text()
    for row in found["steps"]:
        assert f"| {row['ms_per_step']:.1f} | {row['images_per_second']:,.0f} |" in told
    assert f"{found['pool']['fits']} fits in {found['pool']['seconds']:.1f} s" in told


@pytest.mark.parametrize(("network", "bar"), [("32", 5.0), ("16", 18.0)])
def test_the_speed_of_a_step_is_that_of_its_record(network, bar):
    found = json.loads((RESULTS / f"step_vit_b{network}.json").read_text())
    shown = [f"{found['naive_ms']:.1f} ms", f"{found['eager_ms']:.1f} ms", f"{found['fast_ms']:.2f} ms"]
    shown += [f"{found['floor_ms']:.2f} ms", f"{found['share_of_floor']:.0%}".replace("%", " %")]
    shown += [f"{found['memory_gib']:.2f} GiB", f"{found['images_per_second']:,.0f}"]
    assert f"| ViT-B/{network} | {' | '.join(shown)} |" in (ROOT / "docs" / "speed.md").read_text()
    assert found["fast_ms"] <= bar
    assert len(found["timings"]["fast"]) == 300


def test_the_speed_of_large_pools_and_of_pacs_is_that_of_their_records():
    large = json.loads((RESULTS / "large_pool.json").read_text())
    told = (ROOT / "docs" / "large_pools.md").read_text()
    assert f"{large['fit']['fixed_ms']:.1f} ms + {large['fit']['ms_per_expert']:.1f} ms an expert" in told
    assert large["limit_gib"] == 8.0
    assert large["fit"]["largest_deviation"] < 0.001
    stream = json.loads((RESULTS / "pacs_stream.json").read_text())
    assert f"{stream['memory']['seconds']:.2f} s, median of three passes" in (ROOT / "docs" / "speed.md").read_text()


@pytest.mark.parametrize("method", ["mean", "ensemble", "entropy_adaptive", "prior_adaptive"])
def test_our_rules_page_shows_the_demos_numbers(method):
    results = json.loads((ROOT / "docs" / "results" / "demo.json").read_text())["results"]
    shown = {row["stream"]: f"{100 * row['accuracy']['mean']:.1f}" for row in results if row["label"] == method}
    cells = " | ".join(shown[stream] for stream in ("iid", "dirichlet:0.05", "note:0.1", "sorted"))
    assert f"| {method} | {cells} |" in (ROOT / "docs" / "prior_adaptive.md").read_text()


@pytest.mark.parametrize(("start", "angle", "lost"), [("shared", "0.9", "nothing"), ("independent", "90.3", "50.4 %")])
def test_the_drift_of_pacs_is_that_of_its_record(start, angle, lost):
    layers = json.loads((ROOT / "docs" / "results" / f"drift-pacs-{start}.json").read_text())["layers"]
    head = next(layer for layer in layers if layer["kind"] == "head")["whole"]
    told = (ROOT / "docs" / "drift.md").read_text()
    assert f"{head['mean_angle']:.1f}" == angle
    assert f"{angle} degrees" in told
    assert lost == "nothing" or (f"{head['measured_loss']:.1f} %" == lost and lost in told)
