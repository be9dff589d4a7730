"""Takes objects from the inbox, answers them through the service, hands on the results, then removes the objects."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mergestream.data.intake.input_files import read_upload
from mergestream.data.intake.limits import IntakeError, Limits
from mergestream.data.intake.pictures import Picture
from mergestream.runtime.errors import InputError, MergestreamError, OutputError
from mergestream.serving.answer_queue import ClosingError, OverloadedError
from mergestream.serving.dicom_network.inbox import Received
from mergestream.serving.dicom_network.reception import Reception
from mergestream.serving.dicom_network.results import Delivery, ImageResult, SeriesResult
from mergestream.serving.dicom_network.rules import IMAGE, Rule, Rules
from mergestream.serving.dicom_network.series_answers import summary_of
from mergestream.serving.engine.answers import Answer
from mergestream.serving.worker_thread import WorkerThread

AnswerBatch = Callable[[str, Sequence[Picture]], Answer]
Decoded = tuple[Received, list[Picture]]
Unit = tuple[Rule, list[Received]]  # objects that are answered together
BATCH_IMAGES = 32
BATCH_SECONDS = 1.0  # how long the first object of a batch waits for others
RETRY_SECONDS = 5.0  # after a failure that is not the object's fault
LOOK_SECONDS = 0.25
TEMPORARY = (OutputError, OverloadedError, ClosingError, TimeoutError)
log = logging.getLogger(__name__)


class InboxWorker(WorkerThread):
    """Answers the inbox until `end` is called. `failed`: an error has ended it."""

    def __init__(
        self, reception: Reception, rules: Rules, answer: AnswerBatch, delivery: Delivery | None, limits: Limits
    ) -> None:
        super().__init__("DICOM inbox", "objects of the DICOM node are no longer answered", daemon=True)
        self._reception, self._inbox, self._rules = reception, reception.inbox, rules
        self._answer, self._delivery, self._limits = answer, delivery, limits
        self._retry_at: dict[str, float] = {}

    def work(self) -> None:
        while not self._ending.is_set():
            began = time.monotonic()
            self._answer_complete_units()
            self._ending.wait(max(LOOK_SECONDS, time.monotonic() - began))
        self._answer_complete_units()

    def _answer_complete_units(self) -> None:
        for rule, objects in self._complete_units():
            if self._give_up.is_set():
                return
            self._answer_unit(rule, objects)

    def _complete_units(self) -> Iterator[Unit]:
        """Single objects that fill a batch or have waited long enough, and complete series; the oldest first."""
        now, groups = time.monotonic(), dict[tuple[int, str], list[Received]]()
        self._retry_at = {digest: then for digest, then in self._retry_at.items() if then > now}
        for each in self._inbox.waiting():
            if each.digest in self._retry_at:
                continue
            if each.digest in self._inbox.answered:  # by a process that was killed before it removed the object
                self._inbox.finish([each])
                continue
            rule = self._rules.rule_for(each.header)
            if rule is None:  # the rules have changed since it arrived
                self._refuse(each, "no_rule", "No rule fits this object.")
                continue
            key = "" if rule.answer == IMAGE else f"{each.header.study}/{each.header.series}"
            groups.setdefault((self._rules.rules.index(rule), key), []).append(each)
        for (place, _), objects in groups.items():
            if self._is_complete(self._rules.rules[place], objects):
                yield self._rules.rules[place], objects

    def _is_complete(self, rule: Rule, objects: Sequence[Received]) -> bool:
        now = time.time()
        if rule.answer == IMAGE:
            waited = now - objects[0].arrived
            return self._ending.is_set() or len(objects) >= BATCH_IMAGES or not 0 <= waited < BATCH_SECONDS
        return not 0 <= now - max(each.arrived for each in objects) < rule.idle_seconds

    def _answer_unit(self, rule: Rule, objects: list[Received]) -> None:
        """Answer single objects batch by batch; or all batches of a series, then the series."""
        results, answered = list[ImageResult](), list[Received]()
        for batch in self._batches(objects):
            if self._give_up.is_set():
                return
            for each, images in self._answer_batch(rule, batch):
                if rule.answer == IMAGE:
                    self._deliver(SeriesResult(tuple(images), None, rule.send_to), [each])
                else:
                    results += images
                    answered.append(each)
        waiting = any(each.digest in self._retry_at for each in objects)
        if results and not waiting:  # else the series is answered as a whole later
            self._deliver(SeriesResult(tuple(results), summary_of(results, rule), rule.send_to), answered)
        elif results:
            self._retry_later(answered)

    def _batches(self, objects: Sequence[Received]) -> Iterator[list[Decoded]]:
        """Decode objects into batches of limited size. What cannot be decoded is refused."""
        batch, pictures, size = list[Decoded](), 0, 0
        for each in objects:
            decoded = self._decoded(each)
            if not decoded:
                continue
            more = sum(picture.pixels.nbytes for picture in decoded)
            if batch and (pictures + len(decoded) > BATCH_IMAGES or size + more > self._limits.decoded_bytes):
                yield batch
                batch, pictures, size = [], 0, 0
            batch.append((each, decoded))
            pictures, size = pictures + len(decoded), size + more
        if batch:
            yield batch

    def _decoded(self, each: Received) -> list[Picture]:
        try:
            return read_upload(each.file.read_bytes(), self._limits)
        except IntakeError as error:
            self._refuse(each, error.code, error.sentence)
        except (OSError, MergestreamError) as error:
            self._retry_later([each], error)
        return []

    def _answer_batch(self, rule: Rule, batch: list[Decoded]) -> Iterator[tuple[Received, list[ImageResult]]]:
        """Results per object. If a batch fails, each object is tried alone, so that one does not block the others."""
        pictures = [picture for _, decoded in batch for picture in decoded]
        try:
            answer = self._answer(rule.stream, pictures)
        except TEMPORARY as error:
            self._retry_later([each for each, _ in batch], error)
        except Exception as error:
            if len(batch) > 1:
                for one in batch:
                    yield from self._answer_batch(rule, [one])
            elif isinstance(error, InputError):
                self._refuse(batch[0][0], "not_answered", "The model cannot take this image.")
            else:
                self._retry_later([batch[0][0]], error)
        else:
            row = 0
            for each, decoded in batch:
                pictures = decoded if rule.answer == IMAGE else [_without_pixels(picture) for picture in decoded]
                yield each, [ImageResult(each.file, p, answer, row + place) for place, p in enumerate(pictures)]
                row += len(decoded)

    def _deliver(self, result: SeriesResult, objects: Sequence[Received]) -> None:
        """Hand on a result until that works; only then do its objects leave the inbox."""
        while True:
            try:
                if self._delivery is not None:
                    self._delivery(result)
                self._inbox.finish(objects)
                self._reception.count("object", "answered", len(objects))
                return
            except OSError as error:  # OutputError too
                log.warning("a result will be delivered later: %s", type(error).__name__)
                if self._ending.is_set() or self._give_up.wait(RETRY_SECONDS):
                    self._retry_later(objects)
                    return
            except Exception as error:
                log.error("a result cannot be delivered: %s", type(error).__name__)
                for each in objects:
                    self._refuse(each, "not_delivered", "The result could not be made into a report.")
                return

    def _refuse(self, each: Received, code: str, sentence: str) -> None:
        log.info("a received object was refused: %s", code)
        try:
            self._inbox.refuse(each, code, sentence)
            self._reception.count("object", "unanswerable")
        except OSError as error:
            self._retry_later([each], error)

    def _retry_later(self, objects: Sequence[Received], error: Exception | None = None) -> None:
        if error is not None:
            log.warning("%d objects will be tried again later: %s", len(objects), type(error).__name__)
        self._retry_at |= {each.digest: time.monotonic() + RETRY_SECONDS for each in objects}


def _without_pixels(picture: Picture) -> Picture:
    """A series may be large: its pixels are not held until its last image is answered."""
    return replace(picture, pixels=picture.pixels[:, :0, :0].copy())
