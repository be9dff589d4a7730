"""A DICOM node without a service around it, objects to send to it, and pynetdicom's own sender."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydicom.dataset import Dataset
from pydicom.uid import MRImageStorage, generate_uid
from pynetdicom import AE

from dicoms import dataset
from mergestream.data.intake.limits import Limits
from mergestream.data.intake.pictures import Picture
from mergestream.serving.dicom_network.node import DicomNode
from mergestream.serving.dicom_network.results import Delivery, UnitResult
from mergestream.serving.dicom_network.rules import Rules, parse_rules
from mergestream.serving.engine.answers import Answer
from mergestream.serving.listening_socket import listening_socket
from services import ANSWER

CLASSES = ANSWER.classes


def rules(*listed: dict[str, Any], **sections: Any) -> Rules:
    return parse_rules({"rules": list(listed) or [{"stream": "ward"}], **sections}, Path())


def mr_image(number: int = 0, **elements: Any) -> Dataset:
    """A small MR image; its first pixel says which it is."""
    pixels = np.random.default_rng(number).integers(0, 256, (16, 16), dtype=np.uint8)
    uids = {"SOPClassUID": MRImageStorage, "SOPInstanceUID": generate_uid()}
    return dataset(pixels, **{**uids, "Modality": "MR", "BodyPartExamined": "HEAD", **elements})


class Node:
    """A node on a free port whose engine answers with fixed probabilities; `with` ends it."""

    def __init__(
        self, folder: Path, chosen: Rules | None = None, *, delivery: Delivery | None = None, receives: bool = True
    ) -> None:
        self.results: list[UnitResult] = []
        self.batches: list[tuple[str, list[Picture]]] = []
        self.refuse: Callable[[Sequence[Picture]], None] = lambda _: None
        sock = listening_socket("127.0.0.1", 0, backlog=128) if receives else None
        self.node = DicomNode("TESTNODE", folder, chosen or rules(), sock)
        assert receives is (self.node.port is not None)
        self.port = self.node.port or 0
        self.node.start(self._answer, delivery or self.results.append, Limits(), CLASSES)

    def _answer(self, stream: str, pictures: Sequence[Picture]) -> Answer:
        self.refuse(pictures)
        self.batches.append((stream, list(pictures)))
        rows = tuple((share, 1 - share) for share in (0.1 * (place + 1) for place in range(len(pictures))))
        predictions = tuple(CLASSES[int(row[1] > row[0])] for row in rows)
        return replace(ANSWER, predictions=predictions, probabilities=rows, batch_size=len(rows))

    def status(self) -> dict[str, Any]:
        return self.node.status().model_dump()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.node.end(5)


def send(port: int, *objects: Dataset, calling: str = "SCANNER", called: str = "TESTNODE") -> list[Any]:
    """Send objects over one association; their statuses. ConnectionError: it was rejected."""
    entity = AE(calling)
    for each in objects:
        entity.add_requested_context(each.SOPClassUID, each.file_meta.TransferSyntaxUID)
    association = entity.associate("127.0.0.1", port, ae_title=called)
    if not association.is_established:
        raise ConnectionError
    statuses = [association.send_c_store(each) for each in objects]
    association.release()
    return statuses


def wait_until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        threading.Event().wait(0.02)
