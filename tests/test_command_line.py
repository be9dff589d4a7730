"""The command line as a whole: version, help, exit codes, errors, and one real process."""

import sys
from pathlib import Path

import pytest

import mergestream as ms
from benching import command, process
from mergestream.cli.app import main


def test_version_and_help() -> None:
    real = process("--version")  # as a newcomer types it; all other tests run commands in this process
    assert (real.returncode, real.stdout.strip()) == (0, f"mergestream {ms.__version__}")
    text = command("demo", "--help").stdout
    for option in ("--out", "--quick", "--json"):
        assert option in text


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc, where nothing can be written")
def test_wrong_usage_is_2_and_failure_is_1_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("demo", "--quik").returncode == 2
    assert command("dmeo").returncode == 2
    (tmp_path / "file").write_text("in the way")
    assert command("demo", "--quick", "--out", str(tmp_path / "file" / "out")).returncode == 2
    line = ["demo", "--quick", "--out", "/proc/mergestream"]  # where not even root can write
    failed = command(*line)
    assert failed.returncode == 1
    assert failed.stderr.count("\n") == 1
    assert failed.stderr.startswith("mergestream: Cannot write to the folder")
    monkeypatch.setattr(sys, "argv", ["mergestream", "--debug", *line])
    with pytest.raises(SystemExit, match="1"):
        main()
    assert "Traceback" in capsys.readouterr().err
