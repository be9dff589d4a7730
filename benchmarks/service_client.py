"""Clients of a service under load: each has one connection, posts one PNG, waits for the answer and posts the next.

Requests are made beforehand and answers are read with as little Python as possible: clients run on the service's own
two cores here, and what they use is reported (`client_cpu_ms`).
"""

import argparse
import asyncio
import io
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from PIL import Image


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("pictures", type=Path, help="a .npy file of uint8 [N,3,H,W]")
    parser.add_argument("--path", action="append", required=True, help="where to post; several are used in turn")
    parser.add_argument("--field", default="images", help="name of the form's field")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=1000)
    given = parser.parse_args()
    asyncio.run(load(given))


async def load(given: argparse.Namespace) -> None:
    """Make all requests; print one JSON document of answers, errors and times."""
    pictures = [png(each) for each in np.load(given.pictures)]
    where = urlsplit(given.url)
    made = [[request(where.netloc, path, given.field, each) for each in pictures] for path in given.path]
    left, answers, errors = iter(range(given.requests)), list[dict[str, Any]](), Counter[str]()

    async def client() -> None:
        reader, writer = await asyncio.open_connection(where.hostname, where.port)
        for number in left:
            began = time.perf_counter()
            writer.write(made[number % len(made)][number % len(pictures)])
            status, body = await response(reader)
            if status == 200:
                answers.append({"ms": 1000 * (time.perf_counter() - began), "body": body})
            else:
                errors[f"{status} {body[:80].decode(errors='replace')}"] += 1
        writer.close()

    processor, began = os.times(), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(given.clients)))
    seconds, used = time.perf_counter() - began, os.times()
    cpu = used.user + used.system - processor.user - processor.system
    answered = [{"ms": each["ms"], **short(json.loads(each["body"]))} for each in answers]
    print(json.dumps({"seconds": seconds, "cpu_seconds": cpu, "errors": errors, "answered": answered}), flush=True)


async def response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
    return int(head[9:12]), await reader.readexactly(length)


def request(host: str, path: str, field: str, file: bytes) -> bytes:
    boundary = b"0123456789abcdef"
    about = f'Content-Disposition: form-data; name="{field}"; filename="a.png"\r\nContent-Type: image/png\r\n\r\n'
    body = b"--" + boundary + b"\r\n" + about.encode() + file + b"\r\n--" + boundary + b"--\r\n"
    kind = f"multipart/form-data; boundary={boundary.decode()}"
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def short(answer: Any) -> dict[str, Any]:
    """What is looked up in the audit log afterwards; nothing of a rival's answer."""
    if "audit" not in answer:
        return {}
    (prediction,) = answer["predictions"]
    fields = {name: answer[name] for name in ("stream", "step", "position", "batch_size", "milliseconds")}
    return {**fields, **answer["audit"], "class": answer["classes"].index(prediction)}


def png(picture: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture.transpose(1, 2, 0)).save(file, "PNG")
    return file.getvalue()


if __name__ == "__main__":
    main()
