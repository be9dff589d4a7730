"""A program of its own: decodes files that it is sent, in bounded memory, able to do nothing else (sandbox.py).

Decoders leak, run on or crash on hostile input. Here that costs one process, which is started again.
Run as: python -P decoder_process.py MEMORY_BYTES CPU_SECONDS.

A message is two lengths (8 bytes each), a JSON head and a body. A request's head lists the kind and length of its
files, and its body are the files. The answer to each file is one message per frame, whose body are the pixels, and one
that ends it. The first refusal ends the answer.
"""

import json
import logging
import os
import resource
import struct
import sys
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

LENGTHS = struct.Struct("<QQ")
MOST_HEAD_BYTES = 1 << 16
# Failed decodings leak; a process that has grown by this much is replaced.
MOST_GROWTH = 256 << 20
# Standard input, output and error, and the file below.
DESCRIPTORS = 4
HEADER = "DICOM header"  # in place of a file's kind: its texts about patient and study, and no frames
MEMORY_IN_USE = Path("/proc/self/statm")


def write_message(pipe: BinaryIO, head: dict[str, Any], *bodies: bytes | memoryview, flush: bool = True) -> None:
    text = json.dumps(head).encode()
    pipe.write(LENGTHS.pack(len(text), sum(map(len, bodies))) + text)
    for body in bodies:
        pipe.write(body)
    if flush:
        pipe.flush()


def read_message(pipe: BinaryIO, most: int) -> tuple[dict[str, Any], bytes] | None:
    """The next message; None if the other side has gone, or announces more than `most` bytes."""
    lengths = pipe.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    head_length, body_length = LENGTHS.unpack(lengths)
    if head_length > MOST_HEAD_BYTES or body_length > most:
        return None
    head, body = pipe.read(head_length), pipe.read(body_length)
    return (json.loads(head), body) if len(body) == body_length else None


def main(memory_bytes: int, cpu_seconds: int) -> None:
    """Serve requests until the other side closes the pipe."""
    _import_decoders()  # before the limits: imports open files, and map much memory that they never touch
    from mergestream.data.intake import sandbox

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    statm = os.open(MEMORY_IN_USE, os.O_RDONLY) if MEMORY_IN_USE.exists() else None
    filtered = sandbox.enter(memory_bytes, cpu_seconds, DESCRIPTORS)
    first = _resident_bytes(statm)
    write_message(sys.stdout.buffer, {"ready": True, "filtered": filtered})
    while (request := read_message(sys.stdin.buffer, memory_bytes)) is not None:
        for end in _answers(*request):
            grown = _resident_bytes(statm) - first > MOST_GROWTH
            write_message(sys.stdout.buffer, {**end, "retire": grown or time.process_time() > cpu_seconds / 2})


def _import_decoders() -> None:
    """Import the decoders alone: the packages' own __init__ files load torch, which takes seconds and gigabytes."""
    root = Path(__file__).parents[2]
    for folder in ("", "data", "data/intake", "data/intake/dicom", "runtime"):
        package = ModuleType(".".join(["mergestream", *Path(folder).parts]))
        package.__path__ = [str(root / folder)]
        sys.modules[package.__name__] = package
    from mergestream.data.intake import photographs  # noqa: F401

    if find_spec("pydicom"):
        from pydicom import config

        from mergestream.data.intake.dicom import rendering  # noqa: F401

        config.settings.reading_validation_mode = config.IGNORE


def _answers(request: dict[str, Any], body: bytes) -> Any:
    """Send each file's frames; yield its last message."""
    from mergestream.data.intake.limits import Allowance, IntakeError, Limits, damaged_file
    from mergestream.runtime.errors import DataError

    allowance = Allowance(Limits(**request["limits"]), request["images"], request["decoded_bytes"])
    start = 0
    for kind, length in request["files"]:
        data, start = body[start : start + length], start + length
        try:
            yield {"identifiers": _send_frames(kind, data, allowance)}
            continue
        except IntakeError as error:
            refusal = error
        except MemoryError:
            refusal = IntakeError("too_large", "The image needs more memory than the service allows.")
        except DataError:
            refusal = IntakeError("damaged", "The image holds numbers that are not finite.")
        except Exception:  # decoders may raise anything on a damaged file, and quote it
            refusal = damaged_file(kind)
        yield {"refusal": [refusal.code, refusal.sentence]}
        return


def _send_frames(kind: str, data: bytes, allowance: Any) -> list[str]:
    """Send a file's frames and return its UIDs, if it has any."""
    import numpy as np

    from mergestream.data.intake.photographs import read_photograph

    identifiers: list[str] = []
    frames: Any = ()
    if kind == "DICOM":
        from mergestream.data.intake.dicom.rendering import decode_file

        identifiers, frames = decode_file(data, allowance)
    elif kind == HEADER:
        from mergestream.data.intake.dicom.header import header_texts

        return header_texts(data, allowance.limits)
    else:
        frames = [read_photograph(data, kind, allowance)]
    for frame in frames:
        pixels = np.ascontiguousarray(frame).data.cast("B")
        write_message(sys.stdout.buffer, {"shape": frame.shape}, pixels, flush=False)  # the message that ends it does
    return identifiers


def _resident_bytes(statm: int | None) -> int:
    return 0 if statm is None else int(os.pread(statm, 200, 0).split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
