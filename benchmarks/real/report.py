"""Records -> tables, sentences and figures: `python3 benchmarks/real/report.py [RECORD ...] --into docs/results.md`.

Every block between <!-- real:begin NAME --> and <!-- real:end NAME --> of the given files is replaced; without --into
all blocks are printed. No number or verdict is typed in anywhere.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import tables
from bars import all_bars
from figures import draw_batch_sizes, draw_differences
from recipes import METRICS, PAPER
from records import Group, read_records

from mergestream.runtime.errors import InputError, MergestreamError, unknown_name
from mergestream.runtime.files import write_text

RESULTS = Path(__file__).parents[1] / "results" / "real"


def main() -> int:
    given = arguments()
    try:
        return report(given)
    except MergestreamError as error:
        print(error, file=sys.stderr)
        return 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="*", help="records; those in benchmarks/results/real")
    parser.add_argument("--into", type=Path, nargs="*", default=[], help="files whose marked blocks are replaced")
    parser.add_argument("--figures", type=Path, help="a folder for the figures")
    parser.add_argument("--ours", help="which rule is ours, where records hold several")
    parser.add_argument("--allow-tries", action="store_true", help="take records of tries, too: to see how it looks")
    return parser.parse_args()


def report(given: argparse.Namespace) -> int:
    paths = given.records or sorted(RESULTS.glob("*.json"))
    if not paths:
        raise InputError(f"There are no records in {RESULTS}. Run benchmarks/real/run.py first.")
    every = read_records(paths, allow_tries=given.allow_tries)
    ours = the_rule(every, given.ours)
    own = [group for group in every if group.get("ours", ours) == ours]
    found = all_blocks(own, ours)
    for path in given.into:
        write_text(path, with_blocks(path.read_text(encoding="utf-8"), found, path))
    if given.figures is not None:
        given.figures.mkdir(parents=True, exist_ok=True)
        for run, groups in runs(own).items():
            draw_batch_sizes(groups, given.figures / f"{run}-batch-sizes.png")
            draw_differences(groups, ours, given.figures / f"{run}-differences.png")
    if not given.into:
        print("\n".join(f"## {name}\n\n{text}" for name, text in found.items()))
    return 0


def the_rule(groups: Sequence[Group], named: str | None) -> str:
    """The method that is called ours: the one named, or the only one that is not the paper's."""
    known = sorted({group["ours"] for group in groups if "ours" in group})
    if named is not None and named not in known:
        raise unknown_name("rule in these records", named, known)
    own = [name for name in known if name != PAPER]
    if named is None and len(own) > 1:
        raise InputError(f"These records hold several rules: {', '.join(own)}. Say which is ours: --ours.")
    return named or (own[0] if own else PAPER)


def reported(groups: Sequence[Group]) -> list[Group]:
    """First runs are reported, later ones beside them. Where there are later ones alone, those, and it is said."""
    if any(not group["later"] for group in groups if "ours" in group):
        return list(groups)
    return [{**group, "later": False, "only_later": True} for group in groups]


def runs(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Groups of 'first' runs (of later ones where there are no others) and, where there are any, of 'later' ones."""
    late = reported([group for group in groups if group["later"]])
    return {"first": reported(groups)} | ({"later": late} if late else {})


def all_blocks(groups: Sequence[Group], ours: str) -> dict[str, str]:
    """Every block by name, of first runs; those of later ones as later-NAME."""
    found = {run: blocks(own, ours) for run, own in runs(groups).items()}
    return found["first"] | {f"later-{name}": text for name, text in found.get("later", {}).items()}


def blocks(groups: Sequence[Group], ours: str) -> dict[str, str]:
    """Every block by name, of one set of runs."""
    found = {
        "summary": tables.summary_table(groups, ours),
        "bars": sentences(groups, ours),
        "pacs": tables.main_table(groups, "pacs", ("plain",)),
        "midog": tables.main_table(groups, "midog", ("weighted", "plain")),
        "differences": tables.differences_table(groups, ours),
    }
    for dataset in METRICS:
        found |= {
            f"streams-{dataset}": tables.streams_table(groups, "streams", dataset),
            f"batches-{dataset}": tables.streams_table(groups, "batches", dataset),
            f"ablation-{dataset}": tables.ablation_table(groups, dataset),
        }
    return found | {
        "costs": tables.costs_table(groups),
        "hostile": tables.hostile_table(groups, ours),
        "collapses": tables.collapses_table(groups),
        "times": tables.times_table(groups),
    }


def sentences(groups: Sequence[Group], ours: str) -> str:
    """A line a bar, and how many hold."""
    bars = all_bars(groups, ours)
    counts = [sum(bar.holds is state for bar in bars) for state in (True, False, None)]
    head = f"{counts[0]} of {len(bars)} bars hold, {counts[1]} do not, {counts[2]} were not measured."
    missing = "" if ours != PAPER else f" No rule of our own was run: bars are those of `{PAPER}`."
    if any(group.get("only_later") for group in groups):
        missing += " All rows are of a **later run**: the rule had been run on these data before."
    return head + missing + "\n\n" + "\n".join(f"- {bar.sentence}" for bar in bars) + "\n"


def with_blocks(text: str, found: dict[str, str], path: Path) -> str:
    """The text with every marked block replaced; a marker without its other half or of no block is refused."""
    for name in re.findall(r"<!-- real:begin (\S+) -->", text):
        if name not in found:
            raise unknown_name(f"block in {path.name}", name, found)
        begin, end = f"<!-- real:begin {name} -->", f"<!-- real:end {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
            raise InputError(f"{path}: the block '{name}' must begin and end once.")
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{found[name].rstrip()}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    sys.exit(main())
