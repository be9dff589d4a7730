"""The documentation site, built as `make docs` does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mergestream as ms

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_site_builds_without_a_broken_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    reference = tmp_path / "site" / "reference"
    pages = {name: (reference / f"{name}.html").read_text() for name in ("python", "commands", "http")}
    headings = re.findall(r'<h2 id="[\w.]*?(\w+)"', pages["python"])  # one each, under its own name
    assert sorted(headings) == sorted(name for name in ms.__all__ if not isinstance(getattr(ms, name), str))
    assert "mergestream train" in pages["commands"]
    assert "--learning-rate" in pages["commands"]
    assert "/v1/streams/{stream}/batches" in pages["http"]
    assert "curl -X POST" in pages["http"]
    assert "audit_unavailable" in pages["http"]
    for name in ("changelog", "contributing"):
        assert (tmp_path / "site" / "project" / f"{name}.html").is_file()
