"""A program of its own: decodes JPEG frames that it is sent, in little memory, able to do nothing else.

Decoders in C leak, run on or crash on hostile frames. Here that costs one process, which is started again. It imports
nothing of mergestream, so that it starts in a moment: python -P decoder_process.py MEMORY_BYTES.

A message is two lengths (8 bytes each), a JSON head and a body. A request's body is a frame, an answer's are pixels.
"""

import json
import logging
import resource
import struct
import sys
import warnings
from pathlib import Path
from typing import Any, BinaryIO

LENGTHS = struct.Struct("<QQ")
# What failed decodings leak; a process that has grown by so much is replaced.
MOST_GROWTH = 256 << 20


def write_message(pipe: BinaryIO, head: dict[str, Any], body: bytes | memoryview = b"") -> None:
    text = json.dumps(head).encode()
    pipe.write(LENGTHS.pack(len(text), len(body)) + text)
    pipe.write(body)
    pipe.flush()


def read_message(pipe: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """The next message; None where the other side has gone."""
    lengths = pipe.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    head_length, body_length = LENGTHS.unpack(lengths)
    head, body = pipe.read(head_length), pipe.read(body_length)
    return (json.loads(head), body) if len(body) == body_length else None


def main(memory_bytes: int) -> None:
    """Serve requests until the other side closes the pipe."""
    from pydicom.pixels.decoders import base  # noqa: F401  before the limit, as imports map much they never touch

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    for limit, value in ((resource.RLIMIT_AS, memory_bytes), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (value, value))
    first = _resident_bytes()
    write_message(sys.stdout.buffer, {"ready": True})
    while (request := read_message(sys.stdin.buffer)) is not None:
        head, body = _answer(*request)
        head["retire"] = _resident_bytes() - first > MOST_GROWTH
        write_message(sys.stdout.buffer, head, body)


def _answer(options: dict[str, Any], frame: bytes) -> tuple[dict[str, Any], bytes | memoryview]:
    from pydicom.encaps import encapsulate
    from pydicom.pixels import get_decoder

    try:
        decoder = get_decoder(options.pop("transfer_syntax"))
        source = encapsulate([frame])
        array, properties = decoder.as_array(source, index=0, decoding_plugin="pylibjpeg", **options)
        colour = properties["photometric_interpretation"]
        return {"dtype": array.dtype.str, "shape": array.shape, "colour": colour}, memoryview(array.tobytes())
    except Exception:  # what it says may quote the frame
        return {"failed": True}, b""


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0


if __name__ == "__main__":
    main(int(sys.argv[1]))
