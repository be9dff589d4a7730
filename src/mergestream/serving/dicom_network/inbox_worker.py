"""Takes objects from the inbox, answers them through the service, hands on the results, then removes the objects."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mergestream.data.intake.input_files import read_upload
from mergestream.data.intake.limits import Limits
from mergestream.data.intake.pictures import Picture
from mergestream.serving.dicom_network.inbox import Received
from mergestream.serving.dicom_network.reception import Reception
from mergestream.serving.dicom_network.results import Delivery, ImageResult, UnitResult, UnitSummary
from mergestream.serving.dicom_network.rules import IMAGE, MEAN, STUDY, WORST, Rule, Rules
from mergestream.serving.engine.answers import Answer
from mergestream.serving.worker_thread import BatchingWorker, Pace

AnswerBatch = Callable[[str, Sequence[Picture]], Answer]
Unit = tuple[Rule, list[Received]]  # objects that are answered together
PACE = Pace(batch_seconds=1.0, look_seconds=0.25, retry_seconds=5.0)
log = logging.getLogger(__name__)


class InboxWorker(BatchingWorker[Received]):
    """Answers the inbox until `end` is called. `failed`: an error has ended it."""

    noun = "received object"

    def __init__(
        self, reception: Reception, rules: Rules, answer: AnswerBatch, delivery: Delivery | None, limits: Limits
    ) -> None:
        super().__init__("DICOM inbox", "objects of the DICOM node are no longer answered", limits, PACE, daemon=True)
        self._reception, self._inbox, self._rules = reception, reception.inbox, rules
        self._answer, self._delivery = answer, delivery

    def work(self) -> None:
        while not self._ending.is_set():
            began = time.monotonic()
            self._answer_complete_units()
            self._ending.wait(max(self._pace.look_seconds, time.monotonic() - began))
        self._answer_complete_units()

    def _answer_complete_units(self) -> None:
        for rule, objects in self._complete_units():
            if self._give_up.is_set():
                return
            self._answer_unit(rule, objects)

    def _complete_units(self) -> Iterator[Unit]:
        """Single objects that fill a batch or have waited long enough, complete series and studies; oldest first."""
        groups = dict[tuple[int, str], list[Received]]()
        for each in self.due(self._inbox.waiting()):
            if each.digest in self._inbox.answered:  # by a process that was killed before it removed the object
                self._inbox.finish([each])
                continue
            rule = self._rules.rule_for(each.header)
            if rule is None:  # the rules have changed since it arrived
                self.refuse(each, "no_rule", "No rule fits this object.")
                continue
            key = "" if rule.answer == IMAGE else each.header.study
            key += "" if rule.answer in (IMAGE, STUDY) else f"/{each.header.series}"
            groups.setdefault((self._rules.rules.index(rule), key), []).append(each)
        for (place, _), objects in groups.items():
            if self._is_complete(self._rules.rules[place], objects):
                yield self._rules.rules[place], objects

    def _is_complete(self, rule: Rule, objects: Sequence[Received]) -> bool:
        now = time.time()
        if rule.answer == IMAGE:
            waited = now - objects[0].arrived
            full = len(objects) >= self._pace.batch_size
            return self._ending.is_set() or full or not 0 <= waited < self._pace.batch_seconds
        return not 0 <= now - max(each.arrived for each in objects) < rule.idle_seconds

    def _answer_unit(self, rule: Rule, objects: list[Received]) -> None:
        """Answer single objects batch by batch; or all batches of a series or study, then its one answer."""
        results = dict[Received, list[ImageResult]]()

        def store(each: Received, pictures: list[Picture], answer: Answer, row: int) -> None:
            shown = pictures if rule.answer == IMAGE else map(_without_pixels, pictures)
            images = [ImageResult(each.file, picture, answer, row + place) for place, picture in enumerate(shown)]
            if rule.answer == IMAGE:
                self._deliver(UnitResult(tuple(images), None, rule.send_to), [each])
            else:
                results[each] = images

        self.answer_items(objects, lambda pictures: self._answer(rule.stream, pictures), store)
        images = tuple(image for own in results.values() for image in own)
        if any(each not in results and each in self._inbox for each in objects):  # all are answered together later
            self.retry_later([*results])
        elif images:
            self._deliver(UnitResult(images, summary_of(images, rule), rule.send_to), [*results])

    def read(self, each: Received) -> list[Picture]:
        return read_upload(each.file.read_bytes(), self._limits)

    def _deliver(self, result: UnitResult, objects: Sequence[Received]) -> None:
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
                if self._ending.is_set() or self._give_up.wait(self._pace.retry_seconds):
                    self.retry_later(objects)
                    return
            except Exception as error:
                log.error("a result cannot be delivered: %s", type(error).__name__)
                for each in objects:
                    self.refuse(each, "not_delivered", "The result could not be made into a report.")
                return

    def set_aside(self, each: Received, code: str, sentence: str) -> None:
        self._inbox.refuse(each, code, sentence)
        self._reception.count("object", "unanswerable")


def _without_pixels(picture: Picture) -> Picture:
    """A series may be large: its pixels are not held until its last image is answered."""
    return replace(picture, pixels=picture.pixels[:, :0, :0].copy())


def summary_of(images: Sequence[ImageResult], rule: Rule) -> UnitSummary:
    """The mean of the images' probabilities, or those of the image with the most of the rule's worst class.

    Images on which the service abstains do not count; if it abstains on all, the series or study has no prediction.
    """
    answers = [each.answer.of(each.row) for each in images]
    decided = [answer for answer in answers if answer.predictions[0] is not None]
    classes, rows = answers[0].classes, [answer.probabilities[0] for answer in decided or answers]
    if rule.how == WORST and rule.worst_class in classes:
        place = classes.index(rule.worst_class)
        probabilities = max(rows, key=lambda row: row[place])
        how = WORST
    else:
        probabilities = tuple(sum(column) / len(rows) for column in zip(*rows, strict=True))
        how = MEAN
    best = max(range(len(classes)), key=probabilities.__getitem__)
    return UnitSummary(rule.answer, how, classes, probabilities, classes[best] if decided else None)
