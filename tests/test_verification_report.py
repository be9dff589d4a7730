"""`data verify --report`: what a user can paste into an issue, and what each loader was checked against."""

from pathlib import Path

import pytest

from benching import command
from mergestream.data.datasets import DATASETS
from mergestream.data.datasets.dataset_sources import FileSource, verify
from mergestream.data.datasets.index import CARDS
from mergestream.data.datasets.standins.drawing import SITES, write_table
from mergestream.data.datasets.verification_report import report_lines

CHECKED = ("real files", "public loader code", "documented layout")
PUBLISHED = [
    name for name, source in DATASETS.items() if isinstance(source, FileSource) and CARDS[name].licence != "yours"
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_set_says_what_its_loader_was_checked_against(name: str) -> None:
    assert CARDS[name].verified in CHECKED
    assert CARDS[name].verified_note.endswith(".")


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_report_has_counts_and_sizes_and_names_no_file(name: str, tmp_path: Path) -> None:
    source = DATASETS[name]
    source.write_standin(tmp_path)
    result = verify(source, tmp_path)
    text = "\n".join(report_lines(result))
    for domain, counts in result.index.counts().items():
        row = next(line for line in text.splitlines() if line.startswith(f"| {domain} |"))
        assert row.split("|")[3:-1] == [f" {number} " for number in (sum(counts.values()), *counts.values())]
    assert "mergestream " in text
    assert CARDS[name].verified in text
    assert str(tmp_path) not in text
    about = text.replace(CARDS[name].verified_note, "")
    stems = {Path(sample.file).stem for sample in result.index.samples}
    stems |= {Path(each.what).stem for each in result.index.left_out}
    assert [stem for stem in stems if len(stem) > 5 and stem in about] == []
    groups = {sample.group for sample in result.index.samples if sample.group and len(sample.group) > 3}
    assert [group for group in groups if f" {group} " in about] == []


def test_the_command_writes_it_and_numbers_the_sites_of_ones_own_data(tmp_path: Path) -> None:
    write_table(tmp_path / "data")
    broken = next((tmp_path / "data").rglob("*.png"))
    broken.write_bytes(b"no picture")
    out = tmp_path / "report.md"
    done = command("data", "verify", "table", str(tmp_path / "data"), "--report", str(out))
    text = out.read_text()
    assert done.returncode == 1
    assert "NOT complete" in text
    assert "unreadable 1" in text
    assert broken.stem not in text
    assert "| domain 1 |" in text
    assert not any(site in text for site in SITES)


def test_data_list_shows_it() -> None:
    text = command("data", "list").stdout
    assert text.count("loader checked against:") == len(PUBLISHED)


def test_a_copy_that_the_loader_refuses_gets_a_report_too(tmp_path: Path) -> None:
    """Which folders hold how many files: what a loader that never met the real files has to learn."""
    (tmp_path / "copy" / "Caltech101" / "bird").mkdir(parents=True)
    (tmp_path / "copy" / "Caltech101" / "bird" / "img_77.jpg").write_bytes(b"picture")
    out = tmp_path / "report.md"
    done = command("data", "verify", "vlcs", str(tmp_path / "copy"), "--report", str(out))
    text = out.read_text()
    assert done.returncode == 1
    assert "it should hold the folders" in done.stderr
    for line in ("### `data verify vlcs`: refused", "- Caltech101/bird: 1 files", "- kinds: .jpg (1)"):
        assert line in text
    assert "img_77" not in text
    assert str(tmp_path) not in text
    (tmp_path / "copy" / "table.csv").write_text("nothing\n")
    command("data", "verify", "table", str(tmp_path / "copy"), "--report", str(out))
    assert "refused" in out.read_text()
    assert "Caltech101" not in out.read_text()
