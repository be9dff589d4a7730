"""The notebooks of examples/notebooks: committed with their outputs, and they run."""

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
PACS = Path(os.environ.get("MERGESTREAM_PACS", ROOT.parent / "shared" / "data" / "pacs-128.zip"))


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["drifting_stream", "own_checkpoints", "pacs_leave_one_out"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_shown_small_and_of_no_machine(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is in the dev extra")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < 150_000
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    outputs = [output for cell in cells for output in cell.outputs]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))  # run once, from top to bottom
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    text = "".join(output.get("text", "") for output in outputs)
    assert text
    assert not re.search(r"/(home|root|tmp|work)/", text)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is in the dev extra")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is in the dev extra")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("MERGESTREAM_PACS", raising=False)
    if path.stem.startswith("pacs") and PACS.exists():
        monkeypatch.setenv("MERGESTREAM_PACS", str(PACS))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    text = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    if path.stem.startswith("pacs") and not PACS.exists():
        assert "Skipped: MERGESTREAM_PACS is not set" in text
        pytest.skip(f"only its first cell ran: there is no {PACS}")
    assert "%" in text or "share of" in text
