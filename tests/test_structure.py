"""The shape of the source: ten rooms, small files, small functions, one meaning per name."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "mergestream"
SOURCES = sorted(PACKAGE.rglob("*.py"))


def lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def test_only_the_ten_rooms_the_contract_and_the_client_are_at_the_top_of_the_package() -> None:
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "client.py"}
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == {
        "bench", "cli", "data", "functional", "methods", "networks", "pool", "runtime", "serving", "testing",
        "training",
    }  # fmt: skip


def test_the_source_grows_no_further() -> None:
    """29,000 lines after the rebuild; then rivals, streams, DICOM, signatures, the engine's process and its kernels."""
    assert sum(map(lines, SOURCES)) <= 44_525


def test_files_are_short() -> None:
    assert {name(path): lines(path) for path in SOURCES if lines(path) > 300} == {}


def test_functions_are_short() -> None:
    """But commands, whose signatures are long."""
    long = {
        f"{name(path)}:{node.name}": node.end_lineno - node.lineno + 1
        for path in SOURCES
        if path.parent.name != "cli"
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno + 1 > 60
    }
    assert long == {}


def test_no_two_classes_share_a_name() -> None:
    classes = Counter(node.name for path in SOURCES for node in nodes(path) if isinstance(node, ast.ClassDef))
    assert {name: count for name, count in classes.items() if count > 1} == {}
