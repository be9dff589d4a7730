"""`mergestream reproduce`: the paper's numbers as data, the search for data sets, and the page."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from benching import command, process
from mergestream.bench.reproduction import hours, paper_values, reproduction_plan
from mergestream.bench.reproduction.dataset_search import FOLDERS, DatasetPlace, find_datasets
from mergestream.bench.reproduction.paper_values import (
    ABLATION_ROWS,
    DATASETS,
    ROWS,
    printed_ablation,
    printed_accuracy,
)
from mergestream.bench.reproduction.reproduction_plan import (
    PRESETS,
    ROW_NAMES,
    SMOKE,
    ReproductionRequest,
    rows_of_preset,
)
from mergestream.bench.reproduction.reproduction_record import ReproductionRecord
from mergestream.bench.reproduction.reproduction_run import measure_landscape_of
from mergestream.bench.reproduction.reproduction_tables import (
    DIFFERENCE,
    PAPER,
    SILENT,
    ablation_table,
    dataset_tables,
    error_table,
    left_out,
    main_tables,
    skew_table,
    summary,
    sweep_table,
)
from mergestream.data.datasets import file_source_of
from mergestream.runtime.parallel import quiet

NUMBERS = Path(__file__).parents[2] / "shared" / "spec" / "paper_numbers.md"
B32, B16 = paper_values.BACKBONES


@pytest.mark.skipif(not NUMBERS.is_file(), reason="the text of the paper's tables is not beside this repository")
def test_the_shipped_numbers_are_those_of_the_text() -> None:
    """Every cell of the text is in the data file, and no other."""
    text, cells = NUMBERS.read_text(encoding="utf-8"), 0
    short = {title: name for name, title in DATASETS.items()}
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
        sets = [name.removesuffix(" B32") for name in header if name.endswith("B32")]
        assert tuple(row[0] for row in rows) == ROWS
        for name, *values in rows:
            for place, value in enumerate(values):
                assert printed_accuracy(short[sets[place // 2]], (B32, B16)[place % 2], name) == float(value)
                cells += 1
    assert cells == len(ROWS) * len(DATASETS) * 2
    ablation = re.findall(r"([a-z ]+) ([\d.]+) ± ([\d.]+) / ([\d.]+) ± (\d\.\d)", text)
    assert len(ablation) == 3
    for name, *numbers in ablation:
        pacs, spread, organs, other = map(float, numbers)
        assert printed_ablation("pacs", name.strip()) == (pacs, spread)
        assert printed_ablation("organs", name.strip()) == (organs, other)
    assert f"PACS {paper_values.SECONDS:g} s on one A100, {paper_values.GIGABYTES:g} GB" in text


def test_every_row_of_the_paper_has_a_method() -> None:
    assert set(FOLDERS) == set(DATASETS)
    for preset in set(PRESETS.values()):
        rows = rows_of_preset(preset)
        assert list(rows.values())[: len(ROW_NAMES[preset])] == list(ROW_NAMES[preset])
    methods = {row: variant.method for variant, row in rows_of_preset("paper-table1").items()}
    assert methods["DiWA"] == "mean"
    assert methods["RegMean++"] == "regmean_pp"
    ablation = {row: str(variant) for variant, row in rows_of_preset("paper-table3").items()}
    assert ablation["entropy only"] == "entropy_adaptive(head=shared)"
    assert ablation["decoupled head only"] == "entropy_adaptive(encoder=uniform)"


def test_data_sets_are_found_by_any_spelling_and_the_others_are_named(tmp_path: Path) -> None:
    file_source_of("pacs").write_standin(tmp_path / "PACS")
    file_source_of("office_home").write_standin(tmp_path / "OfficeHome")
    (tmp_path / "VLCS").mkdir()
    places = {place.name: place for place in find_datasets(tmp_path, tuple(DATASETS))}
    assert {name for name, place in places.items() if place.root} == {"pacs", "office_home"}
    assert places["pacs"].images == 112
    assert len(places["pacs"].domains) == 4
    assert "zenodo" in places["midog"].problem
    assert "VLCS cannot be used" in places["vlcs"].problem


def test_one_data_set_from_pictures_to_the_page(tmp_path: Path) -> None:
    """The main comparison on one stand-in; a second call repeats no run."""
    words = ("reproduce", "--smoke", "--only", "table2", "--sets", "pacs", "--backbones", B32, "--jobs", "1")
    words = (*words, "--steps", "3", "--settings", "one")
    first = command(*words, "--out", str(tmp_path))
    assert first.returncode == 0, first.stderr
    assert f"{B32}: 4 fits to train, about 1 min" in first.stdout
    assert "PACS: 112 images of 4 domains" in first.stdout
    record = json.loads((tmp_path / "reproduction.json").read_text())
    assert [row["row"] for row in record["rows"]] == list(ROWS)
    page = (tmp_path / "reproduction.html").read_text()
    for text in (
        "RegMean++",
        "86.15",
        "None of these numbers means anything",
        "Not asked for (--sets): MIDOG",
        "--steps 3",
        "“gain over the mean”: ",
    ):
        assert text in page
    shown = ReproductionRecord.load(tmp_path / "reproduction.json")
    assert [(each.title, each.columns) for each in main_tables(shown)] == [
        ("Table 2: natural data sets", ("method", "PACS"))
    ]
    assert len(summary(shown)) == 3
    others = tuple(replace(row, network="resnet50") for row in shown.rows)  # with which the paper has no number
    (sentence,) = summary(replace(shown, backbones=("resnet50",), rows=others))
    assert "of 1 measured columns" in sentence
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/run.json")}
    again = command(*words, "--out", str(tmp_path))
    assert "0 fits to train (4 are done)" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/run.json")} == times


@pytest.mark.parametrize(
    ("device", "gpus", "expected"), [("auto", 1, 1), ("auto", 0, 8), ("cpu", 1, 8), ("cuda", 2, 2)]
)
def test_the_estimate_trains_one_fit_per_gpu(
    device: str, gpus: int, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = DatasetPlace("pacs", str(tmp_path), ("photo", "sketch"), 4)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    words = {"smoke": False, "init": "random", "jobs": 8, "device": device}
    request = ReproductionRequest(tmp_path, (place,), ("table1",), (B32,), **words)
    monkeypatch.setattr(hours, "_remaining", lambda *_: (4, 0, 8 * 3600, 8 * 3600))
    monkeypatch.setattr(hours, "_seconds_per_image", lambda *_: (1.0, 1.0))
    (estimate,) = hours.estimate_hours(request)
    assert (8 / estimate.training, 8 / estimate.benchmark) == (expected, 8)


def test_a_stored_landscape_of_other_images_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("reproduce", "--smoke", "--only", "fig3", "--backbones", B32, "--jobs", "1", "--steps", "1")
    assert command(*words, "--settings", "one", "--out", str(tmp_path)).returncode == 0
    (place,) = find_datasets(tmp_path / "standins", ("pacs",))
    request = ReproductionRequest(tmp_path.resolve(), (place,), ("fig3",), (B32,), smoke=True, init="random")
    file = tmp_path / "fig3" / "landscape.json"
    before = file.stat().st_mtime_ns
    assert measure_landscape_of(request, place, quiet, "again").images == SMOKE.landscape_images
    assert file.stat().st_mtime_ns == before
    monkeypatch.setattr(reproduction_plan, "SMOKE", replace(SMOKE, landscape_images=12))
    assert measure_landscape_of(request, place, quiet, "fewer images").images == 12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--smoke", "--only", "table9"), "table9"),
        (("--smoke", "--sets", "imagenet"), "imagenet"),
        (("--smoke", "--only", "fig2", "--sets", "midog"), "needs one of pacs"),
        ((), "Give --data"),
        (("--data", "nowhere"), "is no folder"),
        (("--smoke", "--jobs", "0"), "'jobs' is a whole number of at least 1"),
        (("--smoke", "--device", "tpu"), "'tpu' is not a choice for 'device'"),
        (("--smoke", "--engine", "slurm"), "'slurm' is not a choice for 'engine'"),
        (("--smoke", "--seeds", "0,0"), "each training seed once"),
        (("--smoke", "--backbones", f"{B32},{B32}"), "each backbone once"),
        (("--smoke", "--init", f"{B32}=nowhere.safetensors"), "nowhere.safetensors is no file"),
    ],
)
def test_wrong_words_are_refused(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    result = command("reproduce", "--out", str(tmp_path / "out"), *words)
    assert result.returncode == 2
    assert message in result.stderr
    assert "fits to train" not in result.stdout  # refused at once


def test_an_empty_folder_names_every_source(tmp_path: Path) -> None:
    result = command("reproduce", "--data", str(tmp_path), "--out", str(tmp_path / "out"))
    assert result.returncode == 2
    assert result.stdout.count("Get it from") == len(DATASETS)


@pytest.mark.slow
def test_a_cluster_measures_what_one_machine_does(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs mergestream[ray]")
    words = ("reproduce", "--smoke", "--only", "table1", "--sets", "pacs,vlcs", "--backbones", B32, "--jobs", "1")
    measured = []
    for engine in ("local", "ray"):
        options = ("--steps", "2", "--settings", "one", "--engine", engine, "--out", str(tmp_path / engine))
        result = process(*words, *options)
        assert result.returncode == 0, result.stderr
        measured.append(ReproductionRecord.load(tmp_path / engine / "reproduction.json"))
    local, cluster = measured
    assert [row.runs for row in cluster.rows] == [row.runs for row in local.rows]
    assert [row.accuracy for row in cluster.rows] == [row.accuracy for row in local.rows]


@pytest.mark.slow
def test_the_whole_rehearsal(tmp_path: Path) -> None:
    """All nine stand-ins, both backbones: no table lacks a row or a number, and LaTeX accepts all of them."""
    result = process("reproduce", "--smoke", "--out", str(tmp_path), "--jobs", "2")
    assert result.returncode == 0, result.stderr
    assert "fits to train" in result.stdout
    record = ReproductionRecord.load(tmp_path / "reproduction.json")
    for dataset, network, row in product(DATASETS, (B32, B16), ROWS):
        assert record.find("table1", dataset, network, row), (dataset, network, row)
    for dataset, row in product(("pacs", "organs"), (*ABLATION_ROWS, "DiWA")):
        assert record.find("table3", dataset, B32, row)
    assert len(record.of_part("fig4")) == 2 * 4 * len(ROWS)
    assert [row.row for row in record.of_part("cost")] == list(ROWS)
    assert len(record.of_part("sweep")) == 2 * 2 * len(rows_of_preset("paper-sweep"))
    assert len(record.theory) == 2 * len(DATASETS)
    assert len(error_table(record).rows) == 2 * len(DATASETS)
    tables = [
        *main_tables(record),
        *dataset_tables(record),
        ablation_table(record),
        skew_table(record),
        sweep_table(record),
    ]
    assert len(tables) == 2 + 9 + 3
    assert [table.title for table in tables if len(table.rows) < len(ROWS)] == ["Table 3: ablation under class skew"]
    for table in tables:
        for row in table.rows:
            without = [column for column, cell in zip(table.columns, row, strict=True) if cell == "–"]
            assert [column for column in without if not column.endswith((PAPER, DIFFERENCE))] == [], (
                table.title,
                row[0],
            )
    assert len(list((tmp_path / "figures").glob("*.pdf"))) == 2 + 1 + 2 + 3
    assert left_out(record) == list(SILENT.values())
    page = (tmp_path / "reproduction.html").read_text()
    for title in ("Figure 2", "Figure 3", "Figure 4", "Figure 5", "Cost", "Theory"):
        assert f'<h2 id="{title.lower().replace(" ", "-")}-title">{title}</h2>' in page
    compile_latex(tmp_path / "tables")


def compile_latex(folder: Path) -> None:
    if shutil.which("pdflatex") is None:
        pytest.skip("pdflatex is not installed: scripts/install_service_tools.sh")
    words = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "tables.tex"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    assert (folder / "tables.pdf").stat().st_size > 10_000
    assert [line for line in done.stdout.splitlines() if "Overfull" in line or "too large" in line] == []
