"""A program of its own: decodes DICOM files that it is sent, in bounded memory, able to do nothing else.

Decoders in C leak, run on or crash on hostile input. Here that costs one process, which is started again.
Run as: python -P decoder_process.py MEMORY_BYTES.

A message is two lengths (8 bytes each), a JSON head and a body. A request's body is a file. The answer is one message
per frame, whose body are the pixels, and one that ends it.
"""

import json
import logging
import resource
import struct
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

LENGTHS = struct.Struct("<QQ")
# Failed decodings leak; a process that has grown by this much is replaced.
MOST_GROWTH = 256 << 20


def write_message(pipe: BinaryIO, head: dict[str, Any], body: bytes | memoryview = b"") -> None:
    text = json.dumps(head).encode()
    pipe.write(LENGTHS.pack(len(text), len(body)) + text)
    pipe.write(body)
    pipe.flush()


def read_message(pipe: BinaryIO, most: int) -> tuple[dict[str, Any], bytes] | None:
    """The next message; None if the other side has gone, or announces more than `most` bytes."""
    lengths = pipe.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size or sum(LENGTHS.unpack(lengths)) > most:
        return None
    head_length, body_length = LENGTHS.unpack(lengths)
    head, body = pipe.read(head_length), pipe.read(body_length)
    return (json.loads(head), body) if len(body) == body_length else None


def main(memory_bytes: int) -> None:
    """Serve requests until the other side closes the pipe."""
    _import_decoder()  # before the limit: imports map much memory that they never touch
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    for limit, value in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (value, value))
    first = _resident_bytes()
    write_message(sys.stdout.buffer, {"ready": True})
    while (request := read_message(sys.stdin.buffer, memory_bytes)) is not None:
        end = _answer(*request)
        end["retire"] = _resident_bytes() - first > MOST_GROWTH
        write_message(sys.stdout.buffer, end)


def _import_decoder() -> None:
    """Import the decoder alone: the packages' own __init__ files load torch, which takes seconds and gigabytes."""
    root = Path(__file__).parents[3]
    for folder in ("", "data", "data/intake", "data/intake/dicom", "runtime"):
        package = ModuleType(".".join(["mergestream", *Path(folder).parts]))
        package.__path__ = [str(root / folder)]
        sys.modules[package.__name__] = package
    from pydicom import config

    from mergestream.data.intake.dicom import rendering  # noqa: F401

    config.settings.reading_validation_mode = config.IGNORE


def _answer(request: dict[str, Any], data: bytes) -> dict[str, Any]:
    """Send the frames; return the last message."""
    from mergestream.data.intake.dicom.rendering import decode_file
    from mergestream.data.intake.limits import Allowance, IntakeError, damaged_dicom

    try:
        identifiers, frames = decode_file(data, Allowance.from_json(request))
        for frame in frames:
            write_message(sys.stdout.buffer, {"shape": frame.shape}, memoryview(frame.tobytes()))
        return {"identifiers": identifiers}
    except IntakeError as error:
        refusal = error
    except MemoryError:
        refusal = IntakeError("too_large", "The DICOM file needs more memory than the service allows.")
    except Exception:  # pydicom and NumPy may raise anything on contradicting headers, and quote them
        refusal = damaged_dicom()
    return {"refusal": [refusal.code, refusal.sentence]}


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0


if __name__ == "__main__":
    main(int(sys.argv[1]))
