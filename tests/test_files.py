"""Files on disk: whole or not at all, with the mode that the user's umask gives."""

import os
import stat
import threading
from pathlib import Path

import pytest

from mergestream.runtime import files
from mergestream.runtime.errors import OutputError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_modes_follow_the_umask_which_nobody_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int, file: int, folder: int
) -> None:
    """Threads of a service write files while others create theirs: the umask is one for all of them."""
    before = os.umask(umask)
    try:
        calls: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", lambda mask: calls.append(mask) or umask)
            ended, created = threading.Event(), []

            def create_files() -> None:
                while not ended.is_set() or not created:
                    created.append(tmp_path / f"other-{len(created)}")
                    created[-1].touch()

            def write_files(thread: int) -> None:
                for number in range(30):
                    files.write_text(tmp_path / f"{thread}-{number}.json", "{}")
                with files.atomic_folder(tmp_path / f"folder-{thread}", lambda _: True) as scratch:
                    (scratch / "a").write_text("a")

            writers = [threading.Thread(target=write_files, args=(thread,)) for thread in range(4)]
            creator = threading.Thread(target=create_files)
            for thread in (creator, *writers):
                thread.start()
            for thread in writers:
                thread.join()
            ended.set()
            creator.join()
        assert calls == []
    finally:
        os.umask(before)
    written = [*tmp_path.glob("*.json"), *created]
    assert len(written) > 120
    assert {mode(path) for path in written} == {file}
    assert {mode(path) for path in tmp_path.glob("folder-*")} == {folder}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_lock_is_refused_while_another_holds_it(tmp_path: Path) -> None:
    refusal = OutputError("taken")
    handle = files.lock_or_refuse(tmp_path / "lock", refusal)
    with pytest.raises(OutputError, match="taken"):
        files.lock_or_refuse(tmp_path / "lock", refusal)
    os.close(handle)
    os.close(files.lock_or_refuse(tmp_path / "lock", refusal))
    with pytest.raises(OutputError, match="Cannot write"):
        files.lock_or_refuse(tmp_path / "absent" / "lock", refusal)
