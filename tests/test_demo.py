"""`mergestream demo` on few images and steps: tables, records, pool and report; the real sizes are slow tests."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import pytest

import mergestream as ms
from benching import command, process
from mergestream.bench import demo
from mergestream.bench.demo import QUICK
from mergestream.pool import expert_card

SCHEMAS = Path(__file__).parent.parent / "docs" / "schemas"
POOL_SCHEMAS = Path(expert_card.__file__).parent / "schemas"


# Enough for every file and table; the networks learn next to nothing.
TINY = replace(
    QUICK,
    images=60,
    archive_images=80,
    base=replace(QUICK.base, steps=4, validate_every=2),
    expert=replace(QUICK.base, steps=4, validate_every=2),
    statistics_images=8,
)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp("demo") / "out"
    with mock.patch.object(demo, "QUICK", TINY):
        result = command("demo", "--quick", "--out", str(folder))
        assert result.returncode == 0, result.stderr
        yield folder, result.stdout


def test_demo_prints_the_table_and_says_synthetic(out: tuple[Path, str]) -> None:
    text = out[1]
    assert "The data are synthetic" in text
    assert "Not a medical device" in text
    methods = set(ms.list_methods()) - {"auto"}  # which is one of the others
    for word in (*methods, "oracle", "iid", "dirichlet"):
        assert word in text


STORY = ["The hospitals", "Experts abroad", "Averaging", "Adapting", "Changing mixes", "Price"]


def test_the_story_is_told_in_order_on_the_terminal_and_on_the_page(out: tuple[Path, str]) -> None:
    assert re.findall(r"^\d\. ([^:]+): ", out[1], flags=re.MULTILINE) == STORY
    titles = re.findall(r"<h2 [^>]*>([^<]+)</h2>", (out[0] / "report.html").read_text())
    assert titles[: len(STORY) + 2] == ["Summary", *STORY, "Results"]


def test_numbers_of_the_story_are_those_of_the_records(out: tuple[Path, str]) -> None:
    folder, text = out
    results = json.loads((folder / "results.json").read_text())
    home = {each["name"]: each["validation"]["accuracy"] for each in results["experts"]}
    away = {
        (run.arguments["options"]["expert"], run.target): run.accuracy
        for run in map(ms.Run.load, (folder / "runs").iterdir())
        if run.is_single and run.stream == "iid"
    }
    assert len(away) == 12
    level, abroad = sum(home.values()) / 4, sum(away.values()) / 12
    deepest = max(home[name] - accuracy for (name, _), accuracy in away.items())
    (line,) = re.findall(r"^2\. .*", text, flags=re.MULTILINE)
    assert [float(each) for each in re.findall(r"-?\d+\.\d", line)] == pytest.approx(
        [100 * level, 100 * abroad, 100 * (level - abroad), 100 * deepest], abs=0.051
    )
    rows = {(row["label"], row["stream"]): row["accuracy"]["mean"] for row in results["results"]}
    (line,) = re.findall(r"^4\. .*", text, flags=re.MULTILINE)
    gains = [float(each) for each in re.findall(r"([-+]\d+\.\d) points at the end", line)]
    expected = [
        100 * (rows[name, "dirichlet:0.05"] - rows["mean", "dirichlet:0.05"])
        for name in ("entropy_adaptive", "merge_and_fit")
    ]
    assert gains == pytest.approx(expected, abs=0.051)


def test_the_first_screen_names_the_recommended_rule(out: tuple[Path, str]) -> None:
    text = (out[0] / "report.html").read_text()
    answer = text[text.index('class="answer"') : text.index('<section id="the-hospitals"')]
    assert "the recommended rule (merge_and_fit)" in answer


def test_headings_are_short_and_points_have_points_in_their_legend(out: tuple[Path, str]) -> None:
    text = (out[0] / "report.html").read_text()
    (more,) = re.findall(r"<summary>(More tables: [^<]*)</summary>", text)
    assert "minus others" in more
    assert "part" not in more
    cost = text[text.index('<section id="cost"') : text.index('<section id="confidence"')]
    assert re.findall(r'<ul class="legend (\w+)">', cost) == ["points"]
    answer = text[text.index('class="answer"') : text.index('<section id="the-hospitals"')]
    assert re.search(r"\d\N{NO-BREAK SPACE}%", answer)  # no line ends between a number and its unit
    assert re.search(r"the head moved by [^<]*it probably did not start there", text)


def test_the_price_is_in_forwards_alone(out: tuple[Path, str]) -> None:
    """Milliseconds of a step whose experts' logits are given would make the ensemble look like the fastest method."""
    text = (out[0] / "report.html").read_text()
    price = text[text.index('<section id="price"') : text.index('<section id="results"')]
    assert "Forward passes per image, scoring included: the plain average of the experts (mean) 1," in price
    assert not re.search(r"\bms\b", price)
    assert "forward passes per batch" not in text


def test_demo_leaves_results_records_pool_and_report(out: tuple[Path, str]) -> None:
    folder = out[0]
    results = json.loads((folder / "results.json").read_text())
    assert results["schema_version"] == 2
    assert "synthetic" in results["data"]
    rows = {(row["label"], row["stream"]): row for row in results["results"]}
    methods = len(QUICK.variants)
    assert len(rows) == (methods + 2) * 2
    for row in rows.values():
        assert row["accuracy"]["low"] <= row["accuracy"]["mean"] <= row["accuracy"]["high"]
        assert set(row["per_target"]) == {"lyon", "brest", "turin", "graz"}
    best = rows["oracle: best single expert", "iid"]["accuracy"]["mean"]
    assert best >= rows["single_expert, on average", "iid"]["accuracy"]["mean"]
    pool = ms.ExpertPool.load(folder / "pool")
    assert pool.names == ("brest", "graz", "lyon", "turin")
    runs = [ms.Run.load(path) for path in (folder / "runs").iterdir()]
    assert len(runs) == (methods + 3) * 2 * 4


def test_the_table_is_what_the_records_say(out: tuple[Path, str]) -> None:
    """Nothing between the records and the table: the mean is recomputed here from predictions on disk."""
    import numpy as np

    folder = out[0]
    shown = json.loads((folder / "results.json").read_text())["results"]
    for label in ("entropy_adaptive", "mean", "ensemble"):
        accuracies = []
        for path in (folder / "runs").iterdir():
            header = json.loads((path / "run.json").read_text())["arguments"]
            if (header["label"], header["stream"]["name"]) == (label, "dirichlet:0.05"):
                stored = np.load(path / "predictions.npz")
                accuracies.append(np.mean(stored["prediction"] == stored["label"]))
        (row,) = [row for row in shown if (row["label"], row["stream"]) == (label, "dirichlet:0.05")]
        assert len(accuracies) == 4
        assert row["accuracy"]["mean"] == pytest.approx(np.mean(accuracies))


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.outside, self.headings = [], [], []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if tag in ("img", "svg"):
            self.images.append(values.get("alt") or values.get("aria-label"))
        if tag in ("h1", "h2"):
            self.headings.append(tag)
        for key in ("src", "href"):
            value = values.get(key)
            if value and not value.startswith(("data:", "#")):
                self.outside.append(value)


def test_the_report_is_self_contained(out: tuple[Path, str]) -> None:
    text = (out[0] / "report.html").read_text()
    page = Page()
    page.feed(text)
    assert not page.outside
    assert not re.search("https?:", re.sub(r"data:image/png;base64,[A-Za-z0-9+/=]+", "", text))
    assert len(page.images) >= 40
    assert all(page.images)
    assert page.headings.count("h1") == 1
    assert "The data are synthetic" in text
    assert "Not a medical device" in text
    assert len(text) < 3_000_000
    for title in ("Summary", "Results", "Ablation", "Streams", "Drift", "Cost", "The hospitals", "Provenance"):
        assert f">{title}</h2>" in text
    assert list((out[0] / "report-tables").glob("*.tex"))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_short_and_has_no_errors(out: tuple[Path, str], browser: Any, scheme: str) -> None:
    page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme=scheme)
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    page.goto((out[0] / "report.html").as_uri())
    assert page.evaluate("document.documentElement.scrollHeight") < 9000
    assert page.evaluate("document.documentElement.scrollWidth") == 1280
    assert page.locator("#the-hospitals img").bounding_box()["y"] < 900  # the pictures begin on the first screen
    page.close()
    assert not troubles


@pytest.mark.slow
def test_the_report_can_be_made_again_from_the_records(out: tuple[Path, str], tmp_path: Path) -> None:
    """What the demo ends with is what the command gives: the same tables, number for number."""
    drift = str(out[0] / "drift.json")
    result = command("report", str(out[0]), "--out", str(tmp_path / "again.html"), "--drift", drift)
    assert result.returncode == 0, result.stderr
    for table in (tmp_path / "again-tables").iterdir():
        assert table.read_text() == (out[0] / "report-tables" / table.name).read_text(), table.name


@pytest.mark.slow
def test_a_second_demo_redoes_nothing(out: tuple[Path, str]) -> None:
    folder, before = out[0], json.loads((out[0] / "results.json").read_text())
    stamps = {path: path.stat().st_mtime_ns for path in [*folder.glob("pool/*/*"), *folder.glob("runs/*/*")]}
    result = command("demo", "--quick", "--out", str(folder), "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == before
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps


def test_every_file_keeps_its_schema(out: tuple[Path, str]) -> None:
    folder = out[0]

    @cache
    def validator(name: str) -> jsonschema.Draft202012Validator:
        folder = POOL_SCHEMAS if name in ("expert", "pool") else SCHEMAS
        return jsonschema.Draft202012Validator(json.loads((folder / f"{name}.schema.json").read_text()))

    def check(name: str, value: object) -> None:
        validator(name).validate(value)

    check("results", json.loads((folder / "results.json").read_text()))
    for path in (folder / "pool").glob("*/expert.json"):
        check("expert", json.loads(path.read_text()))
    for path in (folder / "runs").iterdir():
        check("run", json.loads((path / "run.json").read_text()))
        for line in (path / "steps.jsonl").read_text().splitlines()[:2]:
            check("step", json.loads(line))


def test_cards_and_records_name_no_file_and_no_machine(out: tuple[Path, str]) -> None:
    for path in [*out[0].glob("pool/*/expert.json"), *out[0].glob("runs/*/run.json")]:
        text = path.read_text()
        assert str(out[0]) not in text
        assert str(Path.home()) not in text


@pytest.mark.slow
def test_experts_of_the_quick_demo_know_their_own_hospital_best(tmp_path: Path) -> None:
    result = process("demo", "--quick", "--out", str(tmp_path / "out"), "--json")
    assert result.returncode == 0, result.stderr
    results = json.loads(result.stdout)
    home = sum(expert["validation"]["accuracy"] for expert in results["experts"]) / len(results["experts"])
    (away,) = [r for r in results["results"] if (r["label"], r["stream"]) == ("single_expert, on average", "iid")]
    assert home > away["accuracy"]["mean"] + 0.05
    assert_tutorial_shows(ms.ExpertPool.load(tmp_path / "out" / "pool"))


def assert_tutorial_shows(pool: ms.ExpertPool) -> None:
    """The outputs in docs/tutorial.md are of such a pool, trained on one processor: rounding elsewhere makes another.

    Accuracies on the same images may then differ by chance, by three standard errors. What the page says may not.
    """
    page = (SCHEMAS.parent / "tutorial.md").read_text(encoding="utf-8")
    for card in pool.cards:
        (shown,) = re.findall(rf"^{card.domain} +{card.domain} +([\d.]+) %", page, flags=re.MULTILINE)
        validation = card.metrics["validation"]
        assert validation["accuracy"] == by_chance(float(shown) / 100, validation["images"])
    pool, graz = pool.without("graz"), ms.load_dataset("phantom")["graz"]
    batches = (
        ms.streams.iid(graz.labels, batch_size=32, seed=0),
        ms.streams.dirichlet(graz.labels, alpha=0.05, batch_size=32, seed=0),
    )
    rows = re.findall(r"^\| `(\w+)`.*\| ([\d.]+) \| ([\d.]+) \|$", page, flags=re.MULTILINE)
    assert len(rows) == 4
    accuracies = {}
    for name, *shown in rows:
        measured = [ms.evaluate(ms.create_method(name, pool), graz, stream).accuracy for stream in batches]
        assert measured == [by_chance(float(each), len(graz)) for each in shown], name
        accuracies[name] = measured
    assert accuracies["merge_and_fit"][1] > accuracies["ensemble"][1] + 0.1
    assert accuracies["ensemble"][0] > accuracies["mean"][0]


def by_chance(share: float, images: int) -> Any:
    """Equal to a share of so many images within three standard errors."""
    return pytest.approx(share, abs=3 * math.sqrt(share * (1 - share) / images))


@pytest.mark.slow
def test_the_full_demo_ends_well(tmp_path: Path) -> None:
    result = process("demo", "--out", str(tmp_path / "out"))
    assert result.returncode == 0, result.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    rows = {(row["label"], row["stream"]): row for row in results["results"]}
    assert len(rows) == (len(demo.FULL.variants) + 2) * len(demo.FULL.streams)
    assert all(row["runs"] in (12, 36) for row in rows.values())
    home = [expert["validation"]["accuracy"] for expert in results["experts"]]
    assert min(home) > 0.65
    assert sum(home) / len(home) > 0.75
    away = rows["single_expert, on average", "iid"]["accuracy"]["mean"]
    assert rows["mean", "iid"]["accuracy"]["mean"] > away  # the pool knows more than its average member
