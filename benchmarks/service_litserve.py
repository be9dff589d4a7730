"""The method as LitServe wants it: a class that it can send to its worker process. See service_rivals.py."""

from typing import Any

import litserve
import torch
from service_rivals import method_of, pixels_of


class Served(litserve.LitAPI):
    """One step per group of requests."""

    def __init__(self, pool: str, **options: Any) -> None:
        super().__init__(**options)
        self.pool = pool

    def setup(self, device: str) -> None:  # noqa: ARG002
        self.method = method_of(self.pool)

    def decode_request(self, request, **_):  # LitServe reads annotations; without one it passes the form
        return pixels_of(request["images"].file.read())

    def batch(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(inputs)

    def predict(self, batch: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.method(batch).argmax(dim=-1)

    def unbatch(self, output: torch.Tensor) -> list[int]:
        indices: list[int] = output.tolist()
        return indices

    def encode_response(self, output: int, **_: Any) -> dict[str, Any]:
        return {"class": self.method.pool.classes[output]}
