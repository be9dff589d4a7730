"""Figures in the docs are those of the records they cite."""

import importlib
import itertools
import json
import runpy
from itertools import pairwise
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


@pytest.mark.parametrize(("rows", "key"), [("by_experts", "experts"), ("by_batch", "batch")])
def test_the_curves_of_a_step_are_those_of_their_record(rows, key):
    found = json.loads((RESULTS / "step_curves.json").read_text())
    line, told = found["per_expert"], (ROOT / "docs" / "speed.md").read_text()
    sizes, times = ([row[kind] for row in found[rows]] for kind in (key, "ms"))
    assert sizes == [2**power for power in range(len(sizes))]
    assert f" | {' | '.join(map(str, sizes))} |\n" in told
    assert f"| ms a step | {' | '.join(f'{ms:.2f}' for ms in times)} |\n" in told
    fitted = f"{line['fixed_ms']:.2f} ms + {line['per_expert_ms']:.2f} ms an expert"
    assert f"{fitted}, within {100 * line['largest_departure']:.1f} % of a line, no cliff" in told
    assert fitted in (ROOT / "docs" / "log.md").read_text()
    assert max(two / one for one, two in pairwise(times)) < 2.1  # no cliff


def test_what_refreshing_less_often_costs_is_that_of_its_record():
    rows = json.loads((RESULTS / "refresh.json").read_text())["rows"]
    found = {(row["stream"], row["refresh_every"], row.get("refresh_drift")): row["accuracy"] for row in rows}
    told = (ROOT / "docs" / "speed.md").read_text()
    for every, drift in {(every, drift) for _, every, drift in found}:
        policy = {1: "every batch", 2: "every 2nd batch"}.get(every, f"every {every}th batch")
        policy += f", and on a drift of {drift} nats" if drift else ""
        iid, skewed = (found[stream, every, drift] for stream in ("iid", "dirichlet:0.05"))
        assert f"| {policy} | {iid:.2f} | {skewed:.2f} |" in told
    always, second, rarely, on_drift = (
        found["dirichlet:0.05", *policy] for policy in ((1, None), (2, None), (64, None), (64, 0.05))
    )
    assert f"costs nothing ({found['iid', 1, None]:.2f} to {found['iid', 64, None]:.2f})" in told
    assert f"costs {always - rarely:.1f} points ({always:.2f} to {rarely:.2f})" in told
    assert f"even every 2nd batch costs {always - second:.1f}." in told
    assert f"gets back {on_drift - rarely:.1f} of the {always - rarely:.1f}" in told
    assert f"up to {always - rarely:.1f} points on a skewed stream" in (ROOT / "docs" / "method.md").read_text()


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


@pytest.fixture
def real(monkeypatch):
    """The benchmark's own report."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "real"))
    return importlib.import_module("report")


@pytest.mark.parametrize(
    ("page", "count"), [("docs/results.md", 16), ("docs/results-first-run.md", 14), ("README.md", 1)]
)
def test_real_results_are_those_of_their_records(real, page, count):
    groups = real.read_records(sorted(real.RESULTS.glob("*.json")))
    ours = real.the_rule(groups, None)
    path = ROOT / page
    shown = path.read_text()
    assert shown.count("<!-- real:begin ") == count
    assert real.with_blocks(shown, real.all_blocks(groups, ours), path) == shown


def bars_of(real, run):
    groups = real.runs(real.read_records(sorted(real.RESULTS.glob("*.json"))))[run]
    return {bar.sentence.partition(" = ")[0]: bar.holds for bar in real.all_bars(groups, "prior_adaptive")}


def test_what_is_said_of_the_first_run_holds(real):
    """Sentences of docs/results-first-run.md that no block writes."""
    bars = bars_of(real, "first")
    paper = [holds for told, holds in bars.items() if told.endswith("entropy_adaptive - mean")]
    assert paper == [True] * 4
    assert f"{sum(bars.values())} of {len(bars)} bars held" in (ROOT / "docs" / "results.md").read_text()
    assert all(holds for told, holds in bars.items() if told.endswith("prior_adaptive - entropy_adaptive"))
    below = {told for told, holds in bars.items() if not holds and told.endswith("- ensemble")}
    assert {told for told in below if "shared" in told and "auroc" not in told} == set()
    assert "MIDOG, shared heads, iid, auroc: prior_adaptive - ensemble" in below
    assert sum("MIDOG, independent heads" in told for told in below) == 14


def test_what_is_said_of_real_results_holds(real):
    """Sentences of docs/results.md and the README that no block writes: verdicts of the later run."""
    bars = bars_of(real, "later")
    places = ("iid", "mixture:smooth", "mixture:abrupt")
    ranking = {f"MIDOG, independent heads, {place}, auroc: prior_adaptive - ensemble" for place in places}
    lost = {told for told, holds in bars.items() if not holds}
    assert ranking <= lost
    assert all("does not capture entropy_adaptive" in told for told in lost - ranking)
    assert len(lost) == 5


def test_what_is_said_of_differences_holds(real):
    """Ours is above all three everywhere but in the ranking that the page names."""
    bars = importlib.import_module("bars")
    groups = real.runs(real.read_records(sorted(real.RESULTS.glob("*.json"))))["later"]
    for rival in ("mean", "ensemble", "entropy_adaptive"):
        for place, gap in bars.differences_everywhere(groups, "prior_adaptive", rival):
            if "batch" not in place:
                calm = "auroc" in place and any(stream in place for stream in ("iid", "mixture"))
                assert gap.low > 0 or (calm and rival != "mean"), (place, rival)
                assert not (calm and rival == "ensemble" and "shared" in place) or gap.low < 0 < gap.high, place
                assert (
                    not (calm and rival == "ensemble" and "independent" in place) or f"{100 * gap.mean:.1f}" == "-0.3"
                )


def test_what_single_images_lose_in_ranking_is_said(real):
    bars = importlib.import_module("bars")
    groups = real.runs(real.read_records(sorted(real.RESULTS.glob("*.json"))))["later"]
    gaps = dict(bars.differences_everywhere(groups, "prior_adaptive", "ensemble"))
    lost = [-100 * gaps[f"MIDOG, {start} heads, iid, batch 1, auroc"].mean for start in ("shared", "independent")]
    assert f"of single images {lost[0]:.1f} and {lost[1]:.1f}" in (ROOT / "docs" / "results.md").read_text()
    assert f"and {lost[0]:.1f} to {lost[1]:.1f} below it on single images" in (ROOT / "README.md").read_text()


def test_what_stands_in_the_way_is_what_the_ablation_found(real):
    groups = real.runs(real.read_records(sorted(real.RESULTS.glob("*.json"))))["later"]
    tables, told = importlib.import_module("tables"), (ROOT / "docs" / "results.md").read_text()

    def score(kind, start, name, stream, metric):
        own = tables.select(groups, kind, "midog", start, "weighted")
        return round(100 * tables.estimate(own, name, tables.Where(stream), metric).mean, 1)

    def cost_of(start, stream, metric, name="ours, weights left on"):
        return score("ablation", start, "ours", stream, metric) - score("ablation", start, name, stream, metric)

    variants = [name for name in importlib.import_module("recipes").OURS_ABLATION if name != "ours"]
    ranks = {name: score("ablation", "independent", name, "iid", "auroc") for name in variants}
    best = max(ranks.values())
    assert {name for name, rank in ranks.items() if rank == best} == {"ours, uniform coefficients", "ours, anchor 0"}
    ensemble = score("main", "independent", "ensemble", "iid", "auroc")
    assert best < ensemble
    assert f"reaches the ensemble's {ensemble}: the best, uniform coefficients and `anchor=0`, rank at {best}" in told
    assert len(variants) == 9
    given = cost_of("independent", "iid", "balanced_accuracy", "ours, anchor 0")
    assert f"gives {given:.1f} points of balanced accuracy" in told
    worth = [cost_of(start, "iid", "balanced_accuracy") for start in ("shared", "independent")]
    assert f"is worth {worth[0]:.1f} and {worth[1]:.1f} points" in told
    assert [f"{-cost_of(start, 'iid', 'auroc'):.1f}" for start in ("shared", "independent")] == ["0.2", "0.1"]
    assert all(0.9 < -cost_of(start, "dirichlet:0.05", "auroc") < 1.2 for start in ("shared", "independent"))
    left = score("ablation", "shared", "ours, weights left on", "iid", "balanced_accuracy")
    assert left < score("ablation", "shared", "full", "iid", "balanced_accuracy")


def test_our_rules_page_says_what_a_step_costs(real):
    groups = real.runs(real.read_records(sorted(real.RESULTS.glob("*.json"))))["later"]
    costs = {g["dataset"]: {c["method"]: c["ms"] for c in g["costs"]} for g in groups if g["kind"] == "costs"}
    pacs, midog = (
        [f"{costs[name][m]:.1f}" for m in ("prior_adaptive", "entropy_adaptive")] for name in ("pacs", "midog")
    )
    told = (ROOT / "docs" / "prior_adaptive.md").read_text()
    assert f"takes {pacs[0]} ms against the paper's {pacs[1]} " in told
    assert f"and {midog[0]} against {midog[1]} " in told


def test_the_choice_of_settings_is_that_of_its_record(real):
    choose = importlib.import_module("choose")
    told = (ROOT / "docs" / "prior_adaptive.md").read_text()
    for record in ("choice_pacs_later", "choice_pacs"):
        rows = json.loads((RESULTS / f"{record}.json").read_text())["rows"]
        for line in choose.table(rows).splitlines():
            assert f"| {line} |" in told
    cells = {(r["candidate"], r["head_init"], r["stream"]): [] for r in rows}
    for row in rows:
        cells[row["candidate"], row["head_init"], row["stream"]].append(row["accuracy"])
    gains = [
        sum(cells["shared head", *place]) / 12 - sum(cells["ours", *place]) / 12
        for place in itertools.product(("independent", "shared"), ("iid", "dirichlet:0.05"))
    ]
    assert [f"{gain:.1f}" for gain in gains] == ["3.4", "7.0", "0.0", "0.0"]


@pytest.mark.parametrize(
    ("record", "page"),
    [("rare_pacs", "prior_adaptive"), ("rare_weights", "prior_adaptive"), ("rare_midog", "results-first-run")],
)
@pytest.mark.usefixtures("real")
def test_the_study_of_rare_classes_is_that_of_its_records(record, page):
    rare = importlib.import_module("rare")
    rows = json.loads((RESULTS / f"{record}.json").read_text())["rows"]
    assert rare.table(rows) in (ROOT / "docs" / f"{page}.md").read_text()


def test_the_readme_says_of_our_rule_what_the_demo_found():
    duels = json.loads((ROOT / "docs" / "results" / "demo.json").read_text())["duels"]
    told = (ROOT / "README.md").read_text()
    for stream, words in (
        ("iid", " points on `iid`"),
        ("dirichlet:0.05", " under `dirichlet"),
        ("sorted", " under `sor"),
    ):
        gap = next(d["difference"] for d in duels if d["theirs"] == "prior_adaptive" and d["stream"] == stream)
        mean, low, high = (-100 * gap[key] for key in ("mean", "high", "low"))
        assert f"{mean:.1f} [{low:.1f}, {high:.1f}]{words}" in told


def test_the_zoo_on_a_cpu_is_that_of_its_records():
    first, second, third = json.loads((RESULTS / "step_zoo.json").read_text())["runs"]
    told = (ROOT / "docs" / "speed.md").read_text()
    for one, two in zip(first["rows"], second["rows"], strict=True):
        assert one["network"] == two["network"]
        milliseconds = f"{two['naive_ms']:.0f} | {two['eager_ms']:.0f}"
        ratios = [row["times_the_rival"] for row in (one, two)]
        assert f"| {one['network']} | {milliseconds} | {ratios[0]:.2f} x | {ratios[1]:.2f} x |" in told
        assert max(ratios) >= 1
        assert one["same_predictions"] == two["same_predictions"] == 1
    (again,) = third["rows"]
    assert f"{again['network']} alone, 20 turns: {again['times_the_rival']:.2f} x" in told
