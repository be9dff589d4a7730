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


@pytest.mark.parametrize(("start", "angle", "lost"), [("shared", "0.9", "nothing"), ("independent", "90.3", "50.4 %")])
def test_the_drift_of_pacs_is_that_of_its_record(start, angle, lost):
    layers = json.loads((ROOT / "docs" / "results" / f"drift-pacs-{start}.json").read_text())["layers"]
    head = next(layer for layer in layers if layer["kind"] == "head")["whole"]
    told = (ROOT / "docs" / "drift.md").read_text()
    assert f"{head['mean_angle']:.1f}" == angle
    assert f"{angle} degrees" in told
    assert lost == "nothing" or (f"{head['measured_loss']:.1f} %" == lost and lost in told)
