"""A data set's root: a folder or a zip, and all zips inside. Read only; inner paths are posix and relative."""

import io
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from mergestream.runtime.errors import DataError, MissingPathError
from mergestream.runtime.files import error_text

JUNK = {"__macosx", "thumbs.db", "desktop.ini"}
DEEPEST = 12  # folders; stops a link that points upwards
IMAGES = frozenset({".bmp", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"})


class Root:
    """All files under a root, in folders and in zips."""

    def __init__(self, path: str | Path) -> None:
        self.location = Path(path)
        if not self.location.exists():
            raise MissingPathError(f"There is nothing at {self.location}. Give the data set's folder or zip.")
        self._zips: dict[str, zipfile.ZipFile] = {}
        self._entries: dict[str, tuple[str | None, str, int, int]] = {}  # path -> (zip, member or file, size, stamp)
        self._folders: set[str] = set()  # all of them, empty ones included
        if self.location.is_dir():
            self._list_folder()
        else:
            self._list_zip(self.location, "")

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Every file, sorted."""
        return tuple(sorted(self._entries))

    @cached_property
    def images(self) -> tuple[str, ...]:
        return tuple(path for path in self.files if PurePosixPath(path).suffix.lower() in IMAGES)

    @cached_property
    def folders(self) -> tuple[str, ...]:
        """Every folder with files, '' for the root itself, shallow ones first."""
        parents = {str(parent) for path in self.files for parent in PurePosixPath(path).parents}
        return tuple(sorted(("" if f == "." else f for f in parents), key=lambda f: (f.count("/") + bool(f), f)))

    @cached_property
    def empty_folders(self) -> tuple[str, ...]:
        """Folders without any file, at any depth."""
        return tuple(sorted(self._folders - set(self.folders)))

    def read(self, path: str, first: int = -1) -> bytes:
        """Read a file's bytes, or only the first ones; the error names the file."""
        if path not in self._entries:
            raise DataError(f"{self.location} has no file {path}.")
        archive, member, _, _ = self._entries[path]
        try:
            with Path(member).open("rb") if archive is None else self._zips[archive].open(member) as file:
                return file.read(first)
        except Exception as error:  # zip files raise many kinds
            raise DataError(f"Cannot read {path} in {self.location}: {error_text(error)}.") from error

    def open(self, path: str) -> BinaryIO:
        """Open a file to read parts of it: an array of gigabytes may be one file."""
        if path not in self._entries or self._entries[path][0] is not None:
            return io.BytesIO(self.read(path))
        try:
            return Path(self._entries[path][1]).open("rb")
        except OSError as error:
            raise DataError(f"Cannot read {path} in {self.location}: {error_text(error)}.") from error

    def stamp(self, path: str) -> tuple[int, int]:
        """Size, and time of change or checksum: enough to notice a changed file."""
        return self._entries[path][2:]

    def under(self, folder: str) -> list[str]:
        """All files in a folder and below."""
        return [path for path in self.files if not folder or path.startswith(f"{folder}/")]

    def named(self, name: str) -> list[str]:
        """Files with this name in any folder, ignoring case."""
        return [path for path in self.files if PurePosixPath(path).name.lower() == name.lower()]

    def one(self, name: str) -> str:
        """The only file with this name; several or none is an error."""
        matches = self.named(name)
        if len(matches) != 1:
            several = f"{len(matches)} files of that name: {', '.join(matches[:3])}"
            contents = several if matches else f"it holds {self.glance()}"
            raise DataError(f"{self.location} should hold {name} once; {contents}.")
        return matches[0]

    def children(self, folder: str) -> dict[str, str]:
        """The folders directly inside a folder: name -> path."""
        depth = folder.count("/") + 1 if folder else 0
        start = f"{folder}/" if folder else ""
        return {PurePosixPath(f).name: f for f in self.folders if f and f.startswith(start) and f.count("/") == depth}

    def refused(self, dataset: str, expected: str, contents: str = "") -> DataError:
        """The error of a root that lacks what a data set consists of; it says what is there instead."""
        contents = contents or f"it holds {self.glance()}"
        return DataError(f"{self.location} is not a root of '{dataset}': it should hold {expected}; {contents}.")

    def glance(self) -> str:
        """The first few entries, to show in an error what is there instead."""
        top = list(dict.fromkeys(path.split("/")[0] for path in self.files))
        shown = ", ".join(top[:6]) + (", …" if len(top) > 6 else "")
        return shown or "no files"

    def _list_folder(self) -> None:
        for current, folders, names in os.walk(self.location, followlinks=True, onerror=_refuse):
            here = Path(current)
            inside = here.relative_to(self.location)
            self._folders |= {inside.as_posix()} - {"."}
            folders[:] = sorted(f for f in folders if not _is_junk(f)) if len(inside.parts) < DEEPEST else []
            for name in sorted(names):
                path = here / name
                if _is_junk(name) or not path.is_file():
                    continue
                # An archive that is unpacked next to itself counts once.
                if path.suffix.lower() == ".zip" and path.stem not in folders:
                    self._list_zip(path, (inside / path.stem).as_posix())
                else:
                    status = path.stat()
                    self._add((inside / name).as_posix(), None, str(path), status.st_size, status.st_mtime_ns)

    def _list_zip(self, path: Path, prefix: str) -> None:
        try:
            archive = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile) as error:
            raise DataError(f"{path} is neither a folder nor a readable zip: {error_text(error)}.") from error
        self._list_members(str(path), archive, PurePosixPath(prefix))

    def _list_members(self, name: str, archive: zipfile.ZipFile, prefix: PurePosixPath) -> None:
        self._zips[name] = archive
        members = [(PurePosixPath(m.filename.replace("\\", "/").lstrip("/")), m) for m in archive.infolist()]
        named = [path for path, m in members if m.is_dir() and path.parts and not any(map(_is_junk, path.parts))]
        self._folders |= {str(prefix / path) for path in named}
        folders = {parent for path, _ in members for parent in path.parents}
        for path, member in members:
            if member.is_dir() or not path.parts or any(map(_is_junk, path.parts)) or ".." in path.parts:
                continue
            zipped = path.suffix.lower() == ".zip" and len(prefix.parts) < DEEPEST
            if zipped and path.with_suffix("") not in folders:
                self._list_members(f"{name}/{path}", _inner_zip(archive, member), prefix / path.with_suffix(""))
            else:
                self._add(str(prefix / path), name, member.filename, member.file_size, member.CRC)

    def _add(self, path: str, archive: str | None, member: str, size: int, stamp: int) -> None:
        try:
            path.encode()
        except UnicodeEncodeError:
            shown = path.encode(errors="backslashreplace").decode()
            raise DataError(f"{self.location} holds a name that is not UTF-8: {shown}. Rename it.") from None
        if path in self._entries:
            raise DataError(f"{self.location} holds two files called {path}. Remove one of them.")
        self._entries[path] = (archive, member, size, stamp)


def by_stem(paths: Iterable[str]) -> dict[str, str]:
    """Files by lower-case name without folder and ending; two with one stem are an error."""
    paths_by_stem: dict[str, str] = {}
    for path in paths:
        stem = PurePosixPath(path).stem.lower()
        if stem in paths_by_stem:
            raise DataError(f"Two images have the id '{stem}': {paths_by_stem[stem]} and {path}. Keep one of them.")
        paths_by_stem[stem] = path
    return paths_by_stem


def _inner_zip(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> zipfile.ZipFile:
    """Copy a zip inside a zip to a temporary file, since random access would unpack it again and again."""
    try:
        copy = tempfile.TemporaryFile()  # noqa: SIM115
        with archive.open(member) as inner:
            shutil.copyfileobj(inner, copy)
        return zipfile.ZipFile(copy)
    except (OSError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError) as error:
        raise DataError(f"{member.filename} in {archive.filename} is not a readable zip: {error}.") from error


def _refuse(error: OSError) -> None:
    raise DataError(f"Cannot look into {error.filename}: {error_text(error)}.") from error


def _is_junk(name: str) -> bool:
    return name.startswith(".") or name.lower() in JUNK
