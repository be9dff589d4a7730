"""The plan 'results': a tiny study on stand-ins, draws of whole units, the record, its verdicts and pages."""

import json
import runpy
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer

import mergestream as ms
from benching import command
from mergestream.bench.analysis.comparison import Estimate
from mergestream.bench.engine.plan import parse_variants
from mergestream.bench.study.results_plan import LIFE, LOSS, RESULTS, STUDIES, PoolRecipe, ring_of
from mergestream.bench.study.study_bars import (
    all_bars,
    collapses_of,
    difference,
    endpoints,
    estimate,
    paired_difference,
)
from mergestream.bench.study.study_pages import all_blocks
from mergestream.bench.study.study_record import Setting, decoded, encoded, read_records, write_record
from mergestream.bench.study.study_run import _run_stage, chosen_stages, study_request
from mergestream.cli import app as cli
from mergestream.data.datasets import file_source_of
from mergestream.functional.intervals import drawn_scores, unit_draws
from mergestream.functional.metrics import summarise
from mergestream.runtime.parallel import quiet

ROOT = Path(__file__).parents[1]
OURS = "merge_and_fit"
METRICS = ("accuracy", "balanced_accuracy", "auroc")
MICRO = replace(
    RESULTS,
    network="vit_tiny_patch16_224",
    arguments=dict.fromkeys(LOSS, ("img_size=16", "patch_size=8", "embed_dim=16", "depth=2", "num_heads=2")),
    fits={name: {"steps": 3, "batch_size": 8, "learning_rate": 1e-3, "validate_every": 3} for name in LOSS},
    seeds=(0,),
    batch_size=4,
    batch_sizes=(1, 4),
    fixed_images=12,
    life_batch_sizes=(1, 4),
    prevalences=(0.5,),
    long_steps=9,
    resamples=20,
    statistics={"gram": 8, "fisher_exact": 4, "gram_pp": 8},
    choose=False,
)


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Zips of both stand-ins, as the command line takes them."""
    folder, words = tmp_path_factory.mktemp("study"), []
    for name in LOSS:
        (folder / name).mkdir()
        file_source_of(name).write_standin(folder / name)
        words += ["--root", f"{name}={shutil.make_archive(str(folder / name), 'zip', folder / name)}"]
    return words


def run_micro(roots: list[str], out: Path, stages: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STUDIES, "results", MICRO)
        fixed = ("--plan", "results", "--init", "random", "--device", "cpu", "--jobs", "1", "--json")
        done = command("bench", *fixed, *roots, "--out", str(out), "--stages", stages)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def finished(roots: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("study") / "out"
    printed = run_micro(roots, out, "main-pacs-shared,batches-pacs,lone-pacs")
    assert json.loads(printed) == json.loads((out / "record.json").read_text())
    return out


def test_a_study_trains_runs_and_writes_its_record(finished: Path) -> None:
    record = json.loads((finished / "record.json").read_text())
    assert record["is_try"]
    main, *batches = record["groups"][:3]
    lone = record["groups"][3:]
    assert main["left_out"] == {}
    assert {row["method"].partition("(")[0] for row in main["rows"]} == set(ms.list_methods())
    assert {row["stream"] for row in main["rows"]} == {"iid", "dirichlet:0.05"}
    assert all(sum(row["said"]) == row["images"] for row in main["rows"])
    draws = main["resamples"][f"{OURS}|iid|"]["accuracy"]
    assert {target: len(decoded(text)) for target, text in draws.items()} == dict.fromkeys(
        ("art_painting", "cartoon", "photo", "sketch"), MICRO.resamples
    )
    assert {row["stream_seed"] for row in main["rows"]} == {0}
    assert all(row["calibration_in_the_large"] >= 0 and row["nll"] > 0 for row in main["rows"])
    page = (finished / "results.md").read_text()
    assert "NLL / Brier / ECE % / calibration in the large, points" in page
    assert "; worst target: " in page.split("## verdicts")[1].split("## costs")[0]
    assert [group["pool"] for group in batches] == ["pacs-shared-plain-0", "pacs-independent-plain-0"]
    assert {row["condition"] for group in batches for row in group["rows"]} == {"batch 1", "batch 4"}
    assert {row["condition"] for group in lone for row in group["rows"]} == {"batch 1", "batch 4"}
    assert all(0 <= row["lone_sensitivity"] <= 1 for group in lone for row in group["rows"])
    assert {key.partition("|")[2] for key in lone[0]["resamples"]} == {"lone|batch 4"}
    assert "accuracy / lone sensitivity | mean | ensemble" in (finished / "results.md").read_text()
    assert "| regmean_pp |" in (finished / "results.md").read_text().replace("**", "")


def test_a_stage_may_have_stream_seeds_apart_from_training_seeds(roots: list[str], finished: Path) -> None:
    request = study_request("results", finished, [roots[1], roots[3]], stages=None, device="cpu")
    (stage,) = chosen_stages(MICRO.stages(half=False), ["main-pacs-shared"])
    options = {"variants": parse_variants("mean, ensemble"), "streams": ("iid",), "every_expert": False}
    seeded = replace(stage, plans=({**stage.plans[0], **options, "seeds": (7, 8)},))
    (group,) = _run_stage(request, seeded, dict.fromkeys(stage.pools, "any"), quiet)
    assert {(row["target"], row["stream_seed"]) for row in group["rows"]} == {
        (target, seed) for target in ("art_painting", "cartoon", "photo", "sketch") for seed in (7, 8)
    }
    result = paired_difference([group], "ensemble", "mean", Setting("iid"), "accuracy")
    assert result.levels == ("targets", "stream seeds", "groups or images")
    assert estimate([group], "mean", Setting("iid"), "nll").mean > 0


def test_a_second_call_runs_nothing_again(roots: list[str], finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (finished / "runs").rglob("run.json")}
    run_micro(roots, finished, "main-pacs-shared,batches-pacs,lone-pacs")
    assert {path: path.stat().st_mtime_ns for path in (finished / "runs").rglob("run.json")} == before


@pytest.mark.slow
def test_all_stages_from_nothing_to_the_tables(roots: list[str], tmp_path: Path) -> None:
    run_micro(roots, tmp_path, "")
    groups = read_records([tmp_path / "record.json"], allow_tries=True)
    blocks = all_blocks(groups)
    assert "0 were not measured" in blocks["bars"]
    assert "Not run" not in blocks["pacs"] + blocks["midog"]
    ablation = next(group for group in groups if group["kind"] == "ablation")
    assert len({row["method"] for row in ablation["rows"]}) == len(parse_variants(RESULTS.ablation))
    assert {name.partition("-")[0] for name in blocks} >= set(LIFE)
    assert "long:9" in blocks["long-midog"]
    assert "slides, batch 4" in blocks["slides-midog"]
    for group in (group for group in groups if group["kind"] in LIFE and group["kind"] != "long"):
        rows = {(row["method"], row["stream"], row["condition"]) for row in group["rows"]}
        assert {"|".join(row) for row in rows if row[2] == "batch 4"} == set(group["resamples"])
    costs = next(group for group in groups if group["kind"] == "costs" and group["dataset"] == "pacs")
    forwards = {cost["method"]: cost["forwards"] for cost in costs["costs"]}
    assert (forwards["mean"], forwards["ensemble"], forwards["entropy_adaptive"]) == (1, 3, 7)
    assert all(cost["ms"] > 0 for cost in costs["costs"])


def test_help_and_docs_do_not_call_the_plan_the_source_of_the_results_page() -> None:
    """docs/results.md has blocks of scripts/docs_tables.py only, from records that benchmarks/real_streams.py wrote."""
    (row,) = (line for line in (ROOT / "docs" / "bench.md").read_text().splitlines() if line.startswith("| `results`"))
    assert "larger study than" in row
    parameters = {each.name: each for each in typer.main.get_command(cli.app).commands["bench"].params}
    assert "docs/results.md" not in parameters["plan"].help
    assert "Behind docs/results.md" not in (ROOT / "src" / "mergestream" / "bench" / "plans.toml").read_text()


def test_the_plan_has_its_pools_and_stages() -> None:
    stages = RESULTS.stages(half=True)
    assert len({pool for stage in stages for pool in stage.pools}) == 13
    assert len(ring_of("pacs")) == 4
    assert [stage.name for stage in chosen_stages(stages, LIFE)] == [
        "prevalence-pacs", "missing-pacs", "recurrence-pacs", "lone-pacs", "sizes-pacs", "long-pacs",
        "prevalence-midog", "slides-midog", "recurrence-midog", "lone-midog", "sizes-midog", "long-midog",
    ]  # fmt: skip
    assert [stage.name for stage in chosen_stages(stages, ["main-pacs"])] == [
        "main-pacs-shared",
        "main-pacs-independent",
    ]
    with pytest.raises(ms.MergestreamError, match="main-pacs"):
        chosen_stages(stages, ["main-pcas"])


def test_a_missing_root_is_named(tmp_path: Path) -> None:
    for words, sentence in (((), "--root pacs=FOLDER_OR_ZIP"), (("--root", "data"), "--root NAME=FOLDER_OR_ZIP")):
        refused = command("bench", "--plan", "results", *words, "--out", str(tmp_path))
        assert refused.returncode == 2
        assert sentence in refused.stderr


# --- draws ----------------------------------------------------------------------------------------------------------


def test_units_are_drawn_whole_and_alike_for_one_key() -> None:
    random = np.random.RandomState(0)
    labels, units = random.randint(3, size=80), np.unique(random.randint(12, size=80), return_inverse=True)[1]
    draws = unit_draws(labels, units, "midog/two", 30)
    for unit in np.unique(units):
        assert (draws[:, units == unit].std(axis=1) == 0).all()
    assert (draws == unit_draws(labels, units, "midog/two", 30)).all()
    assert (draws != unit_draws(labels, units, "midog/other", 30)).any()


@pytest.mark.parametrize("classes", [2, 5])
def test_scores_under_draws_are_those_of_repeated_images(classes: int) -> None:
    random = np.random.RandomState(classes)
    labels = random.randint(classes, size=60)
    units = np.unique(random.randint(12, size=60), return_inverse=True)[1]
    # Few distinct values, so that there are ties.
    logits = torch.from_numpy(random.randint(-2, 3, size=(60, classes)).astype(np.float32))
    answers, truth = torch.softmax(logits, dim=-1), torch.from_numpy(labels)
    draws = unit_draws(labels, units, "any", 8)
    scores = drawn_scores(answers, answers.argmax(dim=-1), truth, torch.from_numpy(draws).double(), METRICS)
    for number, counts in enumerate(draws):
        picked = np.repeat(np.arange(60), counts)
        expected = summarise(answers[picked], truth[picked], [str(c) for c in range(classes)])
        for metric, values in scores.items():
            assert float(values[number]) == pytest.approx(expected[metric], abs=1e-6), metric


def test_half_precision_hardly_moves_a_drawn_auroc() -> None:
    random = np.random.RandomState(0)
    labels = torch.from_numpy((random.uniform(size=800) < 0.2).astype(int))
    logits = torch.from_numpy(random.normal(size=(800, 2)) * 4) + 2 * torch.nn.functional.one_hot(labels, 2)
    answers = torch.softmax(logits, dim=-1).float()
    draws = torch.from_numpy(unit_draws(labels.numpy(), np.arange(800), "any", 50)).double()
    exact, stored = (
        drawn_scores(each, answers.argmax(dim=-1), labels, draws, ("auroc",))["auroc"]
        for each in (answers, answers.half().float())
    )
    assert float((exact - stored).abs().max()) < 1e-4


# --- the record -----------------------------------------------------------------------------------------------------


def made_group(
    seed: int,
    answers: dict[str, dict[str, np.ndarray]],
    labels: dict[str, np.ndarray],
    stream_seeds: tuple[int, ...] = (0,),
    **more,
):
    """A group as the study makes it, from predictions by method and target; all stream seeds answer alike."""
    rows, resamples = [], {}
    for method, by_target in answers.items():
        drawn = {}
        for target, truth in labels.items():
            right = (by_target[target] == truth).astype(float)
            drawn[target] = encoded(drawn_means(right, truth, target))
            row = {"method": method, "stream": "iid", "condition": "", "target": target, "images": len(truth)}
            row |= {"said": np.bincount(by_target[target], minlength=3).tolist(), "accuracy": right.mean()}
            rows += [{**row, "stream_seed": stream_seed} for stream_seed in stream_seeds]
        resamples[f"{method}|iid|"] = {"accuracy": drawn}
    pool = PoolRecipe("pacs", "shared", "plain", seed)
    fixed = {"stage": "main-pacs-shared", "kind": "main", "pool": pool.name, **asdict(pool), "later": False}
    fixed |= {"fingerprint": f"of {seed}", "classes": ["a", "b", "c"], "left_out": {}, "ours": OURS, "seconds": 1.0}
    experts = {target: {"x": [len(truth), 0, 0]} for target, truth in labels.items()}
    return {**fixed, "experts": experts, "rows": rows, "resamples": resamples, **more}


def drawn_means(values: np.ndarray, truth: np.ndarray, target: str) -> np.ndarray:
    """Means of values [N] under the study's draws of a target's images [200]."""
    draws = unit_draws(truth, np.arange(len(truth)), f"pacs/{target}", 200)
    return (draws * values).sum(axis=1) / draws.sum(axis=1)


def some_answers(labels: dict[str, np.ndarray], seed: int, right: float) -> dict[str, np.ndarray]:
    random = np.random.RandomState(seed)
    return {
        target: np.where(random.uniform(size=len(truth)) < right, truth, random.randint(3, size=len(truth)))
        for target, truth in labels.items()
    }


@pytest.fixture(scope="module")
def labels() -> dict[str, np.ndarray]:
    random = np.random.RandomState(0)
    return {"photo": random.randint(3, size=90), "sketch": random.randint(3, size=140)}


def test_intervals_are_those_of_a_plain_bootstrap(labels: dict[str, np.ndarray]) -> None:
    """Of a method over targets and pools, and of a difference at one target, where only images are drawn."""
    answers = {
        seed: {"ours": some_answers(labels, seed, 0.8), "theirs": some_answers(labels, seed + 9, 0.6)}
        for seed in (0, 1)
    }
    replicates, expected, gaps, at = np.zeros(200), [], np.zeros(200), Setting("iid")
    for target, truth in labels.items():
        draws = unit_draws(truth, np.arange(len(truth)), f"pacs/{target}", 200)
        for seed, own in answers.items():
            right = [(own[method][target] == truth).astype(float) for method in ("ours", "theirs")]
            expected.append(right[0].mean())
            for r, counts in enumerate(draws):
                picked = np.repeat(np.arange(len(truth)), counts)
                replicates[r] += right[0][picked].mean() / 4
                if (target, seed) == ("photo", 0):
                    gaps[r] = right[0][picked].mean() - right[1][picked].mean()
    groups = [made_group(seed, own, labels) for seed, own in answers.items()]
    one = estimate(groups, "ours", at, "accuracy")
    assert one.mean == pytest.approx(np.mean(expected), abs=1e-9)
    assert (one.low, one.high) == pytest.approx(tuple(np.quantile(replicates, [0.025, 0.975])), abs=5e-5)
    photo = {"photo": labels["photo"]}
    gap = difference([made_group(0, answers[0], photo)], "ours", "theirs", at, "accuracy")
    repeated = np.tile(gaps, 5)  # as many as the resamples of targets and seeds
    assert (gap.low, gap.high) == pytest.approx(tuple(np.quantile(repeated, [0.025, 0.975])), abs=5e-5)
    assert difference(groups, "ours", "absent", at, "accuracy") is None


def test_without_draws_a_difference_has_no_interval(labels: dict[str, np.ndarray]) -> None:
    """As in batches of several sizes, whose means the bar 'nowhere worse' reads."""
    answers = {"ours": some_answers(labels, 0, 0.8), "theirs": some_answers(labels, 9, 0.6)}
    drawn, plain = made_group(0, answers, labels), made_group(0, answers, labels, resamples={})
    gaps = [difference([group], "ours", "theirs", Setting("iid"), "accuracy") for group in (drawn, plain)]
    assert gaps[0].mean == pytest.approx(gaps[1].mean)
    assert np.isfinite(gaps[0].low)
    assert np.isnan([gaps[1].low, gaps[1].high]).all()


def test_differences_resample_targets_and_seeds(labels: dict[str, np.ndarray]) -> None:
    answers = [
        {"ours": some_answers(labels, s, 0.8), "theirs": some_answers(labels, s + 9, 0.6)} for s in range(3)
    ]  # fmt: skip
    groups = [made_group(seed, own, labels, stream_seeds=(0, 1)) for seed, own in enumerate(answers)]
    at, by_images = Setting("iid"), np.zeros(200)
    for own in answers:
        for target, truth in labels.items():
            right = [(own[method][target] == truth).astype(float) for method in ("ours", "theirs")]
            by_images += drawn_means(right[0] - right[1], truth, target) / 6
    gap = difference(groups, "ours", "theirs", at, "accuracy")
    assert gap.high - gap.low > np.subtract(*np.quantile(by_images, [0.975, 0.025]))  # images alone
    result = paired_difference(groups, "ours", "theirs", at, "accuracy")
    assert result.levels == ("targets", "training seeds", "stream seeds", "groups or images")
    mean, worst = endpoints(groups, "ours", "theirs", at, "accuracy")
    assert (mean.outcome, mean.difference) == ("better", gap)
    assert worst.difference.mean == min(result.by_target.values())
    assert endpoints(groups, "ours", "absent", at, "accuracy") is None


def test_one_pool_from_two_sessions_and_tries_are_refused(labels: dict[str, np.ndarray], tmp_path: Path) -> None:
    groups = [made_group(0, {OURS: some_answers(labels, 0, 0.8)}, labels)]
    again = [{**groups[0], "fingerprint": "trained again"}]
    paths = []
    for name, own, later in (("a", groups, False), ("b", again, False), ("c", again, True)):
        paths.append(tmp_path / f"{name}.json")
        write_record(paths[-1], own, {"is_try": True, "later": later})
    with pytest.raises(ms.MergestreamError, match=r"two different pools"):
        read_records(paths[:2], allow_tries=True)
    assert len(read_records([paths[0], paths[2]], allow_tries=True)) == 2
    with pytest.raises(ms.MergestreamError, match="a try"):
        read_records(paths[:1])


def test_draws_survive_their_encoding() -> None:
    values = np.random.RandomState(0).uniform(size=500)
    assert abs(decoded(encoded(values)) - values).max() < 1e-5
    assert len(encoded(values)) < 1400


# --- verdicts and pages ---------------------------------------------------------------------------------------------


def test_verdicts_follow_from_the_numbers(labels: dict[str, np.ndarray]) -> None:
    good, bad = some_answers(labels, 1, 0.9), some_answers(labels, 2, 0.5)
    answers = {"entropy_adaptive": good, "mean": bad, "ensemble": bad, OURS: good}
    verdicts = {bar.sentence: bar.holds for bar in all_bars([made_group(0, answers, labels)])}
    wins = next(s for s in verdicts if "shared heads, iid, accuracy: entropy_adaptive - mean" in s)
    assert verdicts[wins] is True
    assert wins.endswith("**holds**")
    loses = next(s for s in verdicts if f"shared heads, iid, accuracy: {OURS} - entropy_adaptive" in s)
    assert verdicts[loses] is False
    assert "= +0.0 [+0.0, +0.0] points" in loses
    assert next(h for s, h in verdicts.items() if s.startswith("PACS, independent heads, iid")) is None
    bars = all_bars([made_group(0, {**answers, OURS: bad}, labels)])
    everywhere = next(bar for bar in bars if "nowhere worse" in bar.sentence)
    assert everywhere.holds is False
    assert "(PACS, shared heads, iid, accuracy); it loses at " in everywhere.sentence


def test_a_class_that_is_given_up_is_a_collapse(labels: dict[str, np.ndarray]) -> None:
    group = made_group(0, {OURS: some_answers(labels, 0, 0.8)}, labels)
    group["experts"] = {target: {"x": [80, 15, 5], "y": [75, 20, 5]} for target in labels}
    for counts, lost in (([97, 3, 0], ["b", "c", "b", "c"]), ([95, 4, 1], [])):  # 4 of 17.5 and 1 of 5: a fifth
        for row in group["rows"]:
            row["images"], row["said"] = 100, counts
        rows, collapsed = collapses_of([group], OURS)
        assert rows == 2
        assert [text.split("'")[1] for text in collapsed] == lost


def test_a_captured_rule_does_not_hold(labels: dict[str, np.ndarray]) -> None:
    def row(condition: str, agreed: float) -> dict:
        return {"method": OURS, "stream": "iid", "condition": condition, "accuracy": 0.5, "agrees_with_loud": agreed}

    group = made_group(0, {}, labels, kind="hostile")
    for after, holds in ((0.69, True), (0.71, False)):
        own = {**group, "rows": [row("head x1", 0.4), row("head x100", after)]}
        bars = [bar for bar in all_bars([own]) if f"capture {OURS}" in bar.sentence]
        assert [bar.holds for bar in bars] == [holds, None]


def test_points_print_losses_as_losses() -> None:
    assert Estimate(-0.012, -0.02, -0.004).points() == "-1.2 [-2.0, -0.4]"
    assert Estimate(0.005, float("nan"), float("nan")).points() == "+0.5"


def test_later_runs_are_marked(labels: dict[str, np.ndarray]) -> None:
    answers = {"mean": some_answers(labels, 3, 0.5), OURS: some_answers(labels, 5, 0.7)}
    first = made_group(0, answers, labels)
    later = {**made_group(0, {OURS: some_answers(labels, 6, 0.9)}, labels), "later": True, "fingerprint": "again"}
    every = all_blocks([first, later])
    assert f"| {OURS} (later run) |" in every["pacs"]
    assert "later run" not in all_blocks([first])["pacs"]
    assert "**later run**" in every["later-bars"]
    assert every["bars"] == all_blocks([first])["bars"]


@pytest.mark.slow
def test_the_published_pages_are_those_of_their_records() -> None:
    """What scripts/docs_tables.py writes."""
    script = runpy.run_path(str(ROOT / "scripts" / "docs_tables.py"))
    with_blocks, blocks = script["with_blocks"], {name: draw() for name, draw in script["all_blocks"]().items()}
    for page in script["PAGES"]:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert "<!-- real:begin " in text
        assert with_blocks(text, blocks, ROOT / page) == text
    for broken in ("<!-- real:begin smumary -->", "<!-- real:begin summary -->"):
        with pytest.raises(ms.MergestreamError, match="summary"):
            with_blocks(broken, blocks, ROOT / "page.md")
