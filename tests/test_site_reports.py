"""Cross-site evaluation without images: what a report holds, what can be computed from it, and the matrix of all."""

import itertools
import json
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from jsonschema import Draft202012Validator

import mergestream as ms
from benching import command, write_pool
from mergestream.bench.choice import pseudo_targets
from mergestream.bench.engine.pool_at_target import sources_for
from mergestream.bench.sites import site_measurement
from mergestream.bench.sites.site_report import SiteReport
from mergestream.data.datasets import phantom
from mergestream.functional import masked_counts
from mergestream.functional.masked_counts import bounds, estimated_scores, masked_rows, recall_bounds, total_bounds
from mergestream.methods.recommendation import DEFAULT
from mergestream.methods.site_evidence import site_evidence, variances_by_sites
from mergestream.runtime.errors import PoolError
from signing import make_key

SITES = ("brest", "lyon", "turin")
SCHEMA = json.loads((Path(__file__).parent.parent / "docs" / "schemas" / "site_report.schema.json").read_text())
PHANTOM = ("--dataset", "phantom", "--data-option", "images=48")


# --- masking --------------------------------------------------------------------------------------------------


def pairs_of_rows(size: int, total: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    rows = [row for row in itertools.product(range(total + 1), repeat=size) if sum(row) == total]
    return itertools.product(rows, repeat=2)


@pytest.mark.parametrize(("size", "largest"), [(2, 24), (3, 11)])
def test_no_count_below_five_can_be_recomputed_by_anyone_who_knows_the_rule(size: int, largest: int) -> None:
    """Brute force: of all pairs of rows with the same published form, a shown blank has three values or more."""
    possible = defaultdict[Any, set[tuple[tuple[int, ...], ...]]](set)
    for total in range(5, largest + 1):
        span = total_bounds(masked_counts.masked(total))
        for rows in pairs_of_rows(size, total):
            possible[span, tuple(masked_rows(rows, span))].add(rows)
    # At the upper edge some tables of a larger sum look the same, and are not in the list.
    whole = {key: tables for key, tables in possible.items() if key[0][1] <= largest}
    assert whole
    for (_, shown), tables in whole.items():
        for place, row in enumerate(shown):
            for cell, value in enumerate(row or ()):
                values = {table[place][cell] for table in tables}
                assert value is not None or len(values) >= 3, (shown, values)


def test_naive_masking_would_fail_the_same_brute_force() -> None:
    """Five classes, all cells 4 above a multiple of five, their sum a multiple: without hiding, all are exact."""
    row, span = (44, 14, 9, 4, 4), (75, 79)
    assert masked_rows([row], span) == [None]
    with mock.patch.object(masked_counts, "KEPT_VALUES", 1):
        (shown,) = masked_rows([row], span)
    assert shown == (40, 10, 5, None, None)
    assert [bounds(v)[1] for v in shown] == list(row)
    assert sum(bounds(v)[1] for v in shown) == span[0]


@pytest.mark.slow
def test_a_solver_cannot_narrow_down_a_count_with_all_that_a_report_says() -> None:
    """Integer programming over every published table, class count and calibration bin together."""
    optimize = pytest.importorskip("scipy.optimize")
    for seed in range(7):
        report, truth = random_report(seed)
        system = System(report, optimize)
        for name, model in report.answers.items():
            for c, row in enumerate(model.confusion):
                for j, value in enumerate(row or ()):
                    if value is None:
                        low, high = system.range(name, c, j)
                        assert high - low >= 2, (seed, name, c, j, low, high)
                        assert low <= truth[name][c, j] <= high


class System:
    """Whole numbers that fit a report: class sums, tables of all experts, calibration bins."""

    def __init__(self, report: SiteReport, optimize: Any) -> None:
        self.optimize, self.names = optimize, list(report.answers)
        self.size, self.experts = len(report.classes), len(report.answers)
        self.count = self.size + self.experts * (self.size**2 + 20)
        self.low, self.high = np.zeros(self.count), np.full(self.count, 1000.0)
        self.rows: list[tuple[np.ndarray, float]] = []
        for c, count in enumerate(report.class_counts):
            self.low[c], self.high[c] = total_bounds(count)
        for name, model in report.answers.items():
            for c, row in enumerate(model.confusion):
                cells = [self.cell(name, c, j) for j in range(self.size)]
                for j, value in enumerate(row or ()):
                    self.low[cells[j]], self.high[cells[j]] = bounds(value)
                self.equal(cells, [c])
            bins = [self.bin(name, place) for place in range(20)]
            if model.calibration is None:
                continue
            for place, each in enumerate(model.calibration):
                self.low[bins[place]], self.high[bins[place]] = bounds(each.images)
                self.low[bins[10 + place]], self.high[bins[10 + place]] = bounds(each.correct)
            self.equal(bins[:10], list(range(self.size)))
            self.equal(bins[10:], [self.cell(name, c, c) for c in range(self.size)])

    def cell(self, name: str, c: int, j: int) -> int:
        return self.size + self.names.index(name) * (self.size**2 + 20) + c * self.size + j

    def bin(self, name: str, place: int) -> int:
        return self.cell(name, self.size, 0) + place

    def equal(self, left: list[int], right: list[int]) -> None:
        row = np.zeros(self.count)
        row[left], row[right] = 1, -1
        self.rows.append((row, 0.0))

    def range(self, name: str, c: int, j: int) -> tuple[int, int]:
        matrix = np.stack([row for row, _ in self.rows])
        constraint = self.optimize.LinearConstraint(matrix, 0, 0)
        ends = []
        for sign in (1, -1):
            goal = np.zeros(self.count)
            goal[self.cell(name, c, j)] = sign
            solved = self.optimize.milp(
                goal,
                constraints=constraint,
                bounds=self.optimize.Bounds(self.low, self.high),
                integrality=np.ones(self.count),
            )
            assert solved.success
            ends.append(round(sign * solved.fun))
        return ends[0], ends[1]


@pytest.mark.slow
def test_calibration_is_left_out_where_its_sums_would_give_a_count_away() -> None:
    """All 155 answers are in one bin, whose count fixes the total of every class: then the blank can only be 4."""
    optimize = pytest.importorskip("scipy.optimize")
    table = [[44, 4, 9], [0, 49, 0], [0, 0, 49]]
    labels, predictions = (
        torch.tensor([pair[side] for c, row in enumerate(table) for j, n in enumerate(row) for pair in [(c, j)] * n])
        for side in (0, 1)
    )
    answers = (0.025 + 0.925 * torch.eye(3)[predictions])[None]

    def report() -> SiteReport:
        tables = site_measurement._Tables(mock.Mock(classes=("a", "b", "c"), labels=labels), answers, [])
        model = tables.answers(0, answers[0], labels)
        return SiteReport(
            "s", "table", False, ("a", "b", "c"), tables.totals, {"x": ""}, {"x": model}, {}, (), None, "0"
        )

    published = report()
    assert published.answers["x"].confusion[0] == (40, None, 5)
    assert published.answers["x"].calibration is None
    assert System(published, optimize).range("x", 0, 1) == (2, 4)
    with mock.patch.object(site_measurement._Tables, "_accepts", return_value=True):
        assert System(report(), optimize).range("x", 0, 1) == (4, 4)


def random_report(seed: int) -> tuple[SiteReport, dict[str, np.ndarray]]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.zeros(47), torch.ones(23), torch.full((9 - 3 * (seed % 3),), 2)]).long()
    logits = torch.randn(3, len(labels), 3, generator=generator) + 3.0 * torch.eye(3)[labels]
    answers = torch.softmax(logits, dim=-1)
    data = mock.Mock(classes=("a", "b", "c"), labels=labels)
    tables = site_measurement._Tables(data, answers, [])
    models = {name: tables.answers(k, answers[k], labels) for k, name in enumerate("xyz")}
    report = SiteReport(
        "s", "table", False, ("a", "b", "c"), tables.totals, dict.fromkeys("xyz", ""), models, {}, (), None, "0"
    )
    truth = {name: site_measurement.confusion(answers[k].argmax(dim=-1), labels, 3) for k, name in enumerate("xyz")}
    return report, truth


def test_a_site_that_lacks_a_class_says_so_and_measures_the_others() -> None:
    labels = torch.arange(60) % 2
    answers = torch.softmax(4.0 * torch.eye(3)[labels], dim=-1)[None]
    tables = site_measurement._Tables(mock.Mock(classes=("a", "b", "c"), labels=labels), answers, [])
    assert tables.totals == (30, 30, 0)
    model = tables.answers(0, answers[0], labels)
    assert model.confusion == ((30, None, None), (None, 30, None), (0, 0, 0))
    assert estimated_scores(model.confusion, tables.totals)["balanced_accuracy"] > 0.9
    assert recall_bounds(model.confusion, tables.totals)[2] is None


@pytest.mark.parametrize("seed", range(5))
def test_estimates_are_near_the_true_scores_and_within_the_bounds(seed: int) -> None:
    random = np.random.default_rng(seed)
    sizes = random.integers(40, 300, 4)
    table = np.stack([random.multinomial(n, 0.1 + 0.6 * np.eye(4)[c]) for c, n in enumerate(sizes)])
    totals = masked_counts.masked_class_counts(sizes.tolist())
    rows = [masked_rows([row.tolist()], total_bounds(total))[0] for row, total in zip(table, totals, strict=True)]
    recalls = np.diag(table) / sizes
    scores = estimated_scores(rows, totals)
    assert scores["accuracy"] == pytest.approx(np.trace(table) / table.sum(), abs=0.02)
    assert scores["balanced_accuracy"] == pytest.approx(recalls.mean(), abs=0.03)
    for recall, span in zip(recalls, recall_bounds(rows, totals), strict=True):
        assert span is not None
        assert span[0] <= recall <= span[1]


# --- the commands ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def few_candidates() -> Iterator[None]:
    with mock.patch.object(pseudo_targets, "CANDIDATES", (DEFAULT, "ensemble(views=hflip)", "mean")):
        yield


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pool of three sites, each site's signed report, and the trusted keys."""
    folder = tmp_path_factory.mktemp("sites")
    recipe = {"seed": 3, "split_seed": None, "validation_share": 0.5}
    write_pool(folder / "pool", SITES, recipes=dict.fromkeys(SITES, recipe), classes=phantom.CLASSES)
    with mock.patch.object(pseudo_targets, "CANDIDATES", (DEFAULT, "ensemble(views=hflip)", "mean")):
        for site in SITES:
            key, out = make_key(folder / "keys", site), str(folder / f"{site}.json")
            done = command(
                "site-report", str(folder / "pool"), *PHANTOM, "--domain", site, "--out", out, "--key", str(key)
            )
            assert done.returncode == 0, done.stderr
    return folder


def test_a_report_is_as_its_schema_says_and_names_nothing_of_the_images(reported: Path) -> None:
    for site in SITES:
        text = (reported / f"{site}.json").read_text()
        value = json.loads(text)
        Draft202012Validator(SCHEMA).validate(value)
        report = SiteReport.load(reported / f"{site}.json")
        assert report.to_json() == json.loads(json.dumps(report.to_json())) or report == SiteReport.from_json(value)
        assert [name for name, model in report.answers.items() if model.is_home] == [site]
        counts = [count for model in report.answers.values() for row in model.confusion for count in row or ()]
        assert all(count is None or count % 5 == 0 for count in counts)
        assert "fingerprint" not in text
        assert str(reported) not in text
        assert set(report.experts) == set(SITES)


def test_reports_join_to_a_choice(reported: Path, tmp_path: Path) -> None:
    pool = Path(shutil.copytree(reported / "pool", tmp_path / "pool"))
    files = [str(reported / f"{site}.json") for site in SITES]
    joined = command("choose", str(pool), *files, "--join", "--json")
    assert joined.returncode == 0, joined.stderr
    assert json.loads(joined.stdout)["pseudo_targets"] == 3
    assert json.loads((pool / "pool.json").read_text())["recommendation"]["parts"][0]["site"] == "brest"


def outside_report(reported: Path) -> Path:
    """The signed report of a site that has no expert in the pool."""
    out = reported / "graz.json"
    if not out.exists():
        key = str(make_key(reported / "keys", "graz"))
        done = command(
            "site-report", str(reported / "pool"), *PHANTOM, "--domain", "graz", "--out", str(out), "--key", key
        )
        assert done.returncode == 0, done.stderr
    return out


def test_reports_give_the_correction_its_prior(reported: Path, tmp_path: Path) -> None:
    pool = Path(shutil.copytree(reported / "pool", tmp_path / "pool"))
    with pytest.raises(PoolError, match="needs reports of the sites"):
        ms.create_method("corrected", ms.ExpertPool.load(pool), anchor="sites")
    files = [*(str(reported / f"{site}.json") for site in SITES), str(outside_report(reported))]
    trusted = str(reported / "keys" / "trusted")
    joined = command("choose", str(pool), *files, "--join", "--require-signed-by", trusted)
    assert joined.returncode == 0, joined.stderr
    whole = ms.ExpertPool.load(pool)
    assert [each.site for each in site_evidence(whole)] == [*SITES, "graz"]
    prevalence, bias = variances_by_sites(whole)
    truth, answers = expected_variances([SiteReport.load(Path(file)) for file in files])
    assert prevalence.tolist() == pytest.approx(truth, rel=1e-4)
    assert bias.tolist() == pytest.approx(answers, rel=1e-4)
    method = ms.create_method("corrected", whole, base="mean", anchor="sites")
    assert method.card_values()["bias"] == bias.tolist()
    # A target's own report is no evidence about it: neither that of an expert's site nor that of an outside one.
    assert [each.site for each in site_evidence(whole.without("lyon"))] == ["brest", "turin", "graz"]
    for target, left in (("lyon", ["brest", "turin", "graz"]), ("graz", [*SITES])):
        data = [ms.load_dataset("phantom", images=48)[target]]
        sources = sources_for(whole, pool, [target], data, leave_out=True, allow_seen=False)
        assert [each.site for each in site_evidence(sources)] == left
    whole.save(tmp_path / "copy")
    assert len(site_evidence(ms.ExpertPool.load(tmp_path / "copy"))) == 4


def expected_variances(reports: list[SiteReport]) -> tuple[list[float], list[float]]:
    """The same numbers by a loop over sites and classes."""
    odds, gaps = [], []
    for report in reports:
        abroad = [model.mean_probability for model in report.answers.values() if not model.is_home]
        shares, answers = np.log(report.sizes + 0.5), np.log(np.maximum(np.mean(abroad, axis=0), 0.0005))
        odds.append(shares - shares.mean())
        gaps.append(answers - answers.mean() - odds[-1])
    count = len(reports)
    prevalence = [(sum((row[c] - np.mean(odds, axis=0)[c]) ** 2 for row in odds) + 1) / count for c in range(4)]
    return prevalence, [sum(row[c] ** 2 for row in gaps) / (count + 1) for c in range(4)]


def test_a_choice_of_reports_that_nobody_trusted_has_signed_is_refused(reported: Path, tmp_path: Path) -> None:
    pool, trusted = str(shutil.copytree(reported / "pool", tmp_path / "pool")), str(reported / "keys" / "trusted")
    files = [str(reported / f"{site}.json") for site in SITES[1:]]
    shutil.copy(reported / "brest.json", tmp_path / "brest.json")
    required = ("--join", "--require-signed-by", trusted)
    unsigned = command("choose", pool, str(tmp_path / "brest.json"), *files, *required)
    assert (unsigned.returncode, "is not signed" in unsigned.stderr) == (1, True)
    shutil.copy(reported / "brest.json.sig", tmp_path / "brest.json.sig")
    (tmp_path / "brest.json").write_text((reported / "brest.json").read_text().replace("0.25", "0.75"))
    changed = command("choose", pool, str(tmp_path / "brest.json"), *files, *required)
    assert (changed.returncode, "brest.json is not as brest signed it" in changed.stderr) == (1, True)


def test_a_card_shows_its_metrics_at_every_site_that_reported(reported: Path, tmp_path: Path) -> None:
    expert = Path(shutil.copytree(reported / "pool" / "lyon", tmp_path / "lyon"))
    trusted = reported / "keys" / "trusted"
    files = [word for site in SITES for word in ("--report", str(reported / f"{site}.json"))]
    done = command("pool", "card", str(expert), *files, "--require-signed-by", str(trusted))
    assert done.returncode == 0, done.stderr
    text = (expert / "README.md").read_text()
    metrics: dict[str, dict[str, float]] = defaultdict(dict)
    for result in ModelCard(text).data.eval_results:
        metrics[result.dataset_name][result.metric_type] = result.metric_value
    for site in ("brest", "turin"):
        report = SiteReport.load(reported / f"{site}.json")
        scores = report.scores(report.answers["lyon"])
        assert metrics[f"{site}, reported by the site"]["balanced_accuracy"] == pytest.approx(
            scores["balanced_accuracy"], abs=1e-3
        )
        assert f"| {site} |" in text
    assert not any(name.startswith("lyon, reported") for name in metrics)  # its own validation is in the card already
    assert "rounded" in text
    other = tmp_path / "other.json"
    value = json.loads((reported / "brest.json").read_text())
    other.write_text(json.dumps({**value, "experts": {**value["experts"], "lyon": "0" * 64}}))
    refused = command("pool", "card", str(expert), "--report", str(other))
    assert (refused.returncode, "is not about these weights" in refused.stderr) == (1, True)


def test_the_matrix_shows_every_expert_at_every_site_and_checks_signatures(reported: Path, tmp_path: Path) -> None:
    files = [str(reported / f"{site}.json") for site in SITES]
    page, trusted = tmp_path / "matrix.html", str(reported / "keys" / "trusted")
    done = command("matrix", *files, "--out", str(page), "--require-signed-by", trusted)
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert "3 experts at 3 sites" in text
    assert "signed by lyon" in text
    assert "The data are synthetic" in text
    changed = json.loads(Path(files[0]).read_text())
    changed["class_counts"][0] = 500
    for name in ("brest.json", "brest.json.sig"):
        shutil.copy(reported / name, tmp_path / name)
    (tmp_path / "brest.json").write_text(json.dumps(changed))
    refused = command("matrix", str(tmp_path / "brest.json"), *files[1:], "--require-signed-by", trusted)
    assert refused.returncode == 1
    assert "brest.json" in refused.stderr


def test_reports_of_different_weights_classes_or_one_site_twice_are_refused(reported: Path, tmp_path: Path) -> None:
    brest, lyon = (json.loads((reported / f"{site}.json").read_text()) for site in SITES[:2])
    other = tmp_path / "other.json"
    for change, sentence in (
        ({"experts": {**lyon["experts"], "turin": "0" * 64}}, "different weights under the name 'turin'"),
        ({"classes": list(reversed(lyon["classes"]))}, "different classes"),
        ({"site": "brest"}, "both reports of 'brest'"),
        ({"class_counts": [5]}, "not a site report"),
    ):
        other.write_text(json.dumps({**lyon, **change}))
        refused = command("matrix", str(reported / "brest.json"), str(other), "--out", str(tmp_path / "m.html"))
        assert refused.returncode == 1
        assert sentence in refused.stderr
    assert brest["site"] == "brest"


def test_an_outside_site_measures_all_experts_and_has_no_part_in_the_choice(reported: Path, tmp_path: Path) -> None:
    out = tmp_path / "graz.json"
    done = command("site-report", str(reported / "pool"), *PHANTOM, "--domain", "graz", "--out", str(out))
    assert done.returncode == 0, done.stderr
    report = SiteReport.load(out)
    assert report.choice is None
    assert set(report.candidates)
    refused = command("choose", str(reported / "pool"), str(out), "--join")
    assert refused.returncode == 1
    assert "no expert in the pool" in refused.stderr


def test_wrong_usage_is_refused_with_a_sentence(reported: Path, tmp_path: Path) -> None:
    pool, out = str(reported / "pool"), str(tmp_path / "out.json")
    several = command("site-report", pool, *PHANTOM, "--out", out)
    assert several.returncode == 2
    assert "--domain" in several.stderr
    few = command(
        "site-report", pool, "--dataset", "phantom", "--data-option", "images=12", "--domain", "graz", "--out", out
    )
    assert "fewer than 20" in few.stderr
    assert command("matrix").returncode == 2
    assert not Path(out).exists()
