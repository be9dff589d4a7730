"""Servers around the same method without audit log, guards, sandbox, streams or limits, for benchmarks/service.py.

    python3 benchmarks/service_rivals.py fastapi POOL PORT
    python3 benchmarks/service_rivals.py litserve POOL PORT

`fastapi` takes one step per request, as most services written by hand do; `litserve` groups requests as it is made to.
Both decode the PNG in their own process and answer with the class.
"""

import io
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import mergestream as ms

MOST_TOGETHER, WAIT_SECONDS = 32, 0.05  # the defaults of `mergestream serve`


def method_of(pool: str) -> ms.Method:
    return ms.create_method("entropy_adaptive", ms.ExpertPool.load(Path(pool)))


def pixels_of(data: bytes) -> torch.Tensor:
    """A PNG as uint8 [3,H,W]."""
    return torch.from_numpy(np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).transpose(2, 0, 1).copy())


def bare_fastapi(pool: str, port: int) -> None:
    import threading

    import uvicorn
    from fastapi import FastAPI, UploadFile

    app, method, turn = FastAPI(), method_of(pool), threading.Lock()

    @app.post("/answer")
    def answer(images: UploadFile) -> dict[str, Any]:  # in FastAPI's own threads
        batch = pixels_of(images.file.read())[None]
        with turn:
            logits = method(batch)
        return {"class": method.pool.classes[int(logits.argmax())]}

    uvicorn.run(app, port=port, log_level="error")


def litserve(pool: str, port: int) -> None:
    from litserve import LitServer
    from service_litserve import Served

    api = Served(pool, max_batch_size=MOST_TOGETHER, batch_timeout=WAIT_SECONDS, api_path="/answer")
    server = LitServer(api, accelerator="cpu", timeout=60)
    server.run(port=port, host="127.0.0.1", log_level="error", generate_client_file=False)


if __name__ == "__main__":
    {"fastapi": bare_fastapi, "litserve": litserve}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
