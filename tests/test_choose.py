"""The choice of a method for a pool: its rule, its evidence, its files, and `auto`, which uses it."""

import json
import logging
import math
import shutil
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import pytest
import torch

import mergestream as ms
from benching import command, write_pool
from conftest import make_images, make_pool
from engines import Service, batch
from mergestream.bench.choice import candidates, choice_run, pseudo_targets
from mergestream.bench.choice.choice_run import join, recommend, recommend_once
from mergestream.bench.choice.pseudo_targets import ChoiceRequest, measure, validation_images, with_rare_class
from mergestream.bench.engine.pool_at_target import method_of
from mergestream.data.datasets import DataRequest, Dataset, DomainData, phantom
from mergestream.methods import auto
from mergestream.methods.recommendation import DEFAULT, ChoiceEvidence, SitePart, choose, hashes_of, site_of
from mergestream.methods.spelling import Variant
from mergestream.pool.exchange.pool_inspection import verify_pool
from mergestream.runtime.messages import log_once
from mergestream.serving.audit.replay import compare
from mergestream.serving.engine.recomputation import recompute_step
from mergestream.training import split_of

SITES, FOUR = ("brest", "lyon", "turin"), ("brest", "graz", "lyon", "turin")
RECIPE = {"seed": 3, "split_seed": None, "validation_share": 0.5}
FEW = (DEFAULT, "ensemble(views=hflip)", "mean")
PHANTOM = ("--dataset", "phantom", "--data-option", "images=32")


@pytest.fixture(autouse=True)
def few_candidates(request: pytest.FixtureRequest) -> Iterator[None]:
    with mock.patch.object(pseudo_targets, "CANDIDATES", FEW):
        yield


WRITTEN = TemporaryDirectory()


@cache
def written(sites: tuple[str, ...], seed: int) -> Path:
    folder = Path(WRITTEN.name) / f"{'-'.join(sites)}-{seed}"
    write_pool(folder, sites, recipes=dict.fromkeys(sites, RECIPE), seed=seed, classes=phantom.CLASSES)
    return folder


def pool_folder(folder: Path, sites: tuple[str, ...] = SITES, seed: int = 0) -> Path:
    return Path(shutil.copytree(written(sites, seed), folder))


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A pool of three sites with its recommendation, and what the command printed."""
    with mock.patch.object(pseudo_targets, "CANDIDATES", FEW):
        folder = pool_folder(tmp_path_factory.mktemp("choose") / "pool")
        done = command("choose", str(folder), *PHANTOM)
        assert done.returncode == 0, done.stderr
        return folder, done.stdout


def recommendation(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "pool.json").read_text())["recommendation"]


def copy_of(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "pool"))


# --- the rule -----------------------------------------------------------------------------------------------


def evidence_of(scores: dict[str, list[float]], reference: str) -> ChoiceEvidence:
    """Sites with these scores, by candidate: accuracy a little above balanced accuracy, on two streams."""
    parts = []
    for site in range(len(next(iter(scores.values())))):
        runs = {
            name: {
                "iid, own": {"accuracy": values[site] + 0.01, "balanced_accuracy": values[site] - 0.01, "nll": 1.0},
                "iid, rare": {"accuracy": values[site] + 0.03, "balanced_accuracy": values[site] - 0.03, "nll": 2.0},
            }
            for name, values in scores.items()
        }
        parts.append(SitePart(f"site {site}", {"other": "0" * 64}, {"own": 10}, runs))
    return ChoiceEvidence("made", 1, dict.fromkeys(scores, 1), reference, tuple(parts))


def by_hand(scores: dict[str, list[float]], reference: str) -> str:
    """The rule of docs/choose.md in plain loops."""
    safe = []
    for name, values in scores.items():
        if all(own >= other - 0.02 - 1e-9 for own, other in zip(values, scores[reference], strict=True)):
            safe.append(name)
    best = max(safe, key=lambda name: statistics.mean(scores[name]))
    for name in safe:
        gaps = [a - b for a, b in zip(scores[best], scores[name], strict=True)]
        if statistics.mean(gaps) <= statistics.stdev(gaps) / math.sqrt(len(gaps)) + 1e-9:
            return name
    raise AssertionError


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ({"a": [0.70, 0.50, 0.90], "b": [0.70, 0.50, 0.90], "c": [0.70, 0.50, 0.90]}, "a"),
        ({"a": [0.70, 0.50, 0.90], "b": [0.71, 0.51, 0.905], "c": [0.70, 0.50, 0.90]}, "b"),  # hard sites cancel out
        ({"a": [0.70, 0.50, 0.90], "b": [0.74, 0.49, 0.90], "c": [0.70, 0.50, 0.90]}, "a"),  # one lucky site
        ({"a": [0.675, 0.60, 0.95], "b": [0.70, 0.50, 0.91], "c": [0.70, 0.50, 0.90]}, "b"),  # unsafe at one site
        ({"a": [0.68, 0.60, 0.95], "b": [0.70, 0.50, 0.91], "c": [0.70, 0.50, 0.90]}, "a"),  # just safe
    ],
)
def test_the_rule_takes_the_first_of_those_that_are_safe_and_near_the_best(
    scores: dict[str, list[float]], expected: str
) -> None:
    evidence = evidence_of(scores, "c")
    choice = choose(evidence, evidence.parts)
    assert choice.method == expected == by_hand(scores, "c")
    assert choice.numbers["score"] == pytest.approx(statistics.mean(scores[expected]))
    assert choice.numbers["nll"] == pytest.approx(1.5)
    assert choice.excluded == [name for name, values in scores.items() if values[0] < 0.68]
    assert choice.runner_up != expected
    assert choice.better_by == pytest.approx(choice.numbers["score"] - choice.runner_up_numbers["score"])
    assert not choice.weak


@pytest.mark.parametrize("seed", range(20))
def test_the_rule_is_that_of_the_documents(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = 0.7 + 0.02 * torch.randn(4, 5, generator=generator, dtype=torch.float64)
    scores = dict(zip("abcd", values.tolist(), strict=True))
    evidence = evidence_of(scores, "d")
    assert choose(evidence, evidence.parts).method == by_hand(scores, "d")


def test_two_pseudo_targets_are_too_few_for_another_choice_than_the_first() -> None:
    evidence = evidence_of({"a": [0.5, 0.5], "b": [0.9, 0.9]}, "b")
    choice = choose(evidence, evidence.parts)
    assert choice.method == "a"
    assert choice.weak


def test_the_candidates_are_the_default_first_and_each_is_read_back_from_its_label() -> None:
    pool = make_pool("vit")
    assert candidates.CANDIDATES[0] == DEFAULT
    assert candidates.REFERENCE in candidates.CANDIDATES
    for text in candidates.CANDIDATES:
        method = ms.create_method("auto", pool, choice=text)._base
        again = ms.create_method("auto", pool, choice=method.label())._base
        assert again.provenance == method.provenance


# --- the images ---------------------------------------------------------------------------------------------


def test_a_pseudo_target_has_the_validation_images_of_its_site_with_and_without_its_rarest_class() -> None:
    data = phantom.load(images=40)["lyon"]
    card = replace(make_pool("vit").cards[0], recipe=RECIPE)
    held_out = split_of(data, RECIPE)[1]
    images = validation_images(data, card)
    assert torch.equal(images.images, data.images[held_out.sort().values])
    assert len(validation_images(data, replace(card, recipe={}))) == 40
    labels = torch.tensor([0] * 30 + [1] * 8 + [2] * 12)
    indices = with_rare_class(labels)
    assert torch.bincount(labels[indices]).tolist() == [30, 2, 12]
    assert with_rare_class(torch.tensor([0, 0, 1])).tolist() == [0, 1, 2]


# --- the command --------------------------------------------------------------------------------------------


def test_the_command_records_the_choice_with_its_numbers(chosen: tuple[Path, str]) -> None:
    folder, text = chosen
    value = recommendation(folder)
    assert value["method"] in value["candidates"]
    assert value["method"] in text
    assert "(chosen)" in text
    assert value["pseudo_targets"] == 3
    assert [part["site"] for part in value["parts"]] == list(SITES)
    for part in value["parts"]:
        assert set(part["experts"]) == set(SITES) - {part["site"]}
        assert part["images"]["own"] == 16
        assert part["images"]["rare"] <= 16
        assert all(len(runs) == 4 for runs in part["runs"].values())
        static = part["runs"]["mean"]
        assert static["iid, own"] == static["dirichlet:0.05, own"]
        assert (static["iid, own"] != static["iid, rare"]) == (part["images"]["rare"] < 16)
    assert any(part["images"]["rare"] < 16 for part in value["parts"])
    assert verify_pool(folder).sound
    pool = ms.ExpertPool.load(folder)
    method = ms.create_method("auto", pool)
    assert method.options()["choice"] == value["method"] == by_rule(value)
    assert method.label() == "auto"


def by_rule(value: dict[str, Any]) -> str:
    """The rule on the numbers as a reader of pool.json finds them."""
    scores: dict[str, list[float]] = {name: [] for name in value["candidates"]}
    for part in value["parts"]:
        for name, runs in part["runs"].items():
            scores[name].append(
                statistics.mean((run["accuracy"] + run["balanced_accuracy"]) / 2 for run in runs.values())
            )
    return by_hand(scores, value["reference"])


def test_numbers_are_those_of_the_method_on_the_other_experts(chosen: tuple[Path, str]) -> None:
    pool = ms.ExpertPool.load(chosen[0]).without("lyon")
    whole = phantom.load(images=32)["lyon"]
    data = whole.subset(split_of(whole, RECIPE)[1].sort().values)
    stream = ms.streams.dirichlet(data.labels, alpha=0.05, batch_size=32, seed=0)
    run = ms.evaluate(ms.create_method(DEFAULT, pool), data, stream)
    (part,) = [part for part in recommendation(chosen[0])["parts"] if part["site"] == "lyon"]
    stored = part["runs"][DEFAULT]["dirichlet:0.05, own"]
    assert stored["accuracy"] == run.metrics["accuracy"]
    assert stored["nll"] == pytest.approx(run.metrics["nll"], rel=1e-5)


def test_parts_of_the_sites_join_to_the_same_record(chosen: tuple[Path, str], tmp_path: Path) -> None:
    pool = copy_of(chosen[0], tmp_path)
    (pool / "pool.json").unlink()
    files = []
    for site in reversed(SITES):
        files.append(str(tmp_path / f"{site}.json"))
        done = command("choose", str(pool), *PHANTOM, "--site", site, "--out", files[-1])
        assert done.returncode == 0, done.stderr
        assert not (pool / "pool.json").exists()
        stored = json.loads(Path(files[-1]).read_text())
        assert [part["site"] for part in stored["parts"]] == [site]
        assert set(stored) == {"schema_version", "dataset", "revision", "candidates", "reference", "parts"}
        assert set(stored["parts"][0]) == {"site", "experts", "images", "runs"}
    missing = command("choose", str(pool), "--join", *files[1:])
    assert missing.returncode == 1
    assert "The part of 'turin' is missing" in missing.stderr
    twice = command("choose", str(pool), "--join", files[0], *files)
    assert "The part of 'turin' is given twice" in twice.stderr
    done = command("choose", str(pool), "--join", *files, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["method"] == recommendation(chosen[0])["method"]
    assert (pool / "pool.json").read_bytes() == (chosen[0] / "pool.json").read_bytes()


def test_parts_of_other_experts_or_candidates_are_refused(chosen: tuple[Path, str], tmp_path: Path) -> None:
    value = recommendation(chosen[0])
    evidence = ChoiceEvidence.from_json(value)
    other = pool_folder(tmp_path / "other", seed=1)
    with pytest.raises(ms.MergestreamError, match=r"the expert 'lyon' of hash .* which is .* measure it again"):
        recommend(other, evidence)
    with pytest.raises(ms.MergestreamError, match=r"'turin' of hash .* is not in this pool"):
        recommend(pool_folder(tmp_path / "two", ("brest", "lyon")), evidence)
    with pytest.raises(ms.MergestreamError, match="site 'mars', of which this pool has no expert"):
        recommend(chosen[0], replace(evidence, parts=(replace(evidence.parts[0], site="mars"),)))
    renamed = replace(evidence, candidates=dict(reversed(evidence.candidates.items())))
    with pytest.raises(ms.MergestreamError, match="differ in candidates"):
        join([evidence, renamed])
    assert recommendation(chosen[0]) == value


@pytest.mark.parametrize("value", [None, "high", math.nan, 1.5, [0.5]], ids=str)
def test_a_part_with_other_things_than_numbers_is_refused(chosen: tuple[Path, str], tmp_path: Path, value: Any) -> None:
    stored = {"schema_version": 1, **ChoiceEvidence.from_json(recommendation(chosen[0])).to_json()}
    stored["parts"][0]["runs"]["mean"]["iid, own"]["accuracy"] = value
    (tmp_path / "part.json").write_text(json.dumps(stored))
    done = command("choose", str(chosen[0]), "--join", str(tmp_path / "part.json"))
    assert done.returncode == 1
    assert "not a choice record" in done.stderr


def test_wrong_usage_is_refused_with_a_sentence(chosen: tuple[Path, str], tmp_path: Path) -> None:
    pool = str(chosen[0])
    cases = {
        (pool,): "Give --dataset",
        (pool, "--join"): "--join and the files",
        (pool, "part.json"): "--join and the files",
        (pool, *PHANTOM, "--site", "lyon"): "add --out FILE.json",
        (pool, *PHANTOM, "--site", "lion", "--out", str(tmp_path / "x.json")): "Did you mean 'lyon'",
        (pool, "--join", str(tmp_path / "none.json")): "is missing",
    }
    for arguments, message in cases.items():
        done = command("choose", *arguments)
        assert done.returncode in (1, 2)
        assert message in " ".join(done.stderr.replace("│", " ").split()), (arguments, done.stderr)


def test_one_expert_is_refused_and_two_get_the_default(tmp_path: Path) -> None:
    one = command("choose", str(pool_folder(tmp_path / "one", ("lyon",))), *PHANTOM)
    assert one.returncode == 1
    assert "one site only" in one.stderr
    two = pool_folder(tmp_path / "two", ("brest", "lyon"))
    done = command("choose", str(two), *PHANTOM)
    assert done.returncode == 0, done.stderr
    assert "The choice is weak" in done.stdout
    assert recommendation(two)["weak"] is True
    assert recommendation(two)["method"] == DEFAULT


def test_a_site_that_the_data_lack_is_refused_before_any_work(tmp_path: Path) -> None:
    done = command("choose", str(pool_folder(tmp_path / "pool", ("brest", "lyon", "oslo"))), *PHANTOM)
    assert done.returncode == 2
    assert "has no domain 'oslo'" in done.stderr


# --- auto ---------------------------------------------------------------------------------------------------


def test_a_recommendation_changed_by_hand_is_refused_with_a_sentence(chosen: tuple[Path, str], tmp_path: Path) -> None:
    folder = copy_of(chosen[0], tmp_path)
    value = json.loads((folder / "pool.json").read_text())
    wrong = {"no_such(x=1)": "no method called 'no_such'", "auto": "own base", "mean(": "not a method"}
    for method, message in wrong.items():
        value["recommendation"]["method"] = method
        (folder / "pool.json").write_text(json.dumps(value))
        with pytest.raises(ms.MergestreamError, match=f"recommendation in pool.json cannot be used.*{message}"):
            ms.create_method("auto", ms.ExpertPool.load(folder))
    value["recommendation"]["method"] = 7
    (folder / "pool.json").write_text(json.dumps(value))
    with pytest.raises(ms.MergestreamError, match="recommendation must be what 'mergestream choose' wrote"):
        ms.ExpertPool.load(folder)


def test_without_a_recommendation_or_with_one_of_other_experts_auto_is_the_default(
    chosen: tuple[Path, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log_once.cache_clear()
    assert ms.create_method("auto", make_pool("vit")).options()["choice"] == DEFAULT
    folder = copy_of(chosen[0], tmp_path)
    newer = pool_folder(tmp_path / "newer", seed=1)
    assert command("pool", "replace", str(folder), str(newer / "lyon"), "--allow-other-base").returncode == 0
    pool = ms.ExpertPool.load(folder)
    assert pool.recommendation is not None
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert ms.create_method("auto", pool).options()["choice"] == DEFAULT
    assert len([each for each in caplog.records if "no recommendation for exactly" in each.message]) == 1


def test_auto_answers_as_the_method_it_chose_and_its_provenance_names_it(chosen: tuple[Path, str]) -> None:
    pool = ms.ExpertPool.load(chosen[0])._with(recommendation=None)
    for text in FEW:
        value = {**recommendation(chosen[0]), "method": text}
        method = ms.create_method("auto", pool._with(recommendation=value))
        alone = ms.create_method("auto", pool, choice=text)._base
        for seed in range(3):
            images = make_images(5, seed=seed)
            assert torch.equal(method.step(images).logits, alone.step(images).logits)
        assert method.static == alone.static
        assert method.provenance["options"]["choice"] == alone.label()
        assert method.provenance["wrapped"]["options"] == alone.options()


def test_the_default_rule_has_the_views_of_the_data() -> None:
    pool, data = make_pool("vit"), four_sites()
    assert method_of(Variant("auto"), pool, data)._base.label() == DEFAULT
    upright = replace(data, views=("vflip",))
    assert method_of(Variant("auto"), pool, upright)._base.asked_views() == ("vflip",)
    assert [str(each) for each in candidates.variants_for(upright, FEW)][1] == "ensemble(views=(vflip))"


def four_sites(labels: dict[str, torch.Tensor] | None = None) -> Dataset:
    """Four sites of noise, some with other labels."""
    domains = {}
    for number, site in enumerate(FOUR):
        generator = torch.Generator().manual_seed(number)
        own = torch.randint(0, 4, (24,), generator=generator)
        domains[site] = DomainData(
            "made", site, phantom.CLASSES, make_images(24, seed=number), (labels or {}).get(site, own)
        )
    return Dataset("made", phantom.CLASSES, FOUR, ("hflip",), True, domains.__getitem__)


def measured(folder: Path, dataset: Dataset, *, nested: bool) -> ChoiceEvidence:
    pool = ms.ExpertPool.load(folder)
    return join([measure(pool, folder, dataset, site, nested=nested) for site in FOUR])


def test_no_image_or_label_of_a_target_enters_the_choice_for_it(tmp_path: Path) -> None:
    """The labels at one site are poisoned: the evidence for a pool without its expert does not change by a bit."""
    folder = pool_folder(tmp_path / "pool", FOUR)
    poison = four_sites({"graz": torch.zeros(24, dtype=torch.long)})
    with mock.patch.object(pseudo_targets, "CANDIDATES", ("mean", "ensemble(views=hflip)")):
        clean, poisoned = (measured(folder, data, nested=True) for data in (four_sites(), poison))
    pool = ms.ExpertPool.load(folder)
    rest = pool.without("graz")
    assert clean.parts_for(pool.cards) != poisoned.parts_for(pool.cards)
    assert clean.parts_for(pool.without("lyon").cards) != poisoned.parts_for(pool.without("lyon").cards)
    parts = clean.parts_for(rest.cards)
    assert parts == poisoned.parts_for(rest.cards)
    assert [part.site for part in parts] == ["brest", "lyon", "turin"]
    assert all(set(part.experts) == {"brest", "lyon", "turin"} - {part.site} for part in parts)


def choices(folder: Path, evidence: ChoiceEvidence) -> tuple[str, str]:
    """What `auto` takes on the whole pool and on the pool without graz, with this evidence in pool.json."""
    recommend(folder, evidence)
    pool = ms.ExpertPool.load(folder)
    return tuple(ms.create_method("auto", each).options()["choice"] for each in (pool, pool.without("graz")))


def numbers_of(names: dict[str, float]) -> dict[str, dict[str, dict[str, float]]]:
    return {name: {"iid, own": {"accuracy": value, "balanced_accuracy": value}} for name, value in names.items()}


def test_a_left_out_site_cannot_change_the_choice_and_without_nested_parts_there_is_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At graz the mean fails: with it the ensemble is chosen, without it the mean."""
    log_once.cache_clear()
    folder = pool_folder(tmp_path / "pool", FOUR)
    cards = ms.ExpertPool.load(folder).cards
    parts = []
    for site in FOUR:
        for left_out in (site, *(other for other in FOUR if other != site)):
            answering = hashes_of([card for card in cards if site_of(card) not in (site, left_out)])
            runs = numbers_of({"mean": 0.2 if site == "graz" else 0.9, "ensemble": 0.7})
            # Evidence for pools without graz would be spoilt by its expert or its images only.
            if "graz" in answering:
                runs = numbers_of({"mean": 0.1, "ensemble": 0.7})
            parts.append(SitePart(site, answering, {"own": 4}, runs))
    evidence = ChoiceEvidence("made", 1, {"mean": 1, "ensemble": 1}, "ensemble", tuple(parts))
    assert choices(folder, evidence) == ("ensemble", "mean")
    plain = replace(evidence, parts=tuple(part for part in parts if len(part.experts) == 3))
    with caplog.at_level(logging.WARNING, logger=auto.__name__):
        assert choices(folder, plain) == ("ensemble", DEFAULT)
    assert "with --nested" in caplog.text


def test_nested_parts_are_measured_where_three_sites_remain(tmp_path: Path) -> None:
    folder = pool_folder(tmp_path / "pool", FOUR)
    with mock.patch.object(pseudo_targets, "CANDIDATES", ("ensemble(views=hflip)",)):
        assert len(measured(folder, four_sites(), nested=False).parts) == 4
        evidence = measured(folder, four_sites(), nested=True)
    assert len(evidence.parts) == 16
    pool = ms.ExpertPool.load(folder).without("graz", "lyon")
    (part,) = [p for p in evidence.parts if p.site == "graz" and set(p.experts) == {"brest", "turin"}]
    images = validation_images(four_sites()["graz"], ms.ExpertPool.load(folder).cards[1])
    run = ms.evaluate(ms.create_method("ensemble", pool, views=("hflip",)), images, [range(12)])
    assert next(iter(part.runs.values()))["iid, own"]["accuracy"] == run.metrics["accuracy"]


def test_a_study_chooses_once_for_a_pool_and_again_for_other_candidates(tmp_path: Path) -> None:
    folder = pool_folder(tmp_path / "pool")
    request = ChoiceRequest(str(folder), DataRequest("phantom", None, (("images", 16),)), tmp_path, device="cpu")
    with mock.patch.object(choice_run, "measure_site", wraps=pseudo_targets.measure_site) as measuring:
        for few in (FEW[1:], FEW[1:], FEW[1:2]):
            with mock.patch.object(pseudo_targets, "CANDIDATES", few):
                recommend_once(request)
        assert measuring.call_count == 6
    assert list(recommendation(folder)["candidates"]) == ["ensemble(views=(hflip))"]


def test_bench_runs_auto_as_a_row_of_its_own(chosen: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = command(
        "bench", *PHANTOM, "--pool", str(chosen[0]), "--out", str(out), "--methods", "auto, mean", "--targets", "lyon",
        "--jobs", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    headers = [json.loads(path.read_text())["arguments"] for path in out.glob("runs/*/run.json")]
    (run,) = [each for each in headers if each["method"] == "auto"]
    assert run["label"] == "auto"
    assert run["options"]["choice"] == DEFAULT  # two experts are left


def test_a_service_with_auto_logs_its_choice_and_its_steps_replay(chosen: tuple[Path, str], tmp_path: Path) -> None:
    value = {**recommendation(chosen[0]), "method": "entropy_adaptive(momentum=0.5)"}
    pool = ms.ExpertPool.load(chosen[0])._with(recommendation=value)
    with Service(tmp_path, pool, "auto") as service:
        service.engine.answer("ward", batch(0))
        service.engine.switch("lyon", on=False)
        service.engine.answer("ward", batch(1))
        assert service.engine.describe()["options"]["choice"] == value["method"]
        steps = service.steps()
    unchosen = pool._with(recommendation=None)  # the log names the choice, whatever pool.json says by then
    for number, step in enumerate(steps):
        assert step["options"]["choice"] == value["method"]
        assert not compare(step, json.loads(json.dumps(recompute_step(step, batch(number), unchosen))))
