"""Records to pages: every table and verdict by name, put between the markers of a page or written as one."""

import re
from collections.abc import Sequence
from pathlib import Path

from mergestream.bench.study import study_tables as tables
from mergestream.bench.study.results_plan import METRICS
from mergestream.bench.study.study_bars import all_bars
from mergestream.bench.study.study_record import Group, read_records
from mergestream.runtime.errors import InputError, unknown_name
from mergestream.runtime.files import write_text


def write_pages(records: Sequence[Path], page: Path, *, allow_tries: bool = False) -> None:
    """Replace the marked blocks of a page; a page that does not exist is written with all of them."""
    blocks = all_blocks(read_records(records, allow_tries=allow_tries))
    if page.exists() and "<!-- real:begin " in (text := page.read_text(encoding="utf-8")):
        write_text(page, with_blocks(text, blocks, page))
    else:
        write_text(page, "\n".join(f"## {name}\n\n{text}" for name, text in blocks.items()))


def all_blocks(groups: Sequence[Group]) -> dict[str, str]:
    """Every block by name, of first runs; those of later ones as later-NAME."""
    runs = runs_of(groups)
    return {
        name if run == "first" else f"{run}-{name}": text
        for run, own in runs.items()
        for name, text in _blocks(own).items()
    }


def runs_of(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Groups of the first run with later rows beside them, and those of later runs alone."""
    late = [{**group, "later": False, "only_later": True} for group in groups if group["later"]]
    first = list(groups) if any(not group["later"] for group in groups if "ours" in group) else late
    return {"first": first} | ({"later": late} if late else {})


def _blocks(groups: Sequence[Group]) -> dict[str, str]:
    blocks = {
        "summary": tables.summary_table(groups),
        "bars": _bars(groups),
        "pacs": tables.main_table(groups, "pacs"),
        "midog": tables.main_table(groups, "midog"),
        "differences": tables.differences_table(groups),
    }
    for dataset in METRICS:
        blocks |= {
            f"streams-{dataset}": tables.streams_table(groups, "streams", dataset),
            f"batches-{dataset}": tables.streams_table(groups, "batches", dataset),
            f"ablation-{dataset}": tables.ablation_table(groups, dataset),
        }
    return blocks | {
        "costs": tables.costs_table(groups),
        "hostile": tables.hostile_table(groups),
        "collapses": tables.collapses_table(groups),
        "times": tables.times_table(groups),
    }


def _bars(groups: Sequence[Group]) -> str:
    """One line per bar, and how many hold."""
    bars = all_bars(groups)
    counts = [sum(bar.holds is state for bar in bars) for state in (True, False, None)]
    head = f"{counts[0]} of {len(bars)} bars hold, {counts[1]} do not, {counts[2]} were not measured."
    if any(group.get("only_later") for group in groups):
        head += " All rows are of a **later run**: the rule had been run on these data before."
    return head + "\n\n" + "\n".join(f"- {bar.sentence}" for bar in bars) + "\n"


def with_blocks(text: str, blocks: dict[str, str], page: Path) -> str:
    """The text with every marked block replaced."""
    for name in re.findall(r"<!-- real:begin (\S+) -->", text):
        if name not in blocks:
            raise unknown_name(f"block in {page.name}", name, blocks)
        begin, end = f"<!-- real:begin {name} -->", f"<!-- real:end {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
            raise InputError(f"{page}: the block '{name}' must begin and end once.")
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{blocks[name].rstrip()}\n{end}{rest.split(end)[1]}"
    return text
