"""The documents stay short: words as `wc -w` counts them, the log aside."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = {"docs/results.md": 1_500, "docs/speed.md": 900}  # words
IN_ALL = 25_000
README_LINES = 120


def words(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").split())


def test_the_documents_keep_to_their_number_of_words() -> None:
    pages = {path: words(path) for path in (ROOT / "docs").rglob("*.md") if "log" not in path.relative_to(ROOT).parts}
    assert len(pages) > 30
    assert sum(pages.values()) <= IN_ALL
    for page, most in LIMITS.items():
        assert pages[ROOT / page] <= most, page
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_LINES


def test_every_page_is_in_the_sites_index() -> None:
    index = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    names = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert [name for name in names if f" {name}\n" not in index] == []
