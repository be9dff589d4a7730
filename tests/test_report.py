"""The report from a folder of runs: its numbers, its page, the command line."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

import mergestream as ms
from benching import bench_arguments, command, write_consortium
from conftest import make_images, make_pool
from mergestream.bench.analysis.bench_findings import seen_targets
from mergestream.bench.analysis.collection import collect
from mergestream.bench.analysis.confidence import BINS, reliabilities, risk_coverages
from mergestream.bench.analysis.cost import costs
from mergestream.bench.drift.pool_drift import analyse_drift
from mergestream.bench.evaluation import domain_logits
from mergestream.bench.landscape.landscape_record import Landscape
from mergestream.bench.records import Run
from mergestream.bench.report.figures import colours_of, panel
from mergestream.bench.report.method_figures import draw_reliability
from mergestream.bench.report.page import environment, render
from mergestream.bench.report.plain_names import explained, stream_meaning
from mergestream.bench.report.report_findings import analyse_runs
from mergestream.bench.report.report_page import make_report
from mergestream.bench.report.result_sections import answer_sentences, describe_options
from mergestream.bench.report.result_table import ResultTable, to_latex, to_markdown
from mergestream.data.streams.stream_spec import STREAMS
from mergestream.runtime.errors import CheckpointError, InputError
from mergestream.runtime.parallel import quiet

ROOT = Path(__file__).parent.parent
METHODS = "entropy_adaptive(head=entropy_gap|shared), mean, ensemble, adamerging, select_expert"


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    write_consortium(folder)
    done = command(*bench_arguments(folder, folder / "runs", "--methods", METHODS, "--seeds", "0"))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def page(bench: Path) -> str:
    done = command("report", str(bench / "runs"), "--out", str(bench / "report.html"))
    assert done.returncode == 0, done.stderr
    assert "On iid, entropy_adaptive" in done.stdout
    assert f"Report: {bench / 'report.html'}" in done.stdout
    return (bench / "report.html").read_text(encoding="utf-8")


class Outline(HTMLParser):
    """What a page loads, its headings, figures and rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.requests, self.headings, self.pictures, self.rows, self.ids = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        self.headings += [tag] if tag in ("h1", "h2") else []
        self.rows += [values.get("data-method")] if tag == "tr" else []
        if tag in ("svg", "img"):
            self.pictures.append(values.get("aria-label") or values.get("alt"))
        if tag in ("script", "img", "link", "iframe", "use", "image"):
            source = values.get("src") or values.get("href") or values.get("xlink:href")
            self.requests += [source] if source and not source.startswith(("data:", "#")) else []


def test_the_page_loads_nothing_and_says_what_it_is(page: str) -> None:
    outline = Outline(page)
    assert not outline.requests
    assert not re.search(r"url\((?!#)|@import", page)
    assert "Not a medical device" in page
    assert "default-src 'none'" in page
    assert outline.headings.count("h1") == 1
    assert len(outline.pictures) >= 6
    assert all(text and len(text) > 40 for text in outline.pictures)
    assert len(set(outline.pictures)) == len(outline.pictures)
    assert len(set(outline.ids)) == len(outline.ids)
    for title in ("Summary", "Results", "Ablation", "Streams", "Cost", "Confidence", "Warnings", "Data and licences",
                  "Provenance"):  # fmt: skip
        assert f">{title}</h2>" in page


def test_real_pictures_are_not_called_synthetic(page: str) -> None:
    assert "data are synthetic" not in page


def test_the_numbers_are_those_of_the_benchmark(page: str, bench: Path) -> None:
    results = json.loads((bench / "runs" / "results.json").read_text())
    text = re.sub(r"<[^>]+>", " ", page)
    for row in results["results"]:
        value = row["accuracy"]
        assert f"{100 * value['mean']:.1f} [{100 * value['low']:.1f}, {100 * value['high']:.1f}]" in text
    for sentence in results["warnings"]:
        assert sentence in unescape(text).replace("\N{NO-BREAK SPACE}", " ")
    assert results["command"] in unescape(text)
    for run in (bench / "runs" / "runs").iterdir():
        assert run.name in text


def test_every_row_of_a_method_can_be_hidden(page: str) -> None:
    labels = re.findall(r'<input type="checkbox" value="([^"]+)"', page)
    assert {"entropy_adaptive", "entropy_adaptive(head=shared)", "mean"} <= set(labels)
    for label in labels:
        assert page.count(f'data-method="{label}"') >= 5
    assert set(filter(None, Outline(page).rows)) == set(labels)


def test_every_table_is_beside_the_page_as_markdown_and_latex(page: str, bench: Path) -> None:
    titles = re.findall(r"<caption>(.*?)</caption>", page)
    folder = bench / "report-tables"
    assert len(titles) == len(set(titles)) >= 10
    assert len(list(folder.glob("*.md"))) == len(list(folder.glob("*.tex"))) == len(titles)
    text = (folder / "cost-of-a-batch.md").read_text()
    assert "| entropy_adaptive | 5 | 0 |" in text  # two experts, one view: 2·(1 + 1) + 1
    assert "\\toprule" in (folder / "cost-of-a-batch.tex").read_text()
    assert page.count('class="export"') == 2 * len(titles)


def test_results_of_another_version_are_refused(bench: Path, tmp_path: Path) -> None:
    shutil.copytree(bench / "runs", tmp_path / "runs", ignore=shutil.ignore_patterns("cache"))
    path = tmp_path / "runs" / "results.json"
    for version in (1, 3):
        path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": version}))
        with pytest.raises(CheckpointError, match="reads version 2"):
            collect(tmp_path / "runs")


def test_a_drift_record_makes_a_section_and_another_file_is_refused(bench: Path, tmp_path: Path) -> None:
    record, out = tmp_path / "drift.json", tmp_path / "deep" / "page.html"
    analyse_drift(bench / "pool").save(record)
    make_report(bench / "runs", out, quiet, command="again", drift=record, tables=tmp_path / "tables")
    assert ">Drift</h2>" in out.read_text()
    assert (tmp_path / "tables" / "drift-by-layer.tex").is_file()
    record.write_text('{"schema_version": 7}')
    with pytest.raises(CheckpointError, match="schema_version 7"):
        make_report(bench / "runs", out, quiet, command="again", drift=record)


def test_a_folder_without_runs_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no finished run"):
        collect(tmp_path)
    failed = command("report", str(tmp_path / "nowhere"), "--out", str(tmp_path / "page.html"))
    assert failed.returncode == 2
    assert failed.stderr.count("\n") == 1
    assert "mergestream bench --out" in failed.stderr
    assert not (tmp_path / "page.html").exists()


def test_runs_are_those_that_the_benchmark_lists(bench: Path, tmp_path: Path) -> None:
    copy = tmp_path / "runs"
    shutil.copytree(bench / "runs", copy)
    collection = collect(copy)
    assert collection.older_runs == 0
    stranger = copy / "runs" / "0123456789abcdef"
    shutil.copytree(next((copy / "runs").glob("[!.]*")), stranger)
    again = collect(copy)
    assert again.older_runs == 1
    assert [run.hash for run in again.runs] == [run.hash for run in collection.runs]
    shutil.rmtree(copy / "runs" / collection.runs[0].hash)
    with pytest.raises(InputError, match=r"1 of the .* are missing"):
        collect(copy)


def test_runs_without_a_list_are_found_and_the_newest_of_a_kind_counts(bench: Path, tmp_path: Path) -> None:
    first = collect(bench / "runs").runs[0]
    newer = Run(**{**vars(first), "arguments": {**first.arguments, "revision": first.arguments["revision"] + 1}})
    first.save(tmp_path / first.hash)
    newer.save(tmp_path / newer.hash)
    header = tmp_path / first.hash / "run.json"
    os.utime(header, (1, 1))
    collection = collect(tmp_path)
    assert [run.hash for run in collection.runs] == [newer.hash]
    assert collection.older_runs == 1


def test_an_expert_of_the_target_is_called_leakage(bench: Path) -> None:
    runs = collect(bench / "runs").runs
    assert not seen_targets(runs)
    guilty = {**runs[0].arguments, "pool": {"experts": [runs[0].arguments["data"]["domain"]]}}
    (sentence,) = seen_targets([Run(**{**vars(runs[0]), "arguments": guilty})])
    assert sentence.startswith("Leakage")


@pytest.mark.parametrize(
    ("method", "options", "forwards", "backwards", "models"),
    [
        ("entropy_adaptive", {}, 7, 0, 4),
        ("entropy_adaptive", {"views": ()}, 4, 0, 4),
        ("entropy_adaptive", {"refresh_every": 3}, 3, 0, 4),
        ("merge_and_fit", {}, 7, 0, 4),
        ("corrected", {}, 6, 0, 3),
        ("corrected", {"base": "mean"}, 1, 0, 4),
        ("lame", {}, 1, 0, 4),
        ("lame", {"base": "ensemble"}, 4, 0, 4),
        ("corrected", {"base": "t3a(ensemble(views=hflip))"}, 7, 0, 4),
        ("ensemble", {}, 3, 0, 3),
        ("entropy_adaptive", {"score_images": 1}, 2.5, 0, 4),
        ("tent", {}, 2, 1, 5),
        ("sar", {}, 3, 2, 5),
        ("dawin", {}, 4, 0, 4),
        ("t3_js", {}, 4, 0, 4),
        ("image_weights", {}, 3, 0, 3),
        ("surgery", {}, 4, 0, 4),
        ("select_expert", {}, 3, 0, 3),
        ("single_expert", {"expert": "brest"}, 1, 0, 1),
        ("mean", {}, 1, 0, 4),
        ("ties", {}, 1, 0, 5),
        ("adamerging", {"steps": 2}, 3, 2, 6),
        ("regmean", {"statistics": "target", "examples": 4}, 2, 0, 4),
        ("fisher", {"statistics": "source"}, 1, 0, 10),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_costs_are_what_the_steps_counted(
    method: str, options: dict, forwards: float, backwards: float, models: float, shared: bool
) -> None:
    """Also where a benchmark computes the experts' logits once for all methods."""
    pool, images = make_pool("vit", base=True, statistics=True), make_images(12)
    data = ms.DomainData("test", "nice", pool.classes, images, torch.arange(12) % len(pool.classes))
    expert_logits = {view: domain_logits(pool, data, view) for view in ("original", "hflip")} if shared else None
    created = ms.create_method(method, pool, **options)
    run = ms.evaluate(created, data, np.arange(12).reshape(3, 4), expert_logits=expert_logits)
    (cost,) = costs([run])
    assert (cost.forwards, cost.backwards, cost.models) == (pytest.approx(forwards), backwards, models)


def test_reliability_gives_the_calibration_error_of_torchmetrics(bench: Path) -> None:
    from torchmetrics.functional.classification import multiclass_calibration_error

    (run, *_) = collect(bench / "runs").runs
    (curve,) = reliabilities([run])
    reference = multiclass_calibration_error(run.probabilities, run.labels, len(run.classes), n_bins=BINS)
    assert float(np.sum(curve.share * abs(curve.accuracy - curve.confidence))) == pytest.approx(
        float(reference), abs=1e-5
    )
    assert curve.share.sum() == pytest.approx(1)


def test_the_risk_at_full_coverage_is_the_error(bench: Path) -> None:
    runs = [run for run in collect(bench / "runs").runs if run.arguments["label"] == "mean"]
    for curve in risk_coverages(runs):
        here = [run for run in runs if run.arguments["stream"]["name"] == curve.stream]
        assert curve.risk[-1] == pytest.approx(1 - np.mean([run.accuracy for run in here]))
        assert curve.coverage[-1] == 1


def test_a_figure_takes_the_pages_colours_and_names_its_methods(bench: Path) -> None:
    curves = reliabilities(
        [run for run in collect(bench / "runs").runs if run.arguments["label"] in ("mean", "ensemble")]
    )
    one, two = (panel(name, "text alternative", lambda ax: draw_reliability(ax, curves)).svg for name in "ab")
    assert 'aria-label="text alternative"' in one
    assert "currentColor" in one
    assert "var(--c1)" in one
    assert 'data-method="ensemble"' in one
    assert "http" not in one
    ids = [set(re.findall(r' id="([^"]+)"', text)) for text in (one, two)]
    assert not ids[0] & ids[1]
    for text, own in zip((one, two), ids, strict=True):
        assert set(re.findall(r'(?:url\(|href=")#([^)"]+)', text)) <= own


def page_of(table: ResultTable, methods: list[str]) -> tuple[str, list[ResultTable]]:
    """A page with one section and the table in a fold."""
    template = environment().from_string(
        '{% from "parts.html.j2" import section, fold, table with context %}'
        '{% call section("S") %}{% call fold("more") %}{{ table(shown) }}{% endcall %}{% endcall %}'
    )
    return render(template, "t", "n", methods, shown=table)


def test_a_table_is_escaped_sortable_and_copied() -> None:
    table = ResultTable(
        "A <title>",
        ("method", "a&b", "in words"),
        (("m(x=1)", "1.0", "so it <is>"), ("other", "–", "so")),
        frozenset({(0, 1)}),
    )
    text, _ = page_of(table, ["m(x=1)"])
    assert "A &lt;title&gt;" in text
    assert text.count('aria-sort="none"') == 3
    assert '<tr data-method="m(x=1)" class="variant">' in text
    assert "<strong>1.0</strong>" in text
    assert '<td class="text">so it &lt;is&gt;</td>' in text
    for written in (to_markdown(table), to_latex(table)):
        assert written.splitlines()[-1] in unescape(text)


def test_the_page_lists_its_sections_and_its_tables_in_folds_too() -> None:
    table = ResultTable("inner", ("method",), (("m",),))
    text, tables = page_of(table, [])
    assert tables == [table]
    assert "<caption>inner</caption>" in text
    assert '<a href="#s">S</a>' in text


def test_options_are_described_in_words() -> None:
    assert describe_options("entropy_adaptive(views=())") == "without consistency"
    assert describe_options("entropy_adaptive(views=(vflip))") == "consistency under other views"
    assert describe_options("entropy_adaptive(head=shared, momentum=0.9)").count(";") == 1


@pytest.mark.slow
def test_the_wheel_holds_style_script_and_templates(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"mergestream/bench/report/assets/report.{kind}" for kind in ("css", "js")} <= set(names)
    assert "mergestream/bench/report/templates/page.html.j2" in names


# --- the first screen ---------------------------------------------------------------------------------------


def test_the_first_screen_answers_in_three_sentences_with_plain_names(bench: Path, page: str) -> None:
    findings = analyse_runs(collect(bench / "runs"), quiet, command="")
    sentences = answer_sentences(findings)
    assert len(sentences) == 3
    rows = [row.accuracy.mean for row in findings.bench.rows if row.label == "entropy_adaptive"]
    level = f"the paper's rule (entropy_adaptive) is right on {100 * sum(rows) / len(rows):.1f} % of the images"
    assert level in sentences[0]
    assert "the plain average of the experts (mean) on" in sentences[0]
    rivals = {each.theirs for each in findings.bench.duels}
    assert f"Of {len(rivals)} other methods on dirichlet:0.05, the paper's rule is" in sentences[1]
    assert "forward passes per image, scoring included" in sentences[2]
    assert sum(map(int, re.findall(r"(?:than|to|against) (\d+)", sentences[1]))) == len(rivals)
    assert page.index('class="answer"') < page.index("<table")


def test_streams_are_explained_on_hover() -> None:
    shown = str(explained("On iid & dirichlet:0.05, not iid2.", ["iid", "dirichlet:0.05"]))
    assert shown.startswith('On <abbr title="images in random order">iid</abbr> &amp; <abbr title="the mix of classes')
    assert shown.endswith("not iid2.")
    parts = (name.partition(":")[0] for name in STREAMS)
    assert {stream_meaning(part) for part in parts}.isdisjoint(STREAMS)  # every stream has a meaning


def test_every_method_has_a_colour_of_its_own() -> None:
    colours = colours_of(ms.list_methods())
    assert len(set(colours.values())) == len(colours) > 20


def test_the_landscape_names_its_target() -> None:
    about = {"measure": "entropy", "images": 8, "experts": ("a", "b", "c"), "pool": ("a", "b", "c"), "x": [], "y": []}
    empty = {"loss": [], "accuracy": None, "marks": [], "segments": [], "differences": []}
    assert Landscape(**about, **empty, provenance={"data": {"domain": "graz"}}).target == "graz"
