"""`mergestream bench` end to end: the real command line on a tiny consortium's own table of images."""

import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import jsonschema
import pytest
import torch

import mergestream as ms
from benching import bench_arguments, command, contents, write_pool
from mergestream.bench import evaluation
from mergestream.bench.engine import pool_at_target
from mergestream.bench.engine.benchmark import run_bench, run_plan
from mergestream.bench.engine.missing_statistics import statistics_command
from mergestream.bench.engine.plan import PLANS, BenchPlan, Target, plan_from
from mergestream.data.datasets import DATASETS, DataRequest
from mergestream.data.datasets.standins.drawing import SITES
from mergestream.methods import ORIGINAL, Batch
from mergestream.methods.spelling import parse_variants
from mergestream.pool import parts
from mergestream.pool.expert_card import BASE
from mergestream.runtime.errors import PoolError
from mergestream.runtime.parallel import quiet, run_jobs
from mergestream.training.pool_statistics import measure_pool

table_data = partial(DataRequest.parse, "table")
SCHEMAS = Path(__file__).parent.parent / "docs" / "schemas"


def test_it_prints_tables_and_what_was_left_out(benched: tuple[Path, str]) -> None:
    text = benched[1]
    for word in ("Accuracy on table", "Balanced accuracy", "iid", "dirichlet", "entropy_adaptive", "oracle"):
        assert word in text
    assert "Left out: regmean_pp" in text  # its statistics belong to one pool and were not measured
    assert "mergestream pool statistics" in text  # what to do
    assert "--gram-pp 1600 --leave-out all" in text.replace("\n", " ")
    assert "On iid, entropy_adaptive (" in text


def test_it_writes_records_json_csv_markdown_and_latex(benched: tuple[Path, str]) -> None:
    out = benched[0]
    results = json.loads((out / "results.json").read_text())
    jsonschema.validate(results, json.loads((SCHEMAS / "bench.schema.json").read_text()))
    methods = set(ms.list_methods()) - {"regmean_pp", "single_expert"}
    labels = {row["label"] for row in results["results"]}
    assert labels == methods | {"single_expert, on average", "oracle: best single expert"}
    runs = [ms.Run.load(folder) for folder in (out / "runs").iterdir()]
    per_target = len(methods) + 2  # two experts remain when one site is left out
    assert len(runs) == per_target * len(SITES) * 2 * 2
    schema = json.loads((SCHEMAS / "run.schema.json").read_text())
    validator = jsonschema.validators.validator_for(schema)(schema)
    for folder in (out / "runs").iterdir():
        validator.validate(json.loads((folder / "run.json").read_text()))
    for run in runs:
        assert run.arguments["data"]["domain"] not in run.arguments["pool"]["experts"]
        assert set(run.metrics["subgroups"]["scanner"]) == {"A", "B"}
        assert "collapsed" in run.metrics
    lines = list(csv.DictReader((out / "results.csv").open()))
    assert len(lines) == len(runs)
    accuracy = {run.hash: run.accuracy for run in runs}
    assert all(float(line["accuracy"]) == accuracy[line["run"]] for line in lines)
    for run in runs:
        (line,) = [line for line in lines if line["run"] == run.hash]
        for name in ("nll", "brier", "ece", "calibration_in_the_large"):
            assert float(line[name]) == run.metrics[name]
    assert 0 < results["majority_shares"]["iid"] < results["majority_shares"]["dirichlet:0.05"] <= 1
    markdown, latex = ((out / f"results.{ending}").read_text() for ending in ("md", "tex"))
    for title in (
        "Mean ranks",
        "Accuracy and ranking",
        "Probabilities",
        "Accuracy per target",
        "by scanner",
        "worst target",
        "secondary endpoints",
    ):
        assert title in markdown
        assert title in latex
    assert latex.count("\\begin{tabular}") == latex.count("\\end{tabular}") == markdown.count("\n## ") - 1
    assert "entropy\\_adaptive" in latex


def test_all_methods_see_the_same_batches(benched: tuple[Path, str]) -> None:
    seen: dict[tuple, set] = {}
    for folder in (benched[0] / "runs").iterdir():
        arguments = json.loads((folder / "run.json").read_text())["arguments"]
        place = arguments["data"]["domain"], arguments["stream"]["name"], arguments["seed"]
        seen.setdefault(place, set()).add(arguments["stream"]["hash"])
    assert len(seen) == len(SITES) * 2 * 2
    assert all(len(hashes) == 1 for hashes in seen.values())


def test_another_empty_folder_gives_the_same_bits(consortium: Path, benched: tuple[Path, str], tmp_path: Path) -> None:
    again = command(
        *bench_arguments(consortium, tmp_path, "--methods", "mean,entropy_adaptive,adamerging", "--targets", "lyon")
    )
    assert again.returncode == 0, again.stderr
    whole, some = contents(benched[0]), contents(tmp_path)
    assert {name: whole[name] for name in some} == some


@pytest.mark.slow
def test_processes_give_the_bits_of_one(consortium: Path, benched: tuple[Path, str], tmp_path: Path) -> None:
    done = command(*bench_arguments(consortium, tmp_path / "again", "--jobs", "2"))
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path / "again") == contents(benched[0])


def test_a_second_call_does_nothing_again(consortium: Path, benched: tuple[Path, str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in (benched[0] / "runs").rglob("*") if path.is_file()}
    again = command(*bench_arguments(consortium, benched[0]))
    assert again.returncode == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 25])
def test_killed_at_any_moment_it_goes_on_to_the_same_bits(
    consortium: Path, benched: tuple[Path, str], tmp_path: Path, after: int
) -> None:
    out = tmp_path / "killed"
    line = [sys.executable, "-m", "mergestream", *bench_arguments(consortium, out, "--jobs", "2")]
    process = subprocess.Popen(line, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True)
    runs, deadline = out / "runs", time.monotonic() + 120
    while len(list(runs.glob("[!.]*")) if runs.exists() else []) < after and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    finished = {path: path.stat().st_mtime_ns for path in runs.glob("[!.]*/run.json")}
    total = len(contents(benched[0]))
    assert after <= len(finished) < total  # it was killed in the middle
    resumed = command(*bench_arguments(consortium, out))
    assert resumed.returncode == 0, resumed.stderr
    assert contents(out) == contents(benched[0])
    assert {path: path.stat().st_mtime_ns for path in finished} == finished


def test_the_pool_is_read_once(consortium: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[str]()
    open_weights = parts.open_weights
    monkeypatch.setattr(
        parts, "open_weights", lambda folder, *more: (opened.append(folder.name), open_weights(folder, *more))[1]
    )
    ended = command(*bench_arguments(consortium, tmp_path / "out", "--methods", "mean,ties,task_arithmetic"))
    assert ended.returncode == 0, ended.stderr
    assert sorted(opened) == sorted([BASE, *SITES])


def test_expert_logits_are_computed_once_for_all_methods(
    consortium: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []
    compute = evaluation.domain_logits
    monkeypatch.setattr(pool_at_target, "domain_logits", lambda *a, **k: counted.append(a[2]) or compute(*a, **k))
    forwards = []
    run = ms.ExpertPool.logits_of_views

    def counting(pool: ms.ExpertPool, batch: Batch, views: tuple[str, ...] = (ORIGINAL,)) -> dict[str, torch.Tensor]:
        forwards.append(len(pool) * len(batch.images) * len(set(views) - set(batch.expert_logits)))
        return run(pool, batch, views)

    monkeypatch.setattr(ms.ExpertPool, "logits_of_views", counting)
    methods = "ensemble, select_expert, ensemble(average=probabilities), entropy_adaptive, single_expert"
    plan = plan_from(
        data=table_data(consortium / "data"), pools=[str(consortium / "pool")], methods=methods,
        streams="iid,sorted", seeds="0,1", batch_sizes="4",
    )  # fmt: skip
    run_bench(plan, tmp_path, quiet)
    assert sorted(counted) == sorted(["original", "hflip"] * len(SITES))
    # Two experts on the 18 images of each site, plain and flipped, and nothing more.
    assert sum(forwards) == 2 * 18 * len(SITES) * 2


@pytest.mark.parametrize(
    "methods",
    [pytest.param("all", marks=pytest.mark.slow), "fisher, regmean, regmean_pp, tent, lame(mean), auto, single_expert"],
)
def test_the_command_reads_the_pool_once_and_constructs_each_method_once(
    consortium: Path, measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, methods: str
) -> None:
    """Once for each pool without one site, wherever a method was checked, planned and run."""
    constructed, read = list[tuple[str, ...]](), []
    construct, load = ms.Method.__post_init__, ms.ExpertPool.load

    def counting(method: ms.Method) -> None:
        construct(method)
        constructed.append((method.name, str(method.options()), *method.pool.names))

    monkeypatch.setattr(ms.Method, "__post_init__", counting)
    monkeypatch.setattr(ms.ExpertPool, "load", lambda *a, **k: read.append(a) or load(*a, **k))
    words = bench_arguments(consortium, tmp_path, "--methods", methods)
    result = command(*(str(measured) if word == str(consortium / "pool") else word for word in words))
    assert result.returncode == 0, result.stderr
    assert len(read) == 1
    # What a wrapper holds inside may stand in the list as well.
    own = [each for each in constructed if methods != "all" or each[0] in ("fisher", "regmean", "regmean_pp", "auto")]
    assert len({each[2:] for each in own}) == len(SITES)
    assert {each: own.count(each) for each in own if own.count(each) > 1} == {}


@pytest.fixture(scope="module")
def measured(consortium: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The consortium with all statistics of the paper's plans."""
    folder = tmp_path_factory.mktemp("measured")
    shutil.copytree(consortium / "pool", folder / "pool")
    counts = {"fisher_mergelm": 4, "gram_pp": 4}
    measure_pool(folder / "pool", table_data(consortium / "data"), folder / "work", counts, "cpu")
    return folder / "pool"


def named_plan(consortium: Path, pool: Path, name: str) -> BenchPlan:
    return plan_from(data=table_data(consortium / "data"), pools=[str(pool)], plan=name, seeds="0", targets="lyon")


@pytest.mark.parametrize("name", list(PLANS))
def test_named_plans_run_with_all_their_rows(consortium: Path, measured: Path, tmp_path: Path, name: str) -> None:
    findings = run_bench(named_plan(consortium, measured, name), tmp_path, quiet)
    assert {row.stream for row in findings.rows} == set(PLANS[name]["streams"].split(","))
    assert [parse_variants(label)[0] for label in findings.methods] == list(parse_variants(PLANS[name]["methods"]))
    assert set(findings.methods) <= {row.label for row in findings.rows}
    assert findings.left_out == []


def test_a_named_plan_never_drops_a_row_but_names_the_command_that_measures_what_is_missing(
    consortium: Path, tmp_path: Path
) -> None:
    shutil.copytree(consortium / "pool", tmp_path / "pool")
    plan = named_plan(consortium, tmp_path / "pool", "paper-table1")
    with pytest.raises(PoolError) as refused:
        run_bench(plan, tmp_path / "out", quiet)
    line = str(refused.value).rpartition("Measure them: ")[2]
    words = shlex.split(line)
    assert words[:4] == ["mergestream", "pool", "statistics", str(tmp_path / "pool")]
    assert line.endswith("--gram-pp 1600 --fisher 500 --leave-out all")
    assert not list((tmp_path / "out" / "runs").glob("*"))
    done = command(*words[1:], "--device", "cpu")  # as it is printed
    assert done.returncode == 0, done.stderr
    assert run_bench(plan, tmp_path / "out", quiet).left_out == []


def test_the_command_that_is_named_fits_the_plan(consortium: Path) -> None:
    plan = named_plan(consortium, consortium / "pool", "paper-table1")
    pair, one = Target(("lyon", "brest"), ("iid",)), Target(("lyon",), ("iid",))
    assert statistics_command(plan, "pool", ["gram"], [one]).endswith("--gram 1600")
    assert statistics_command(plan, "pool", ["gram_pp"], [pair, one]).endswith("--leave-out lyon+brest --leave-out all")
    ood = replace(plan, protocol="ood", data=replace(plan.data, options=(("part", "a b"),), skip_bad=3))
    line = statistics_command(ood, "pool", ["gram_pp"], [one])
    assert line.endswith("--data-option 'part=a b' --skip-bad 3 --gram-pp 1600 --leave-out none")


def test_regmean_pp_with_other_options_names_no_command(consortium: Path, tmp_path: Path) -> None:
    plan = plan_from(
        data=table_data(consortium / "data"), pools=[str(consortium / "pool")], methods="regmean_pp(ridge=0.5)"
    )
    with pytest.raises(PoolError, match=r"ridge=0\.5") as refused:
        run_bench(plan, tmp_path, quiet)
    assert "pool statistics" not in str(refused.value)


def test_batch_sizes_and_loud_heads_are_rows_of_their_own(consortium: Path, tmp_path: Path) -> None:
    methods = {"methods": "mean,ensemble", "batch_sizes": "4,6", "loud_heads": "1,100", "targets": "lyon"}
    findings = run_bench(plan_for(consortium, consortium / "pool", **methods), tmp_path, quiet)
    assert {row.stream for row in findings.rows} == {
        f"iid, batch {size}, head x{factor}" for size in (4, 6) for factor in (1, 100)
    }
    runs = [ms.Run.load(folder) for folder in (tmp_path / "runs").iterdir()]
    assert {max(map(len, run.batches)) for run in runs if "batch 6" in run.arguments["stream"]["name"]} == {6}
    first = ms.ExpertPool.load(consortium / "pool").without("lyon").names[0]
    loud, plain = (
        next(
            run
            for run in runs
            if run.arguments["options"].get("expert") == first
            and run.arguments["stream"]["name"] == f"iid, batch 4, head x{factor}"
        )
        for factor in (100, 1)
    )
    assert torch.equal(loud.predictions, plain.predictions)  # it says the same, but louder
    assert loud.metrics["nll"] != plain.metrics["nll"]
    # The ensemble follows the loud expert.
    ensemble = next(
        run for run in runs if run.arguments["label"] == "ensemble" and "4, head x100" in str(run.arguments)
    )
    assert (ensemble.predictions == loud.predictions).double().mean() > 0.9


def test_timed_steps_share_no_logits_and_half_precision_is_another_run(consortium: Path, tmp_path: Path) -> None:
    request = {"methods": "ensemble", "targets": "lyon"}
    run_bench(plan_for(consortium, consortium / "pool", **request, timed=True), tmp_path, quiet)
    assert not (tmp_path / "cache" / "logits").exists()
    run_bench(plan_for(consortium, consortium / "pool", **request, dtype="bfloat16"), tmp_path, quiet)
    runs = [ms.Run.load(folder) for folder in (tmp_path / "runs").iterdir()]
    assert sorted(run.arguments.get("dtype", "timed") for run in runs if run.arguments["label"] == "ensemble") == [
        "bfloat16",
        "timed",
    ]


def test_paired_seeds_give_each_pool_its_own_stream(consortium: Path, tmp_path: Path) -> None:
    write_pool(tmp_path / "other", seed=5)
    pools = [str(consortium / "pool"), str(tmp_path / "other")]
    plan = replace(plan_for(consortium, Path("unused"), pools=pools, seeds="3,4", targets="lyon"), paired_seeds=True)
    done = run_plan(plan, tmp_path / "out", quiet)
    seeds = [{ms.Run.load(folder).arguments["seed"] for folder in folders} for folders in done.by_pool.values()]
    assert seeds == [{3}, {4}]
    with pytest.raises(ms.MergestreamError, match="one seed per pool"):
        replace(plan, seeds=(3,))


def test_groups_are_resampled_where_the_data_name_them(consortium: Path, tmp_path: Path) -> None:
    shutil.copytree(consortium / "data", tmp_path / "data")
    table = tmp_path / "data" / "samples.csv"
    rows = list(csv.DictReader(table.open()))
    lines = [{**row, "group": f"patient {number % 6}"} for number, row in enumerate(rows)]
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, lines[0].keys())
        writer.writeheader()
        writer.writerows(lines)
    plan = plan_from(data=table_data(tmp_path / "data"), pools=[str(consortium / "pool")], methods="mean,ensemble")
    findings = run_bench(plan, tmp_path / "out", quiet)
    assert [row.label for row in findings.grouped] == ["mean", "ensemble"]
    for row, plain in zip(findings.grouped, findings.rows, strict=False):
        assert row.accuracy.mean == pytest.approx(plain.accuracy.mean)
        assert row.auroc.low <= row.auroc.mean <= row.auroc.high
    assert "AUROC, groups resampled" in (tmp_path / "out" / "results.md").read_text()
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    jsonschema.validate(results, json.loads((SCHEMAS / "bench.schema.json").read_text()))
    run = ms.Run.load(next((tmp_path / "out" / "runs").iterdir()))
    assert int(run.groups.max()) < 6


def test_mixtures_hold_several_targets_out(consortium: Path, tmp_path: Path) -> None:
    write_pool(tmp_path / "pool", (*SITES, "graz"))
    base = bench_arguments(
        consortium, tmp_path / "out", "--methods", "mean,ensemble", "--streams", "mixture:smooth,iid"
    )
    line = [str(tmp_path / "pool") if word == str(consortium / "pool") else word for word in base]
    refused = command(*line)
    assert refused.returncode == 2
    assert "--targets pairs" in refused.stderr
    done = command(*line, "--targets", "pairs")
    assert done.returncode == 0, done.stderr
    for folder in (tmp_path / "out" / "runs").iterdir():
        run = ms.Run.load(folder)
        held_out = set(run.arguments["data"]["domain"].split("+"))
        assert len(held_out) == 2
        assert not held_out & set(run.arguments["pool"]["experts"])
        assert len(run.labels) == 36


REAL_LIFE = "prevalence:0.2,prevalence:0.4:benign+dirichlet:0.05,missing:1,slides,lone:malignant,recurrence,long:9"


def test_streams_of_real_life_from_the_command_line(consortium: Path, tmp_path: Path) -> None:
    shutil.copytree(consortium / "data", tmp_path / "data")
    write_pool(tmp_path / "pool", (*SITES, "graz"))
    words = ("--methods", "mean,entropy_adaptive", "--streams", REAL_LIFE, "--seeds", "0", "--batch-size", "1,4")
    done = command(*bench_arguments(tmp_path, tmp_path / "out", *words), "--targets", "lyon,lyon+brest")
    assert done.returncode == 0, done.stderr
    runs = [ms.Run.load(folder) for folder in (tmp_path / "out" / "runs").iterdir()]
    names = {(run.stream.partition(", ")[0], run.target) for run in runs}
    specs = set(REAL_LIFE.split(","))
    assert names == {(s, t) for s in specs for t in ("lyon", "brest+lyon")} - {("recurrence", "lyon")}
    for run in runs:
        plain, labels = run.stream.partition(", ")[0], run.labels.tolist()
        assert max(map(len, run.batches)) == run.arguments["batch_size"]
        assert run.metrics["images"] == len(labels)
        assert sum(each["images"] for each in run.metrics["subgroups"]["scanner"].values()) == len(labels)
        assert ("lone_sensitivity" in run.metrics) == plain.startswith("lone")
        if plain == "long:9":
            assert len(run.batches) == 9
            assert run.arguments["stream"]["repeats"]
        if plain == "missing:1":
            assert len(set(labels)) == 2
        if plain == "prevalence:0.2":
            assert abs(labels.count(2) - 0.2 * len(labels)) <= 0.5
        if plain == "lone:malignant":
            assert run.metrics["lone_sensitivity"] == run.metrics["recall"]["malignant"]
    schema = json.loads((SCHEMAS / "run.schema.json").read_text())
    for folder in (tmp_path / "out" / "runs").iterdir():
        jsonschema.validate(json.loads((folder / "run.json").read_text()), schema)
    page = (tmp_path / "out" / "results.md").read_text()
    assert "## Sensitivity of the lone positive" in page
    assert "lone_sensitivity" in (tmp_path / "out" / "results.csv").read_text()
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {row["stream"].partition(", ")[0] for row in results["grouped"]} == specs - {"long:9"}


def test_a_static_method_on_a_subset_has_the_metrics_of_a_live_one(consortium: Path) -> None:
    """A static method answers once for all streams: what it reports must be about the stream's images alone."""
    data = ms.load_dataset("table", root=consortium / "data", size=16, interpolation="bicubic")["lyon"]
    pool = ms.ExpertPool.load(consortium / "pool").without("lyon")
    method, logits = ms.create_method("mean", pool), {}
    logits["original"] = evaluation.domain_logits(pool, data, "original")
    whole = ms.evaluate(method, data, [torch.arange(len(data)).numpy()], expert_logits=logits)
    for spec in ("prevalence:0.2", "missing:1", "lone", "long:7"):
        stream = ms.streams.create_stream(spec, data.labels, batch_size=4, classes=data.classes)
        arguments = evaluation.describe_run(method, data, stream)
        moved = whole.reordered(arguments, stream.batches, **evaluation.arrivals(data, stream, logits))
        live = ms.evaluate(method, data, stream, expert_logits=logits)
        assert moved.metrics.keys() == live.metrics.keys()
        for key in ("accuracy", "subgroups", "collapsed", "images", "lone_sensitivity"):
            assert moved.metrics.get(key) == live.metrics.get(key), key


def test_another_reference(consortium: Path, tmp_path: Path) -> None:
    methods = "entropy_adaptive(head=shared), mean, ensemble"
    request = {
        "data": table_data(consortium / "data"),
        "pools": [str(consortium / "pool")],
        "methods": methods,
    }
    named = run_bench(plan_from(**request, reference="ensemble"), tmp_path, quiet)
    assert {duel.ours for duel in named.duels} == {"ensemble"}
    assert {duel.theirs for duel in named.duels} == {"entropy_adaptive(head=shared)", "mean"}
    usual = run_bench(plan_from(**request), tmp_path, quiet)
    assert {duel.ours for duel in usual.duels} == {"entropy_adaptive(head=shared)"}


def test_a_mixture_needs_two_experts(consortium: Path, tmp_path: Path) -> None:
    message = refusal(consortium, tmp_path / "out", "--streams", "mixture:abrupt", "--targets", "lyon+brest")
    assert "Without the experts of brest+lyon only 'turin' is left" in message


def test_ood_uses_all_experts_on_the_outside_sets(tmp_path: Path) -> None:
    source = DATASETS["isic"]
    source.write_standin(tmp_path / "data")
    names = tuple(domain for domain in source.card.domains)
    write_pool(tmp_path / "pool", names, classes=source.card.classes)
    plan = plan_from(
        data=DataRequest.parse("isic", tmp_path / "data"),
        pools=[str(tmp_path / "pool")],
        methods="mean,ensemble",
        protocol="ood",
    )
    findings = run_bench(plan, tmp_path / "out", quiet)
    runs = [ms.Run.load(folder) for folder in (tmp_path / "out" / "runs").iterdir()]
    assert {run.arguments["data"]["domain"] for run in runs} == set(source.card.outside)
    assert all(set(run.arguments["pool"]["experts"]) == set(names) for run in runs)
    assert any("lesion" in warning for warning in findings.warnings)  # the overlap is a warning
    write_pool(tmp_path / "seen", ("ph2", "hair"), classes=source.card.classes)
    leaky = replace(plan, pools=(str(tmp_path / "seen"),))
    with pytest.raises(ms.MergestreamError, match="Leakage: the expert 'ph2'"):
        run_bench(leaky, tmp_path / "out", quiet)


def test_wrappers_are_written_around_their_base(consortium: Path, tmp_path: Path) -> None:
    texts = (
        "lame(mean), lame(base=mean, k=5), lame(ensemble(views=hflip)), corrected(ensemble), t3a(lame(mean|ensemble))"
    )
    more = ("--methods", texts, "--seeds", "0", "--streams", "iid")
    done = command(*bench_arguments(consortium, tmp_path / "out", *more))
    assert done.returncode == 0, done.stderr
    runs = [ms.Run.load(folder) for folder in (tmp_path / "out" / "runs").iterdir()]
    labels = {run.arguments["label"] for run in runs if not run.is_single}
    wrapped = {"lame(ensemble(views=(hflip)))", "corrected(ensemble)", "t3a(lame(ensemble))"}
    assert labels == {"lame", "t3a(lame)", *wrapped}  # the first two are one method
    refused = command(*bench_arguments(consortium, tmp_path / "out", "--methods", "lame(ensemble(views=vflip))"))
    assert refused.returncode == 2
    assert "does not keep the labels of 'table'" in refused.stderr


def test_organs_are_never_flipped(tmp_path: Path) -> None:
    """Left and right are classes there: the view is the set's own, and another is refused."""
    source = DATASETS["organs"]
    source.write_standin(tmp_path / "data")
    write_pool(tmp_path / "pool", source.card.domains, classes=source.card.classes)
    organs = partial(DataRequest.parse, "organs", tmp_path / "data")
    request = {"data": organs(), "pools": [str(tmp_path / "pool")]}
    run_bench(plan_from(**request, methods="entropy_adaptive"), tmp_path / "out", quiet)
    for folder in (tmp_path / "out" / "runs").iterdir():
        arguments = ms.Run.load(folder).arguments
        assert arguments["options"].get("views", ["brightness"]) == ["brightness"]
    with pytest.raises(ms.MergestreamError, match="does not keep the labels of 'organs' true"):
        run_bench(plan_from(**request, methods="entropy_adaptive(views=(hflip,))"), tmp_path / "out", quiet)
    disjoint = plan_from(**{**request, "data": organs(["part=test"])}, methods="mean")
    run_bench(disjoint, tmp_path / "test", quiet)
    whole, tested = (
        {r.arguments["data"]["domain"]: len(r.labels) for r in map(ms.Run.load, (tmp_path / out / "runs").iterdir())}
        for out in ("out", "test")
    )
    assert all(0 < tested[domain] < whole[domain] for domain in whole)


def test_several_pools_are_paired_by_pool(consortium: Path, tmp_path: Path) -> None:
    write_pool(tmp_path / "other", seed=5)
    more = ("--pool", str(tmp_path / "other"), "--json")
    done = command(*bench_arguments(consortium, tmp_path / "out", "--methods", "mean,ensemble", "--seeds", "0"), *more)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    rows = {(row["label"], row["stream"]): row["runs"] for row in results["results"]}
    assert rows["mean", "iid"] == 2 * len(SITES)
    assert all(duel["wins"] + duel["losses"] <= 2 * len(SITES) for duel in results["duels"])


def refusal(folder: Path, out: Path, *more: str) -> str:
    """The one line on stderr of a command that fails."""
    done = command(*bench_arguments(folder, out, *more))
    # Without options, or with these, the command is right and the pool or the folder is not.
    about_data = not more or more[-1] in ("regmean_pp", "csv=1")
    assert done.returncode == (1 if about_data else 2)
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--methods", "means"), "Did you mean 'mean'"),
        (("--methods", "mean(colour=red)"), "option of 'mean'"),
        (("--methods", "mean(coefficients=uniform"), "bracket"),
        (("--methods", "regmean_pp"), "needs statistics"),
        (("--streams", "diriclet:0.1"), "Did you mean 'dirichlet'"),
        (("--streams", "dirichlet"), "with its number"),
        (("--targets", "nice"), "target in 'table'"),
        (("--plan", "paper-table9"), "Did you mean 'paper-table"),
        (("--protocol", "ood"), "no outside test sets"),
        (("--protocol", "loo"), "protocol"),
        (("--images", "0"), "'images' is a whole number of at least 1"),
        (("--images", "-5"), "'images' is a whole number of at least 1"),
        (("--skip-bad", "-1"), "'skip_bad' is a whole number of at least 0"),
        (("--jobs", "0"), "--jobs is at least 1"),
        (("--targets", ","), "No target is named"),
        (("--streams", "prevalence:0.5:cancer"), "no class called 'cancer'"),
        (("--streams", "prevalence:0.001"), "'prevalence:0.001' is not possible at"),
        (("--streams", "recurrence"), "--targets pairs"),
        (("--streams", "missing:3"), "no image is left"),
        (("--streams", "long:many"), "'long' is a whole number"),
        (("--streams", "lone+iid"), "subsets, then one order"),
        (("--streams", "mixture:odd"), "'odd' is not a choice for 'mixture'"),
        (("--streams", "iid:3"), "takes no value"),
        (("--methods", "entropy_adaptive(momentum=)"), "has no value"),
        (("--methods", "entropy_adaptive(views=3)"), "'views' is a list of names"),
        (("--methods", "entropy_adaptive(views=nope)"), "no view called 'nope'"),
        (("--data-option", "size=64"), "option of 'table'"),
        (("--data-option", "root=x"), "option of 'table'"),
        (("--data-option", "csv=1"), "should hold 1 once"),
        (("--data-option", "classes=3"), "classes= is a list of names"),
        (("--device", "cuda"), "no CUDA device"),
        (("--seeds", "one"), "whole numbers"),
        (("--data-option", "part"), "name=value"),
        (("--data-option", "colour=red"), "option of 'table'"),
        (("--reference", "means"), "Did you mean 'mean'"),
        (("--batch-size", "0"), "'batch_size' is a whole number of at least 1"),
        (("--device", "tpu"), "device"),
        (("--engine", "spark"), "engine"),
        (("--methods", "entropy_adaptive(views=(vflip,))"), "does not keep the labels of 'table'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_requests_are_refused_in_a_sentence(
    consortium: Path, tmp_path: Path, more: tuple[str, ...], sentence: str
) -> None:
    if more[-1] == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    assert sentence in refusal(consortium, tmp_path / "out", *more)


def test_a_pool_that_saw_the_target_is_leakage(consortium: Path, tmp_path: Path) -> None:
    write_pool(tmp_path / "pool", domains={"brest": "brest+lyon"})
    line = bench_arguments(consortium, tmp_path / "out", "--methods", "mean", "--streams", "iid")
    leaky = tuple(str(tmp_path / "pool") if word == str(consortium / "pool") else word for word in line)
    refused = command(*leaky)
    assert refused.returncode == 1
    assert "Leakage: the expert 'brest' was trained on the target" in refused.stderr
    assert "--allow-seen" in refused.stderr
    allowed = command(*leaky, "--allow-seen")
    assert allowed.returncode == 0, allowed.stderr
    assert "--allow-seen" in allowed.stdout
    runs = [ms.Run.load(folder) for folder in (tmp_path / "out" / "runs").iterdir()]
    assert all(run.arguments["allow_seen"] and len(run.arguments["pool"]["experts"]) == 3 for run in runs)


def test_an_expert_trained_on_the_targets_images_under_another_name_is_leakage(
    consortium: Path, tmp_path: Path
) -> None:
    dataset = ms.load_dataset("table", root=consortium / "data", size=16, interpolation="bicubic")
    assert ms.ExpertPool.load(consortium / "pool").preprocessing.interpolation == "bicubic"
    recipes = {"brest": {"data": dataset["lyon"].fingerprint()}}
    write_pool(tmp_path / "pool", domains={"brest": "elsewhere"}, recipes=recipes)
    plan = plan_from(data=table_data(consortium / "data"), pools=[str(tmp_path / "pool")], methods="mean")
    with pytest.raises(ms.MergestreamError, match="Leakage"):
        run_bench(plan, tmp_path / "out", quiet)


def plan_for(consortium: Path, pool: Path, images: int | None = None, options: tuple = (), **more) -> BenchPlan:
    data = table_data(consortium / "data", options, images=images)
    return plan_from(**{"data": data, "pools": [str(pool)], "methods": "mean", **more})


def test_a_choice_of_images_does_not_hide_leakage(consortium: Path, tmp_path: Path) -> None:
    seen = ms.load_dataset("table", root=consortium / "data", size=16, interpolation="bicubic")["lyon"].fingerprint()
    write_pool(tmp_path / "pool", domains={"brest": "elsewhere"}, recipes={"brest": {"data": seen}})
    with pytest.raises(ms.MergestreamError, match="Leakage"):
        run_bench(plan_for(consortium, tmp_path / "pool", targets="lyon", images=12), tmp_path / "out", quiet)


def test_a_domain_spelt_otherwise_is_still_left_out(consortium: Path, tmp_path: Path) -> None:
    write_pool(tmp_path / "pool", domains={"lyon": "Lyon", "brest": "BREST"})
    run_bench(plan_for(consortium, tmp_path / "pool"), tmp_path / "out", quiet)
    for folder in (tmp_path / "out" / "runs").iterdir():
        arguments = ms.Run.load(folder).arguments
        assert arguments["data"]["domain"] not in arguments["pool"]["experts"]
        assert len(arguments["pool"]["experts"]) == 2


@pytest.mark.parametrize("place", ["base", "candidate"])
def test_a_base_or_a_candidate_that_saw_the_target_is_leakage(consortium: Path, tmp_path: Path, place: str) -> None:
    seen = ms.load_dataset("table", root=consortium / "data", size=16, interpolation="bicubic")["lyon"].fingerprint()
    write_pool(tmp_path / "pool")
    if place == "candidate":
        write_pool(tmp_path / "pool.candidates", recipes={"brest": {"data": seen}})
    else:
        card = tmp_path / "pool" / "base" / "expert.json"
        card.write_text(json.dumps({**json.loads(card.read_text()), "recipe": {"data": seen}}))
    plan = plan_for(consortium, tmp_path / "pool", targets="lyon")
    with pytest.raises(ms.MergestreamError, match=f"Leakage: the {place}"):
        run_bench(plan, tmp_path / "out", quiet)


def test_what_is_asked_for_twice_runs_and_counts_once(consortium: Path, tmp_path: Path) -> None:
    twice = plan_for(
        consortium, consortium / "pool", methods="mean, entropy_adaptive, entropy_adaptive(momentum=0)",
        streams="note,note:0.1,note:0.10", targets="lyon+brest,brest+lyon,turin",
    )  # fmt: skip
    findings = run_bench(twice, tmp_path / "out", quiet)
    assert {row.label: row.runs for row in findings.rows if "expert" not in row.label} == {
        "mean": 2, "entropy_adaptive": 2
    }  # fmt: skip
    shutil.copytree(consortium / "pool", tmp_path / "copy")
    pools = [str(consortium / "pool"), str(tmp_path / "copy")]
    with pytest.raises(ms.MergestreamError, match="hold the same experts"):
        run_bench(plan_for(consortium, Path("unused"), pools=pools), tmp_path / "out", quiet)


def test_another_partition_of_the_images_is_another_run(consortium: Path, tmp_path: Path) -> None:
    shutil.copytree(consortium, tmp_path / "c")
    plan = plan_for(tmp_path / "c", tmp_path / "c" / "pool")
    assert {row.value for row in run_bench(plan, tmp_path / "out", quiet).subgroups} == {"A", "B"}
    table = tmp_path / "c" / "data" / "samples.csv"
    table.write_text(table.read_text().replace(",B\n", ",NEW\n"))
    assert {row.value for row in run_bench(plan, tmp_path / "out", quiet).subgroups} == {"A", "NEW"}


def test_out_inside_the_data_is_refused(consortium: Path) -> None:
    with pytest.raises(ms.MergestreamError, match="lies inside the data's root"):
        run_bench(plan_for(consortium, consortium / "pool"), consortium / "data" / "runs", quiet)


def test_a_named_expert_runs_where_it_is_not_left_out(consortium: Path, tmp_path: Path) -> None:
    plan = replace(plan_for(consortium, consortium / "pool", methods="single_expert(expert=lyon)"), every_expert=False)
    run_bench(plan, tmp_path / "out", quiet)
    targets = {ms.Run.load(f).arguments["data"]["domain"] for f in (tmp_path / "out" / "runs").iterdir()}
    assert targets == {"brest", "turin"}


def test_domains_with_a_plus_or_a_bar_in_their_names(tmp_path: Path) -> None:
    for site, odd in zip(SITES, ("lyon+ain", "a|b", "é_%"), strict=True):
        DATASETS["folder"].write_standin(tmp_path / "s")
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "s" / site).rename(tmp_path / "data" / odd)
        shutil.rmtree(tmp_path / "s")
    write_pool(tmp_path / "pool", ("x", "y"))
    plan = plan_from(
        data=DataRequest.parse("folder", tmp_path / "data"), pools=[str(tmp_path / "pool")], methods="mean"
    )
    run_bench(replace(plan, targets=("lyon+ain", "a|b", "é_%")), tmp_path / "out", quiet)
    lines = [line for line in (tmp_path / "out" / "results.md").read_text().splitlines() if line.startswith("|")]
    header = next(line for line in lines if "lyon+ain" in line)
    assert "a\\|b" in header
    assert "lyon+ain" in (tmp_path / "out" / "results.tex").read_text()


def test_a_trap_sets_name_is_not_a_number(tmp_path: Path) -> None:
    plan = plan_from(data=DataRequest.parse("isic", tmp_path, ["bias=0.5_3", "errata=false"]), pools=["p"])
    assert dict(plan.data.options) == {"bias": "0.5_3", "errata": False}
    with pytest.raises(ms.MergestreamError, match="'bias' is given twice"):
        DataRequest.parse("isic", tmp_path, ["bias=0_1", "bias=0_2"])


def test_other_classes_are_refused_before_an_image_is_read(consortium: Path, tmp_path: Path) -> None:
    write_pool(tmp_path / "pool", classes=("normal", "malignant", "benign"))
    with pytest.raises(
        ms.MergestreamError, match=r"are not those of .*--data-option 'classes=\(normal, malignant, benign\)'"
    ):
        run_bench(plan_for(consortium, tmp_path / "pool"), tmp_path / "out", quiet)
    assert not (tmp_path / "out" / "cache").exists()
    run_bench(
        plan_for(consortium, tmp_path / "pool", options=("classes=(normal, malignant, benign)",)),
        tmp_path / "out",
        quiet,
    )
    for methods, sentence in (("entropy_adaptive(head=shard)", "'shard'"), ("mean(coefficients=3)", "coefficients")):
        with pytest.raises(ms.MergestreamError, match=sentence):
            run_bench(plan_for(consortium, consortium / "pool", methods=methods), tmp_path / "again", quiet)
        assert not (tmp_path / "again" / "cache").exists()


def test_replaced_tables_give_a_warning(consortium: Path, tmp_path: Path) -> None:
    plan = plan_for(consortium, consortium / "pool")
    run_bench(plan, tmp_path, quiet, command="the first")
    assert not any("replaced" in warning for warning in run_bench(plan, tmp_path, quiet).warnings)
    run_bench(plan, tmp_path, quiet, command="the first")
    other = run_bench(plan_for(consortium, consortium / "pool", streams="sorted"), tmp_path, quiet)
    assert any("were replaced (its runs are kept): the first" in warning for warning in other.warnings)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["interrupt", "kill the parent"])
def test_workers_end_with_their_parent(consortium: Path, tmp_path: Path, how: str) -> None:
    """Ctrl-C stops at once and says what becomes of the work; a killed parent leaves no process behind."""
    line = bench_arguments(consortium, tmp_path / "out", "--jobs", "2", "--seeds", ",".join(map(str, range(40))))
    process = subprocess.Popen(
        [sys.executable, "-m", "mergestream", *line], env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True, stderr=subprocess.PIPE, text=True, stdout=subprocess.DEVNULL,
        # A suite that a shell put into the background ignores Ctrl-C, and so would all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    runs, deadline = tmp_path / "out" / "runs", time.monotonic() + 120
    while len(list(runs.glob("[!.]*")) if runs.exists() else []) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    if how == "interrupt":
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 130
        assert "interrupted. Finished work is kept" in errors
    else:
        process.kill()
        process.wait()
    deadline = time.monotonic() + 20
    while group_lives(process.pid):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def group_lives(group: int) -> bool:
    """Whether a process of the group is left that is not a zombie."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            return True
    return False


@pytest.mark.slow
def test_a_killed_worker_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ms.MergestreamError, match=r"A worker process was killed.*fewer --jobs"):
        run_jobs(os._exit, [(1,), (1,)], workers=2, on_done=lambda: None)


def test_a_pool_of_strangers_gives_a_warning(consortium: Path, tmp_path: Path) -> None:
    write_pool(tmp_path / "pool", ("a", "b"))
    plan = plan_from(data=table_data(consortium / "data"), pools=[str(tmp_path / "pool")], methods="mean")
    findings = run_bench(plan, tmp_path / "out", quiet)
    assert any("The domain of a, b in" in warning and "never left out" in warning for warning in findings.warnings)


def test_unreadable_images_stop_unless_allowed(consortium: Path, tmp_path: Path) -> None:
    shutil.copytree(consortium, tmp_path / "copy")
    for name in ("lyon_benign_0.png", "turin_normal_3.png"):
        (tmp_path / "copy" / "data" / "images" / name).write_bytes(b"\x89PNG broken")
    message = refusal(tmp_path / "copy", tmp_path / "out")
    assert "lyon_benign_0.png" in message
    assert "--skip-bad" in message
    done = command(*bench_arguments(tmp_path / "copy", tmp_path / "out", "--methods", "mean"), "--skip-bad", "2")
    assert done.returncode == 0, done.stderr
    sizes = {
        run.arguments["data"]["domain"]: len(run.labels)
        for run in map(ms.Run.load, (tmp_path / "out" / "runs").iterdir())
    }
    assert sizes == {"brest": 18, "lyon": 17, "turin": 17}


def test_a_fixed_choice_of_images(consortium: Path, tmp_path: Path) -> None:
    done = command(*bench_arguments(consortium, tmp_path / "out", "--methods", "mean,ensemble"), "--images", "10")
    assert done.returncode == 0, done.stderr
    runs = [ms.Run.load(folder) for folder in (tmp_path / "out" / "runs").iterdir()]
    assert {len(run.labels) for run in runs} == {10}
    more = run_bench(
        plan_for(consortium, consortium / "pool", images=1000), tmp_path / "more", quiet
    )  # at most so many
    assert {line["images"] for line in more.runs} == {18}
    assert len({run.arguments["data"]["fingerprint"] for run in runs}) == len(SITES)


CARD_FIELDS: dict[str, dict] = {
    "temperature": {"temperature": 2.0},
    "class_counts": {"class_counts": {"benign": 40, "malignant": 2, "normal": 5}},
    "mean_probability": {
        "metrics": {"validation": {"mean_probability": {"benign": 0.1, "malignant": 0.2, "normal": 0.7}}}
    },
    "accuracy": {"metrics": {"validation": {"accuracy": 1.0}}},
}


@pytest.mark.parametrize("field", CARD_FIELDS)
def test_an_edited_card_gives_no_old_runs(consortium: Path, tmp_path: Path, field: str) -> None:
    """The method reads these fields of a card: after an edit, --out must not return the runs of before."""
    method = "merge_and_fit(temperature=card)"

    def edit_card(fields: dict) -> None:
        path = tmp_path / "pool" / "brest" / "expert.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    def bench(out: str) -> dict[str, bytes]:
        """The probabilities of every run that the tables are made of."""
        words = ("--methods", method, "--streams", "iid", "--seeds", "0", "--targets", "lyon")
        done = command(*bench_arguments(tmp_path, tmp_path / out, *words))
        assert done.returncode == 0, done.stderr
        with (tmp_path / out / "results.csv").open() as file:
            names = [line["run"] for line in csv.DictReader(file) if line["method"] == method]
        return {name: contents(tmp_path / out)[name][2]["probabilities"] for name in names}

    for part in ("data", "pool"):
        shutil.copytree(consortium / part, tmp_path / part)
    edit_card({"class_counts": {"benign": 6, "malignant": 30, "normal": 9}, "temperature": 0.5})
    before = bench("out")
    edit_card(CARD_FIELDS[field])
    after, fresh = bench("out"), bench("fresh")
    assert set(after.values()).isdisjoint(before.values()), "the card changes the answers"
    assert after == fresh
    assert not set(after) & set(before), "so the runs have other names"
