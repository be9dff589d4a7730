"""The benchmark on real data, on stand-ins: resumable stages, cached logits, intervals, pairing, computed verdicts."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import torch

import mergestream as ms
from mergestream.bench.analysis.comparison import Estimate
from mergestream.data.datasets import file_source_of
from mergestream.data.streams import in_order
from mergestream.functional.metrics import summarise

FOLDER = Path(__file__).parents[1] / "benchmarks" / "real"
sys.path.insert(0, str(FOLDER))

import bars  # noqa: E402
import benches  # noqa: E402
import choose  # noqa: E402
import crew  # noqa: E402
import pairing  # noqa: E402
import rare  # noqa: E402
import recipes  # noqa: E402
import records  # noqa: E402
import report  # noqa: E402
import tails  # noqa: E402
from answering import KnownLogits, TargetData, answer  # noqa: E402
from limiting import limited  # noqa: E402
from pools import OpenPool, Place, open_pool, with_loud_head  # noqa: E402
from run import main as run_main  # noqa: E402
from run import method_spec  # noqa: E402
from scoring import resampled, scores  # noqa: E402
from stages import Runner, held_elsewhere  # noqa: E402
from units import Unit, chosen, stages_of  # noqa: E402

OURS = "entropy_adaptive(head=shared)"
STAGES = "train-pacs-shared,main-pacs-shared"
ASKED = records.Asked("micro", OURS, (), ())


def line(folder: Path, out: Path, *more: str) -> list[str]:
    data = ["--pacs", str(folder / "pacs.zip"), "--midog", str(folder / "midog.zip"), "--init", "random"]
    fixed = ["--profile", "micro", "--device", "cpu", "--ours", "entropy_adaptive:head=shared", "--out", str(out)]
    return [sys.executable, str(FOLDER / "run.py"), *data, *fixed, *more]


def run(folder: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    known = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(line(folder, out, *more), capture_output=True, text=True, check=False, env=known)


def contents(out: Path) -> dict[str, tuple[int, object]]:
    """Every unit's time of writing, and what is in it beside seconds."""
    found = {}
    for path in sorted((out / "units").rglob("[!.]*.json")):
        unit = json.loads(path.read_text())
        del unit["seconds"]
        for row in unit["rows"]:
            del row["seconds"]
        found[path.name] = path.stat().st_mtime_ns, unit
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Zips of both stand-ins."""
    root = tmp_path_factory.mktemp("real")
    for name in ("pacs", "midog"):
        (root / name).mkdir()
        file_source_of(name).write_standin(root / name)
        shutil.make_archive(str(root / name), "zip", root / name)
    return root


@pytest.fixture(scope="module")
def finished(folder: Path) -> Path:
    """The first stages, through the command."""
    said = run(folder, folder / "out", "--stages", STAGES)
    assert said.returncode == 0, said.stderr
    return folder / "out"


@pytest.fixture(scope="module")
def place(folder: Path, finished: Path) -> Place:
    roots = (("pacs", folder / "pacs.zip"), ("midog", folder / "midog.zip"))
    return Place(finished, roots, "random", "cpu", recipes.MICRO)


@pytest.fixture(scope="module")
def opened(place: Place) -> OpenPool:
    return open_pool(place, recipes.pools_of(recipes.MICRO, "pacs")[0])


def test_choosing_leaves_the_target_out(opened: OpenPool, place: Place) -> None:
    candidates = {"mean": "mean", "ours": "prior_adaptive"}
    rows = [row for shown in opened.dataset.domains for row in choose.compare(opened, shown, candidates, place)]
    assert len(rows) == 4 * 3 * 2 * 2
    for row in rows:
        assert len(row["experts"]) == 2
        assert not {row["target"], row["shown"]} & set(row["experts"])
        assert row["target"] != row["shown"]
    lines = choose.table(rows).splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["candidate", "mean", "ours"]
    iid = [row["accuracy"] for row in rows if row["candidate"] == "ours" and row["stream"] == "iid"]
    assert f"{np.mean(iid):.2f}" in lines[2]


@pytest.mark.parametrize("dataset", ["pacs", "midog"])
def test_settings_are_compared_where_classes_are_rare(
    dataset: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole script with a small network and two steps of training, then again from what it kept."""
    for name, value in {"NETWORK": "vit_tiny_patch16_224", "SIZE": 32, "STEPS": 2, "BATCH": 4}.items():
        monkeypatch.setattr(tails, name, value)
    few = {"ensemble": "ensemble", "refitted": "prior_adaptive(refit=True)"}
    monkeypatch.setattr(rare, "CANDIDATES", few)
    monkeypatch.setattr(rare, "HEAD_INITS", ("independent",))
    weights = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0).state_dict()
    safetensors.torch.save_file(weights, tmp_path / "vit.safetensors")
    command = f"rare.py --{dataset} {folder / f'{dataset}.zip'} --init {tmp_path / 'vit.safetensors'} --tasks rare2"
    monkeypatch.setattr("sys.argv", [*command.split(), "--out", str(tmp_path), "--json", str(tmp_path / "rare.json")])
    found = []
    for _ in range(2):
        rare.main()
        found.append(json.loads((tmp_path / "rare.json").read_text())["rows"])
    assert found[0] == found[1]
    assert capsys.readouterr().out.count("fitted\n") == len({row["shown"] for row in found[0]})
    for row in found[0]:
        assert row["shown"] not in row["experts"]
        assert len(row["experts"]) == (2 if dataset == "pacs" else len({r["shown"] for r in found[0]}) - 1)
    teams = len({(row["shown"], *row["experts"]) for row in found[0]})
    assert len(found[0]) == teams * len(few) * 2


# --- stages ---------------------------------------------------------------------------------------------------------


def test_a_second_call_does_nothing(folder: Path, finished: Path) -> None:
    before = contents(finished)
    assert len(before) == 4
    said = run(folder, finished, "--stages", STAGES)
    assert said.returncode == 0, said.stderr
    assert contents(finished) == before
    assert "[" not in said.stdout
    states = {row.split()[0]: row.split()[1:3] for row in said.stdout.splitlines() if row.endswith(" s")}
    assert states["train-pacs-shared"] == ["done", "1/1"]
    assert states["main-pacs-shared"] == ["done", "4/4"]
    assert states["hostile"] == ["not", "begun"]
    record = json.loads((finished / "record.json").read_text())
    assert record["is_try"]
    assert [group["stage"] for group in record["groups"]] == STAGES.split(",")
    group = record["groups"][1]
    ran = {row["method"].partition("(")[0] for row in group["rows"]}
    assert ran == set(ms.list_methods())
    assert group["left_out"] == {}
    assert {row["stream"] for row in group["rows"]} == {"iid", "dirichlet:0.05"}


def test_a_killed_stage_goes_on_from_its_last_unit(
    folder: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    for name in ("pools", "data"):
        shutil.copytree(finished / name, out / name, symlinks=True)
    process = subprocess.Popen(
        line(folder, out, "--stages", "main-pacs-shared"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not contents(out):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    cut = contents(out)
    assert 1 <= len(cut) < 4
    monkeypatch.setattr(sys, "argv", line(folder, out, "--stages", "main-pacs-shared")[1:])
    assert run_main() == 0
    whole = contents(out)
    assert {name: whole[name] for name in cut} == cut
    assert {name: unit for name, (_, unit) in whole.items()} == {n: u for n, (_, u) in contents(finished).items()}


@pytest.mark.slow
def test_processes_side_by_side_find_what_one_finds(folder: Path, finished: Path, tmp_path: Path) -> None:
    """Pools that are missing are trained by them, too, each by one."""
    out = tmp_path / "out"
    said = run(folder, out, "--stages", "main-pacs-shared,hostile,costs", "--jobs", "2")
    assert said.returncode == 0, said.stderr
    groups = json.loads((out / "record.json").read_text())["groups"]
    assert {"train-pacs-shared", "main-pacs-shared", "hostile", "costs"} <= {group["stage"] for group in groups}
    found = {name: unit for name, (_, unit) in contents(out).items()}
    assert {name: found[name] for name in contents(finished)} == {n: u for n, (_, u) in contents(finished).items()}
    assert "costs: done" in said.stdout
    assert "hostile: done" in said.stdout


def test_workers_get_what_they_have_open() -> None:
    tasks = [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0)]
    held = {0: "a", 1: "b"}
    assert crew._next_for(0, tasks, held, first) == 0
    assert crew._next_for(1, tasks, held, first) == 2
    assert crew._next_for(2, tasks, held, first) == 4  # nobody else's
    assert crew._next_for(2, tasks[:4], {0: "a"}, first) == 2
    assert crew._next_for(1, tasks[:2], held, first) == 0  # its own is done: it helps the other


@pytest.mark.slow
def test_an_error_in_a_process_is_told_and_ends_the_others() -> None:
    began = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        list(crew.side_by_side(divided, [1, 0, *[1] * 20], 2, 0.5, key=int))
    assert [found for _, found in crew.side_by_side(divided, [2, 2, 2], 2, 1.0, key=int)] == [0.5] * 3
    assert list(crew.side_by_side(divided, [1], 2, 1.0, key=int, may_start=lambda: False)) == []
    assert list(crew.side_by_side(divided, [], 2, 1.0, key=int)) == []
    assert time.monotonic() - began < 120


def first(task: tuple[str, int]) -> str:
    return task[0]


def divided(given: float, by: int) -> float:
    return given / by


def test_time_that_is_over_starts_nothing_and_what_others_hold_is_skipped(place: Place) -> None:
    (stage,) = chosen(stages_of(recipes.MICRO), "batches-midog")
    told: list[str] = []
    assert not Runner(place, ASKED, told.append, minutes=0).run([stage], 1)
    assert "14 units are left" in told[0]
    held = frozenset((unit.stage, unit.pool.name) for unit in stage.units)
    assert Runner(place, ASKED, told.append, minutes=0, elsewhere=held).run([stage], 1)


def test_units_of_another_pool_or_asking_are_not_done(place: Place, tmp_path: Path) -> None:
    unit = Unit("main-pacs-shared", "main", recipes.pools_of(recipes.MICRO, "pacs")[0], ("photo",))
    asked = records.Asked(**{**json.loads(json.dumps(record_of(place)["asked"])), "limit": None})
    same = replace(asked, ablation=tuple(map(tuple, asked.ablation)), revisions=tuple(map(tuple, asked.revisions)))
    assert Runner(place, same, print).is_done(unit)
    assert not Runner(place, replace(same, ours="mean"), print).is_done(unit)
    other = replace(place, out=tmp_path)
    shutil.copytree(place.out / "units", tmp_path / "units")
    shutil.copytree(place.out / "pools", tmp_path / "pools", symlinks=True)
    assert Runner(other, same, print).is_done(unit)
    note = json.loads(other.note(unit.pool).read_text())
    other.note(unit.pool).write_text(json.dumps({**note, "fingerprint": "another"}))
    assert not Runner(other, same, print).is_done(unit)


def record_of(place: Place) -> dict:
    return json.loads((place.out / "record.json").read_text())


def test_the_real_plan_is_that_of_the_issue() -> None:
    stages = stages_of(recipes.REAL)
    assert len({stage.name for stage in stages}) == len(stages)
    units = [unit for stage in stages for unit in stage.units]
    assert len(set(units)) == len(units)
    trained = {unit.pool for unit in units if unit.kind == "train"}
    assert len(trained) == 13
    assert {unit.pool for unit in units} == trained
    assert sum(unit.kind == "main" for unit in units) == 6 * 4 + 7 * 7
    mixed = {unit.targets for unit in units if unit.kind == "streams" and len(unit.targets) == 2}
    assert len(mixed) == 4 + 7
    with pytest.raises(ms.MergestreamError, match="main-pacs"):
        chosen(stages, "main-pcas")
    recipe = recipes.recipe_of(recipes.REAL, recipes.PoolSpec("midog", "shared", "weighted", 2), "cuda", None)
    assert (recipe.steps, recipe.learning_rate, recipe.loss, recipe.seed) == (300, 3e-5, "weighted", 2)
    assert method_spec("entropy_adaptive:head=shared") == method_spec("entropy_adaptive(head=shared)") == OURS


# --- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["entropy_adaptive", "mean", "ensemble", "select_expert", "adamerging"])
def test_cached_logits_give_what_plain_steps_give(opened: OpenPool, name: str) -> None:
    pool = opened.sources(("photo",))
    data = TargetData.of([opened.dataset["photo"]], "cpu")
    batches = in_order(len(data), 4)
    method = ms.create_method(name, pool)
    known = KnownLogits(pool, data.images, chunk=4).for_method(method)
    fast = answer(method, data.images, known, batches).logits
    plain = ms.create_method(name, pool)
    slow = torch.cat([plain.step(data.images[torch.from_numpy(batch)]).logits for batch in batches])
    assert torch.equal(fast, slow)
    stream = data.stream("dirichlet:0.05", batch_size=4, seed=1)
    fast = answer(method, data.images, KnownLogits(pool, data.images).for_method(method), stream).logits
    plain.reset()
    for batch in map(torch.from_numpy, stream):
        torch.testing.assert_close(fast[batch], plain.step(data.images[batch]).logits, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("graphs_here")
def test_replayed_steps_on_cached_logits_give_what_eager_ones_give(opened: OpenPool) -> None:
    """As on a GPU, where a 'graph' is here the recorded function, run again: all batch sizes with one method."""
    pool = opened.sources(("photo",))
    data = TargetData.of([opened.dataset["photo"]], "cpu")
    method = ms.create_method("entropy_adaptive", pool)
    eager = ms.create_method("entropy_adaptive", pool.to(execution=ms.Execution(capture=False)))
    for size in (1, 4, 8, 5):
        stream = data.stream("iid", batch_size=size, seed=0)
        found = [answer(m, data.images, KnownLogits(pool, data.images).for_method(m), stream) for m in (method, eager)]
        torch.testing.assert_close(found[0].logits, found[1].logits, atol=1e-4, rtol=1e-3)
    assert method.graphs is not None
    assert eager.graphs is None


def test_a_loud_head_changes_one_expert_alone_and_not_what_it_says(opened: OpenPool) -> None:
    pool = opened.sources(("photo",))
    loud, images = with_loud_head(pool, 1), opened.dataset["photo"].images
    plain, shouted = pool.logits(images), loud.logits(images)
    torch.testing.assert_close(shouted[1], 100 * plain[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(shouted[[0, 2]], plain[[0, 2]])


@pytest.mark.parametrize("kind", ["streams", "batches", "ablation", "costs", "hostile"])
def test_every_kind_of_unit_measures_what_it_promises(place: Place, kind: str) -> None:
    pool = recipes.pools_of(recipes.MICRO, "pacs")[0]
    targets = ("art_painting", "cartoon") if kind == "streams" else ("cartoon",)
    found = benches.BENCHES[kind](place, Unit(kind, kind, pool, targets), OURS)
    assert found["left_out"] == {}
    rows = {(row["method"], row["stream"], row["condition"]) for row in found["rows"]}
    compared = recipes.compared_methods(OURS)
    wanted = {
        "streams": {(m, s, "") for m in compared for s in recipes.MIXTURES},
        "batches": {(m, "iid", f"batch {size}") for m in compared for size in (1, 4)},
        "ablation": {(m, s, "") for m in {**recipes.ABLATION, **recipes.OURS_ABLATION} for s in recipes.MAIN_STREAMS},
        "costs": set(),
        "hostile": {(m, "iid", f"head x{by}") for m in compared for by in (1, 100)},
    }
    assert rows == wanted[kind]
    assert not recipes.ABLATION.keys() & recipes.OURS_ABLATION.keys()
    assert all(sum(row["said"]) == row["images"] for row in found["rows"])
    assert len(found["experts"]) == (2 if kind == "streams" else 3)
    if kind == "costs":
        forwards = {cost["method"]: cost["forwards"] for cost in found["costs"]}
        assert forwards["mean"] == 1
        assert forwards["ensemble"] == 3
        assert forwards["entropy_adaptive"] == 3 * 2 + 1


def test_slides_are_drawn_whole_and_a_mixture_keeps_them_apart(folder: Path) -> None:
    data = ms.load_dataset("midog", root=folder / "midog.zip", size=16)
    parts = [data[domain] for domain in data.domains[:2]]
    both = TargetData.of(parts, "cpu")
    assert len(np.unique(both.units)) == sum(len(set(part.groups)) for part in parts)
    draws = resampled(both.labels, both.units, 30, "midog/two")
    assert (draws[0] == 1).all()
    for unit in np.unique(both.units):
        assert (draws[:, both.units == unit].std(axis=1) == 0).all()
    assert (draws == resampled(both.labels, both.units, 30, "midog/two")).all()
    assert (draws != resampled(both.labels, both.units, 30, "midog/other")).any()
    some = both.some(5)
    assert len(some) == len(some.units) == len(some.images) == 5


# --- intervals and pairs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 5])
def test_scores_under_draws_are_those_of_repeated_images(classes: int) -> None:
    random = np.random.RandomState(classes)
    labels = random.randint(classes, size=60)
    units = random.randint(12, size=60)
    units = np.unique(units, return_inverse=True)[1]
    # Few distinct values, so that there are ties.
    logits = torch.from_numpy(random.randint(-2, 3, size=(60, classes)).astype(np.float32))
    draws = resampled(labels, units, 8, "any")
    found = scores(
        logits, torch.from_numpy(labels), torch.from_numpy(draws), ("accuracy", "balanced_accuracy", "auroc")
    )
    names = [str(c) for c in range(classes)]
    for number, counts in enumerate(draws.astype(int)):
        picked = np.repeat(np.arange(60), counts)
        told = summarise(torch.softmax(logits[picked], dim=-1), torch.from_numpy(labels[picked]), names)
        for metric, values in found.items():
            assert float(values[number]) == pytest.approx(told[metric], abs=1e-6), metric


def made_group(pool: str, answers: dict[str, dict[str, torch.Tensor]], labels: dict[str, np.ndarray], **more):
    """A group as the benchmark makes it, from answers by target and method."""
    stage = next(s for s in stages_of(recipes.MICRO) if s.name == "main-pacs-shared")
    spec = replace(stage.units[0].pool, seed=int(pool))
    units = []
    for target, truth in labels.items():
        draws = torch.from_numpy(resampled(truth, np.arange(len(truth)), 200, f"pacs/{target}"))
        rows, kept = [], {}
        for method, by_target in answers.items():
            found = scores(by_target[target], torch.from_numpy(truth), draws, ("accuracy",))
            said = by_target[target].argmax(dim=-1).bincount(minlength=3).tolist()
            row = {"method": method, "stream": "iid", "condition": "", "target": target, "images": len(truth)}
            rows.append({**row, "said": said, **{name: float(v[0]) for name, v in found.items()}})
            kept[f"{method}|iid|"] = {"accuracy": records.encoded(found["accuracy"][1:].numpy())}
        unit = {"fingerprint": f"of {pool}", "classes": ["a", "b", "c"], "rows": rows, "resamples": kept}
        unit |= {"left_out": {}, "experts": {"x": [len(truth), 0, 0]}, "seconds": 1.0}
        units.append((Unit(stage.name, "main", spec, (target,)), unit))
    return {**records.group_of(stage, units, ASKED), "later": False, "file": "a.json", **more}


def some_answers(labels: dict[str, np.ndarray], seed: int, right: float) -> dict[str, torch.Tensor]:
    random = np.random.RandomState(seed)
    found = {}
    for target, truth in labels.items():
        said = np.where(random.uniform(size=len(truth)) < right, truth, random.randint(3, size=len(truth)))
        found[target] = torch.nn.functional.one_hot(torch.from_numpy(said), 3).float()
    return found


@pytest.fixture(scope="module")
def made() -> tuple[list[dict], dict, dict]:
    """Two seeds' groups of two methods on two targets, the labels and the answers."""
    random = np.random.RandomState(0)
    labels = {"photo": random.randint(3, size=90), "sketch": random.randint(3, size=140)}
    answers = {
        seed: {"ours": some_answers(labels, seed, 0.8), "theirs": some_answers(labels, seed + 9, 0.6)}
        for seed in (0, 1)
    }
    return [made_group(str(seed), answers[seed], labels) for seed in answers], labels, answers


def test_paired_intervals_are_those_of_a_plain_bootstrap(made) -> None:
    groups, labels, answers = made
    gap = pairing.difference(groups, "ours", groups, "theirs", pairing.Where("iid"), "accuracy")
    replicates = np.zeros(200)
    expected = []
    for target, truth in labels.items():
        draws = resampled(truth, np.arange(len(truth)), 200, f"pacs/{target}").astype(int)
        for own in answers.values():
            right = [(own[m][target].argmax(dim=-1).numpy() == truth).astype(float) for m in ("ours", "theirs")]
            expected.append(right[0].mean() - right[1].mean())
            for r in range(200):
                picked = np.repeat(np.arange(len(truth)), draws[r + 1])
                replicates[r] += (right[0][picked].mean() - right[1][picked].mean()) / 4
    assert gap.mean == pytest.approx(np.mean(expected), abs=1e-9)
    assert (gap.low, gap.high) == pytest.approx(tuple(np.quantile(replicates, [0.025, 0.975])), abs=5e-5)
    one = pairing.estimate(groups, "ours", pairing.Where("iid"), "accuracy")
    assert one.low < one.mean < one.high
    swapped = pairing.difference(groups, "theirs", groups, "ours", pairing.Where("iid"), "accuracy")
    assert swapped.mean == pytest.approx(-gap.mean)
    assert pairing.difference(groups, "ours", groups, "nobody", pairing.Where("iid"), "accuracy") is None


def test_rows_of_different_pools_are_not_paired(made, tmp_path: Path) -> None:
    groups, _, _ = made
    other = [{**group, "fingerprint": "trained again", "file": "b.json"} for group in groups]
    with pytest.raises(ms.MergestreamError, match="two different pools"):
        pairing.difference(groups, "ours", other, "theirs", pairing.Where("iid"), "accuracy")
    names = []
    for name, own, later in (("a", groups, False), ("b", other, False), ("c", other, True), ("d", groups[:1], False)):
        names.append(tmp_path / f"{name}.json")
        records.write_record(names[-1], own, ASKED, {"about": {}}, later=later)
    with pytest.raises(ms.MergestreamError, match="two different pools"):
        records.read_records(names[:2], allow_tries=True)
    assert len(records.read_records([names[0], names[2], names[3]], allow_tries=True)) == 4
    with pytest.raises(ms.MergestreamError, match="a try"):
        records.read_records(names[:1])
    read = records.read_records([names[0]], allow_tries=True)
    assert held_elsewhere(read, ASKED, later=False) == {(g["stage"], g["pool"]) for g in groups}
    assert held_elsewhere(read, replace(ASKED, ours="mean"), later=False) == frozenset()
    assert held_elsewhere(read, ASKED, later=True) == frozenset()


def test_units_of_two_pools_are_no_group(made) -> None:
    stage = stages_of(recipes.MICRO)[4]
    units = [(unit, {"fingerprint": str(number)}) for number, unit in enumerate(stage.units[:2])]
    with pytest.raises(ms.MergestreamError, match="different pools"):
        records.group_of(stage, units, ASKED)


# --- the report -----------------------------------------------------------------------------------------------------


def test_verdicts_follow_from_the_numbers(made) -> None:
    _, labels, _ = made
    good, bad = some_answers(labels, 1, 0.9), some_answers(labels, 2, 0.5)
    answers = {"entropy_adaptive": good, "mean": bad, "ensemble": bad, OURS: good}
    found = {bar.sentence: bar.holds for bar in bars.all_bars([made_group("0", answers, labels)], OURS)}
    wins = next(s for s in found if "shared heads, iid, accuracy: entropy_adaptive - mean" in s)
    assert found[wins] is True
    assert wins.endswith("**holds**")
    loses = next(s for s in found if f"shared heads, iid, accuracy: {OURS} - entropy_adaptive" in s)
    assert found[loses] is False
    assert "= +0.0 [+0.0, +0.0] points" in loses
    assert loses.endswith("**does not hold**")
    assert next(h for s, h in found.items() if s.startswith("PACS, independent heads, iid")) is None
    worse = {**answers, OURS: bad}
    found = {bar.claim: bar for bar in bars.all_bars([made_group("0", worse, labels)], OURS)}
    everywhere = found[f"{OURS} nowhere worse than entropy_adaptive by more than 0.5"]
    assert everywhere.holds is False
    assert "(PACS, shared heads, iid, accuracy); it loses at " in everywhere.sentence


def test_a_class_that_is_given_up_is_a_collapse(made) -> None:
    groups, _, _ = made
    group = json.loads(json.dumps(groups[0]))
    for row in group["rows"]:
        row["images"], row["said"] = 100, [97, 3, 0]
    group["experts"] = {target: {"x": [80, 15, 5], "y": [75, 20, 5]} for target in ("photo", "sketch")}
    looked, found = bars.collapses([group], "ours")
    assert looked == 2
    assert [text.partition(":")[0].split("'")[1] for text in found] == ["b", "c", "b", "c"]
    for row in group["rows"]:
        row["said"] = [95, 4, 1]
    assert bars.collapses([group], "ours") == (2, [])  # 4 of 17.5 and 1 of 5: a fifth or more


def test_a_captured_rule_is_told(made) -> None:
    groups, _, _ = made

    def row(condition: str, agreed: float) -> dict:
        return {"method": OURS, "condition": condition, "accuracy": 0.5, "agrees_with_loud": agreed, "target": "photo"}

    for after, holds in ((0.69, True), (0.71, False)):
        group = {**groups[0], "kind": "hostile", "rows": [row("head x1", 0.4), row("head x100", after)]}
        found = [bar for bar in bars.all_bars([group], OURS) if f"capture {OURS}" in bar.claim]
        assert [bar.holds for bar in found] == [holds, None]


def test_points_print_losses_as_losses() -> None:
    assert bars.points(Estimate(-0.012, -0.02, -0.004)) == "-1.2 [-2.0, -0.4]"
    assert bars.points(Estimate(0.005, float("nan"), float("nan"))) == "+0.5"


def test_the_report_replaces_marked_blocks_and_refuses_tries(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Results\n<!-- real:begin pacs -->\nold\n<!-- real:end pacs -->\nkept\n")
    script = ["report.py", str(finished / "record.json"), "--into", str(page)]
    monkeypatch.setattr(sys, "argv", script)
    assert report.main() == 1
    assert "a try" in capsys.readouterr().err
    assert "old" in page.read_text()
    monkeypatch.setattr(sys, "argv", [*script, "--allow-tries", "--figures", str(tmp_path / "figures")])
    assert report.main() == 0
    text = page.read_text()
    assert "old" not in text
    assert text.endswith("<!-- real:end pacs -->\nkept\n")
    assert "| regmean_pp |" in text.replace("**", "")
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {
        "first-batch-sizes.png",
        "first-differences.png",
    }
    groups = records.read_records([finished / "record.json"], allow_tries=True)
    found = report.blocks(groups, OURS)
    assert report.with_blocks(text, found, page) == text
    assert "| entropy_adaptive | 0 of 8 |" in found["collapses"]
    for broken in ("<!-- real:begin pcas -->", "<!-- real:begin pacs -->"):
        with pytest.raises(ms.MergestreamError, match=r"pacs"):
            report.with_blocks(broken, found, page)


def test_later_runs_are_marked(made) -> None:
    groups, labels, answers = made
    first = made_group("0", {**answers[0], OURS: some_answers(labels, 5, 0.7)}, labels)
    later = {**made_group("0", {OURS: some_answers(labels, 6, 0.9)}, labels), "later": True, "fingerprint": "again"}
    text = report.blocks(report.reported([first, later]), OURS)["pacs"]
    assert f"| {OURS} (later run) |" in text
    assert "later run" not in report.blocks(report.reported([first]), OURS)["pacs"]
    assert "**later run**" in report.blocks(report.reported([later]), OURS)["bars"]
    every = report.all_blocks([first, later], OURS)
    assert every["bars"] == report.blocks([first], OURS)["bars"]
    assert every["later-bars"] == report.blocks(report.reported([later]), OURS)["bars"]
    assert not any(name.startswith("later-") for name in report.all_blocks([first], OURS))
    several = [{**group, "ours": name} for group, name in zip(groups, ("b", "c"), strict=True)]
    with pytest.raises(ms.MergestreamError, match="several rules"):
        report.the_rule(several, None)


def test_a_try_takes_few_images_of_every_class_and_many_slides(folder: Path, tmp_path: Path) -> None:
    for name, classes in (("pacs", 7), ("midog", 2)):
        small = ms.load_dataset(name, root=limited(name, folder / f"{name}.zip", 2 * classes, tmp_path), size=16)
        for domain in small:
            assert small[domain].labels.bincount(minlength=classes).tolist() == [2] * classes
    assert all(len(set(small[domain].groups)) > 1 for domain in small)


def test_asking_is_a_try_unless_it_is_the_real_one() -> None:
    real = records.Asked("real", OURS, (), ())
    assert not real.is_try
    assert replace(real, limit=5).is_try
    assert replace(real, steps=5).is_try
    assert len({real.hash, replace(real, revisions=(("mean", 2),)).hash, replace(real, ours="mean").hash}) == 3
    assert asdict(real)["ours"] == OURS


def test_resamples_survive_their_coding() -> None:
    values = np.random.RandomState(0).uniform(size=500)
    assert abs(records.decoded(records.encoded(values)) - values).max() < 1e-5
    assert len(records.encoded(values)) < 1400


@pytest.mark.slow
def test_all_stages_from_nothing_to_the_report(folder: Path, tmp_path: Path) -> None:
    said = run(folder, tmp_path, "--stages", ",".join(stage.name for stage in stages_of(recipes.MICRO)))
    assert said.returncode == 0, said.stderr
    assert "not begun" not in said.stdout
    groups = records.read_records([tmp_path / "record.json"], allow_tries=True)
    found = report.blocks(groups, OURS)
    assert "0 were not measured" in found["bars"]
    assert "Not run" not in found["pacs"] + found["midog"]
