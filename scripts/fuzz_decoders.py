"""Feed damaged compressed DICOM files to the decoding child process: python scripts/fuzz_decoders.py [FILES] [SEED]

Prints, per transfer syntax, how files ended (decoded, refused, the process died, too slow); how many processes
were started; the slowest file and the largest process. Files are pydicom's test files and, with dcmtk (dcmcjpeg,
dcmcjpls), recompressed ones.
"""

import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path

import pydicom
from pydicom.data import get_testdata_file

from mergestream.data.intake import decoder_pool
from mergestream.data.intake.decoder_pool import DecoderPool, DecoderProcess, EncodedFile
from mergestream.data.intake.limits import Allowance, IntakeError, Limits

JPEG = {
    "50": "Baseline",
    "51": "Extended",
    "57": "Lossless",
    "70": "Lossless SV1",
    "80": "LS",
    "81": "LS near-lossless",
}
RECOMPRESSED = {
    ("dcmcjpeg", "+el"): "57",
    ("dcmcjpeg", "+e1"): "70",
    ("dcmcjpls", "+el"): "80",
    ("dcmcjpeg", "+ee"): "51",
}
LIMITS = Limits(seconds=5)


def intact_files() -> dict[str, tuple[str, bytes]]:
    """Name -> ending of the transfer syntax, bytes."""
    files = {}
    folder = Path(str(get_testdata_file("CT_small.dcm"))).parent
    for path in sorted(folder.glob("*.dcm")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            meta = getattr(pydicom.dcmread(path, stop_before_pixels=True, force=True), "file_meta", {})
        prefix, _, ending = str(meta.get("TransferSyntaxUID", "")).rpartition(".")
        if prefix == "1.2.840.10008.1.2.4" and ending in JPEG and path.stat().st_size < 1 << 16:
            files[path.name] = (ending, path.read_bytes())
    with tempfile.TemporaryDirectory() as scratch:
        for (program, option), ending in RECOMPRESSED.items():
            for source in ("CT_small.dcm", "MR_small.dcm"):
                made = Path(scratch) / f"{program}{option}-{source}"
                if (
                    shutil.which(program)
                    and subprocess.run(
                        [program, option, folder / source, made], capture_output=True, check=False
                    ).returncode
                    == 0
                ):
                    files[made.name] = (ending, made.read_bytes())
    return files


def damaged(data: bytes, dice: random.Random) -> bytes:
    """Bytes changed, cut out, doubled or cut off in the compressed frame: its header as often as its content."""
    content = bytearray(data)
    start = max(0, content.rfind(b"\xff\xd8\xff"))
    for _ in range(dice.choice((1, 1, 2, 5, 20))):
        place = dice.randrange(start, min(len(content), start + 700) if dice.random() < 0.5 else len(content))
        kind = dice.random()
        if kind < 0.6:
            content[place] = dice.choice((0, 0xFF, dice.randrange(256)))
        elif kind < 0.75:
            del content[place : place + dice.randrange(1, 9)]
        elif kind < 0.9:
            content[place:place] = content[place : place + dice.randrange(1, 64)]
        else:
            del content[place:]
            break
    return bytes(content)


def main(count: int, seed: int) -> None:
    files, dice = intact_files(), random.Random(seed)
    by_syntax = defaultdict(list)
    for ending, data in files.values():
        by_syntax[ending].append(data)
    starts = [0]

    class Counted(DecoderProcess):
        def __init__(self, *arguments: object) -> None:
            starts[0] += 1
            super().__init__(*arguments)  # type: ignore[arg-type]

    decoder_pool.DecoderProcess = Counted  # type: ignore[misc]
    pool, outcomes, slowest, began = DecoderPool(2 << 30), defaultdict(Counter), 0.0, time.monotonic()
    for number in range(count):
        ending = sorted(by_syntax)[number % len(by_syntax)]
        data, before, started = damaged(dice.choice(by_syntax[ending]), dice), starts[0], time.monotonic()
        try:
            pool.decode([EncodedFile("DICOM", data)], Allowance.of(LIMITS))
            outcome = "decoded"
        except IntakeError as error:
            alive = bool(pool._idle) and pool._idle[-1].running()
            outcome = error.code if error.code == "too_slow" or alive else "died"
        # A process that had to be started first is not the file's fault.
        slowest = max(slowest, time.monotonic() - started) if starts[0] == before else slowest
        outcomes[ending][outcome] += 1
    for ending, counted in sorted(outcomes.items()):
        print(f"{JPEG[ending]:18} {dict(sorted(counted.items()))}")
    pool.close()
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
    seconds = time.monotonic() - began
    print(f"{count} files, {seconds:.0f} s, {starts[0]} starts, slowest {slowest:.2f} s, largest process {largest} MiB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
