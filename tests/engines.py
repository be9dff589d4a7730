"""A small pool, pictures of noise and an engine over a real audit log, for the service's suites."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mergestream as ms
from conftest import make_pool
from mergestream.data.intake.pictures import Picture, sha256_of_pixels
from mergestream.serving.audit.chain import recent_lines, saved_links
from mergestream.serving.audit.log_writer import AuditLog
from mergestream.serving.engine.engine import Engine
from mergestream.serving.engine.revocation_watch import RevocationWatch
from mergestream.serving.guards.findings import GuardSettings

# Pictures here are noise and experts nobody's: the guard rails would be right to step in.
PLAIN = GuardSettings(fallback="none", abstain_on=())


def small_pool() -> ms.ExpertPool:
    return make_pool("hand_written", base=True)


def picture(seed: int, size: int = 16) -> Picture:
    pixels = np.random.default_rng(seed).integers(0, 256, (3, size, size), dtype=np.uint8)
    return Picture(pixels, hashlib.sha256(pixels.tobytes()).hexdigest(), sha256_of_pixels(pixels))


def batch(number: int, count: int = 4) -> list[Picture]:
    return [picture(1000 * number + i) for i in range(count)]


def tensor_of(pictures: Sequence[Picture]) -> torch.Tensor:
    return torch.stack([torch.from_numpy(each.pixels) for each in pictures])


def around(pool: ms.ExpertPool, folder: Path) -> dict[str, Any]:
    """What an engine needs beside its pool, where that is in memory only: it stays, and nobody is revoked."""
    return {"load_pool": lambda: pool, "revocations": RevocationWatch(folder, None, folder / "newest.json")}


class Service:
    """An engine, its log and its folder; `with` closes them as an orderly end would."""

    def __init__(self, folder: Path, pool: ms.ExpertPool, method: str = "entropy_adaptive", **more: Any) -> None:
        options = more.pop("options", {})
        self.log = folder / "audit.jsonl"
        self.audit = AuditLog(self.log)
        try:
            recent = recent_lines(self.log, None, saved_links(folder / "state"))
            more = {"guards": PLAIN, "recent": recent, **around(pool, folder), **more}
            self.engine = Engine(pool, method, options, audit=self.audit, state_folder=folder / "state", **more)
        except BaseException:
            self.audit.close()
            raise

    def lines(self, kind: str | None = None) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        return [line for line in lines if kind in (None, line["kind"])]

    def steps(self) -> list[dict[str, Any]]:
        return [line["body"] for line in self.lines("step")]

    def __enter__(self) -> "Service":
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()
        self.audit.close()
