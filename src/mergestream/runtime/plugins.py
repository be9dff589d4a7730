"""Plugins: modules and files that register methods or data sets, here and in worker processes; their provenance."""

import hashlib
import importlib
import importlib.util
import sys
import uuid
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from mergestream.runtime.errors import InputError

MAIN = ("__main__", "__mp_main__")  # the second is the first's name in a worker process
BY_FILE = (*MAIN, "plugin_")  # how names of modules begin that can only be imported by their file
_registering: dict[str, None] = {}  # modules that registered something, in order
_loaded: set[str] = set()


def note_registration() -> None:
    """Remember the module that registers something: worker processes import it too."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals["__name__"].partition(".")[0] == "mergestream":
        frame = frame.f_back
    _registering[frame.f_globals["__name__"]] = None


def load_plugins(references: Iterable[str], *, must_register: bool = True) -> None:
    """Import modules by name, or .py files by path, each once. What they register can then be named."""
    for reference in references:
        reference = str(Path(reference).resolve()) if reference.endswith(".py") else reference
        if reference in _loaded:
            continue
        if reference.endswith(".py") and not Path(reference).is_file():
            raise InputError(f"There is no plugin file {reference}.")
        before = len(_registering)
        try:
            module = _import_file(Path(reference)) if reference.endswith(".py") else importlib.import_module(reference)
        except (Exception, SystemExit) as error:  # whatever code of somebody else raises
            raise InputError(f"The plugin '{reference}' cannot be loaded. {type(error).__name__}: {error}") from error
        if must_register and len(_registering) == before and module.__name__ not in _registering:
            raise InputError(f"The plugin '{reference}' registers nothing: put @mergestream.register_method in it.")
        _loaded.add(reference)


def _import_file(path: Path) -> ModuleType:
    name = f"plugin_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(specification)  # dataclasses look it up there
    specification.loader.exec_module(module)
    return module


def plugins_for_workers(*, with_script: bool) -> tuple[str, ...]:
    """What a worker has to load to know the same names. A spawned process imports the running script by itself."""
    names = [name for name in _registering if with_script or name not in MAIN]
    return tuple(str(file_of(name)) if name.startswith(BY_FILE) else name for name in names)


def file_of(module: str) -> Path | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return None if file is None else Path(file).resolve()


def place_of(item: Any) -> str:
    """File, or module, and name of a class or function: the same for a definition that is run again."""
    return f"{file_of(item.__module__) or item.__module__}:{item.__qualname__}"


@cache
def plugin_provenance(kind: type) -> dict[str, str] | None:
    """Package, version and source hash of a class that is not mergestream's; None for our own.

    The hash is over every .py file of the package, or the one file of a script. A class that was typed in has no file:
    its hash is another one in every process, so that no earlier run passes for one of it.
    """
    ours = {"mergestream", "torch", *sys.stdlib_module_names} - {*MAIN}
    modules = [each.__module__ for each in kind.__mro__ if each.__module__.partition(".")[0] not in ours]
    if not modules:
        return None
    digest = hashlib.sha256()
    for top in dict.fromkeys(module.partition(".")[0] for module in modules):
        folders, alone = getattr(sys.modules.get(top), "__path__", ()), file_of(top)
        files = sorted(path for folder in folders for path in Path(folder).rglob("*.py")) or ([alone] if alone else [])
        for path in files:
            digest.update(path.name.encode() + path.read_bytes() + b"\0")
        digest.update(b"" if files else uuid.uuid4().bytes)
    top, file = modules[0].partition(".")[0], file_of(modules[0])
    package = file.stem if top.startswith(BY_FILE) and file is not None else top
    try:
        version = {"version": metadata.version(package)}
    except metadata.PackageNotFoundError:
        version = {}
    return {"package": package, **version, "source": digest.hexdigest()}
