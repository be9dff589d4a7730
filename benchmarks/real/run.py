"""The evidence of docs/results.md on one GPU, stage by stage: trains the pools, benches them, writes one small record.

    PYTHONPATH=src python3 benchmarks/real/run.py --pacs pacs-128.zip --midog midog25-64.zip --init vit.safetensors \\
        --out work [--stages train,main-pacs] [--minutes 9] [--jobs 8] [--ours 'METHOD(option=value)']

It may be killed and called again: what is done is skipped. Exit code 3 says that --minutes ran out and units are left.
What comes home is OUT/record.json (a few MB); put it into benchmarks/results/real/ and run report.py. On another
machine --have benchmarks/results/real skips what those records hold; pools that the rest needs are trained again from
their seeds, and rows of different pools are never paired.
"""

import argparse
import runpy
import sys
from pathlib import Path

import torch
from limiting import limited
from pools import Place
from recipes import OURS, OURS_ABLATION, PROFILES
from records import Asked, read_records, write_record
from stages import Runner, held_elsewhere, listed
from units import TIMING, TRAIN, Stage, chosen, stages_of

from mergestream.bench.engine.variants import parse_variants
from mergestream.methods import METHODS
from mergestream.runtime.errors import MergestreamError
from mergestream.runtime.files import make_folder

UNFINISHED = 3
RECORD = "record.json"


def main() -> int:
    given = arguments()
    try:
        return benchmark(given)
    except MergestreamError as error:
        print(error, file=sys.stderr)
        return 1


def benchmark(given: argparse.Namespace) -> int:
    profile = PROFILES[given.profile]
    revisions = tuple((name, kind.revision) for name, kind in METHODS.items())
    ours, ablation = method_spec(given.ours), tuple(OURS_ABLATION.items())
    asked = Asked(given.profile, ours, ablation, revisions, given.limit, given.steps)
    every = stages_of(profile)
    roots = {"pacs": given.pacs, "midog": given.midog}
    roots = {name: root.resolve() for name, root in roots.items() if root is not None}
    if given.limit is not None and not given.list:
        roots = {name: limited(name, root, given.limit, given.out / "limited") for name, root in roots.items()}
    place = Place(given.out, tuple(roots.items()), given.init, given.device, profile, given.steps)
    elsewhere = held_elsewhere(read_records(records_in(given.have), allow_tries=asked.is_try), asked, later=given.later)
    runner = Runner(place, asked, lambda line: print(line, flush=True), given.minutes, elsewhere)
    if given.list:
        print("\n".join(listed(runner, every)))
        return 0
    make_folder(given.out)
    about = runpy.run_path(str(Path(__file__).parents[1] / "provenance.py"))["provenance"](given.device)
    for stages in turns(chosen(every, given.stages), given.jobs):
        done = runner.run(stages, 1 if stages[0].kind == TIMING else given.jobs)
        # After every turn: a command that is killed leaves a record of those before.
        write_record(given.out / RECORD, runner.groups(every), asked, {"about": about}, later=given.later)
        if not done:
            break
    print("\n".join(listed(runner, every)))
    print(f"{given.out / RECORD}: {(given.out / RECORD).stat().st_size / 2**20:.2f} MiB")
    return 0 if done else UNFINISHED


def turns(stages: list[Stage], jobs: int) -> list[list[Stage]]:
    """Stages that are run at once: by several processes all but those that take the time of a step."""
    if jobs <= 1:
        return [[stage] for stage in stages]
    training = [stage for stage in stages if stage.kind == TRAIN]
    benching = [stage for stage in stages if stage.kind not in (TRAIN, TIMING)]
    timing = [stage for stage in stages if stage.kind == TIMING]
    return [turn for turn in (training, benching, timing) if turn]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pacs", type=Path, help="pacs-128.zip, or a folder in PACS's layout")
    parser.add_argument("--midog", type=Path, help="midog25-64.zip, or a folder in MIDOG 2025's layout")
    parser.add_argument("--init", help="the encoder's first weights: safetensors, or random")
    parser.add_argument("--out", type=Path, required=True, help="pools, units and record.json go there")
    parser.add_argument("--stages", help="names separated by commas, 'main' for main-pacs and main-midog; all")
    parser.add_argument("--minutes", type=float, help="start nothing that would end later than so long after the start")
    parser.add_argument("--jobs", type=int, default=1, help="processes on the GPU; more than one wants NVIDIA's MPS")
    parser.add_argument("--ours", default=OURS, help="the method to compare: name, or name(option=value)")
    parser.add_argument("--have", type=Path, nargs="*", default=[], help="records, or folders of them, of other runs")
    parser.add_argument("--later", action="store_true", help="mark the record: not the first run on MIDOG")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--list", action="store_true", help="print the stages and their state, run nothing")
    parser.add_argument("--profile", default="real", choices=tuple(PROFILES), help="micro: a tiny network, for tests")
    parser.add_argument("--limit", type=int, help="images a domain, for a try; a report refuses it")
    parser.add_argument("--steps", type=int, help="of training, for a try")
    given = parser.parse_args()
    if not given.list and None in (given.pacs, given.midog, given.init):
        parser.error("--pacs, --midog and --init say where the data and the first weights are")
    return given


def method_spec(text: str) -> str:
    """'name:a=1,b=2' and 'name(a=1, b=2)' -> as tables spell it."""
    name, colon, options = text.partition(":")
    spelt = f"{name}({options})" if colon and "(" not in name else text
    return str(parse_variants(spelt)[0])


def records_in(paths: list[Path]) -> list[Path]:
    return [file for path in paths for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]


if __name__ == "__main__":
    sys.exit(main())
