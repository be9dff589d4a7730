"""Nothing that comes from a log, a card or a file name can act on a terminal or pass for a line of its own."""

import json
import logging
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import mergestream
from benching import write_pool
from mergestream.bench.report.result_table import ResultTable
from mergestream.cli import terminal
from mergestream.cli.app import main
from mergestream.serving.audit.lines import BEGINNING, canonical, seal

SCREEN = "\x1b[2J\x1b[1;1HSound: 12 lines.\x07"
HOSTILE = f"a{SCREEN}\r\n\u202eSound\u2028b\x9b2J\ud800\U000e0001"
SHOWN = r"a\x1b[2J\x1b[1;1HSound: 12 lines.\x07\x0d\x0a\u202eSound\u2028b\u009b2J\ud800\udb40\udc01"
ACTS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[str, str, Any]:
    """A command as `mergestream` runs it: stdout, stderr and exit code."""
    monkeypatch.setattr(sys, "argv", ["mergestream", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    out, err = capsys.readouterr()
    for text in (out, err):
        assert not ACTS.search(text), repr(text)
        assert not [line for line in text.split("\n") if line.startswith("Sound")], text
    return out, err, end.value.code


def test_characters_that_act_are_shown_as_escapes() -> None:
    from mergestream.runtime.messages import printable

    assert printable(HOSTILE) == SHOWN
    assert printable("Émile\u00a0Müller, 東京 ✓ 'a\\b'") == "Émile\u00a0Müller, 東京 ✓ 'a\\b'"
    whole = json.dumps({HOSTILE: [HOSTILE]}, ensure_ascii=False, indent=2)
    assert json.loads("\n".join(map(printable, whole.split("\n")))) == json.loads(whole)


def test_audit_verify_shows_a_hostile_log_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text of lines that nobody has verified is in the problems and notes of a report."""
    log = tmp_path / "audit.jsonl"
    body = {"torn_bytes": SCREEN, "torn_sha256": f"\n{SCREEN}"}
    first, link = seal("recovered", canonical(body), BEGINNING, None)
    second, _ = seal("step", canonical({}), link, None)
    changed = canonical({**json.loads(second), "key": f"ed25519:{SCREEN}", "signature": HOSTILE})
    log.write_text(f"{first}\n{changed}\n")
    out, _, code = run(capsys, monkeypatch, "audit", "verify", str(log))
    assert code == 1
    assert r"a torn end of \x1b[2J" in out
    assert out.endswith("NOT sound: 2 problem(s).\n")
    out, _, _ = run(capsys, monkeypatch, "audit", "verify", str(log), "--json")
    assert json.loads(out)["sound"] is False
    log.write_text(f"{canonical({**json.loads(first), 'schema_version': SCREEN})}\n")
    out, err, _ = run(capsys, monkeypatch, "audit", "head", str(log))
    assert "schema_version" in err


def test_a_pool_card_is_shown_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = tmp_path / "pool"
    write_pool(pool)
    card = pool / "lyon" / "expert.json"
    card.write_text(json.dumps({**json.loads(card.read_text()), "domain": f"Lyon{SCREEN}"}))
    out, err, _ = run(capsys, monkeypatch, "pool", "list", str(pool))
    assert r"Lyon\x1b[2J" in out + err
    out, err, _ = run(capsys, monkeypatch, "pool", "list", str(pool), "--json")
    assert not out or json.loads(out)


def test_a_file_name_is_shown_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"audit\n{SCREEN}"
    for arguments in (("audit", "verify", str(folder)), ("pool", "list", str(folder)), ("report", str(folder))):
        _, err, code = run(capsys, monkeypatch, *arguments)
        assert code == 2
        assert r"audit\x0a\x1b[2J" in err.replace("\n", "")
    _, err, _ = run(capsys, monkeypatch, "--debug", "pool", "list", str(folder))
    assert "Traceback" in err
    folder.mkdir()
    (folder / "audit.jsonl").write_text("x\n")
    (folder / f"audit.jsonl{SCREEN}").write_text("x\n")
    run(capsys, monkeypatch, "audit", "verify", str(folder / f"audit.jsonl{SCREEN}"))
    shutil.rmtree(folder)


@pytest.mark.parametrize("arguments", [("audit", SCREEN), ("bench", f"--{SCREEN}"), (f"{SCREEN}",)])
def test_wrong_usage_is_quoted_as_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    _, err, code = run(capsys, monkeypatch, *arguments)
    assert code == 2
    assert r"\x1b" in err


def test_tables_progress_and_log_lines_are_text(monkeypatch: pytest.MonkeyPatch) -> None:
    from mergestream.runtime.messages import PrintableFormatter

    console = Console(record=True, width=300, force_terminal=False)
    monkeypatch.setattr(terminal, "Console", lambda **_: console)
    table = ResultTable(SCREEN, ("method", SCREEN), [[SCREEN, SCREEN]], note=SCREEN)
    terminal.show([table], [HOSTILE], {"file": Path(SCREEN)})
    with terminal.progress()(SCREEN, 1) as advance:
        advance(note=SCREEN)
    assert not ACTS.search(console.export_text())
    record = logging.LogRecord("name", logging.WARNING, "", 0, "left out: %s", (HOSTILE,), None)
    assert PrintableFormatter("%(message)s").format(record).split("\n") == [
        r"left out: a\x1b[2J\x1b[1;1HSound: 12 lines.\x07\x0d",
        "    " + SHOWN.partition(r"\x0a")[2],
    ]


def test_commands_print_through_one_door() -> None:
    """Every command's output goes through `cli/terminal.py`."""
    folder = Path(mergestream.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        if file.name != "terminal.py":
            assert not re.search(r"typer\.echo|click\.echo|(?<![\w.])print\(", file.read_text(encoding="utf-8")), file
