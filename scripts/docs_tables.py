"""Rewrite the marked blocks of the result pages from the committed records: python3 scripts/docs_tables.py."""

from pathlib import Path

from mergestream.bench.study.study_pages import write_pages

ROOT = Path(__file__).parents[1]
RECORDS = ROOT / "benchmarks" / "results" / "real"
PAGES = ("docs/results.md", "docs/results-first-run.md", "README.md")

if __name__ == "__main__":
    for page in PAGES:
        write_pages(sorted(RECORDS.glob("*.json")), ROOT / page)
