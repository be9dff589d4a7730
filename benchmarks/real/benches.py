"""What each kind of stage measures at one target with one pool: rows, resamples, what the experts alone say."""

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import recipes
import torch
from answering import Answers, KnownLogits, TargetData, answer
from costs import cost_of
from pools import OpenPool, Place, open_pool, with_loud_head
from scoring import resampled, scores
from torch import Tensor
from units import Unit

from mergestream.bench.engine.pool_at_target import method_of
from mergestream.bench.engine.variants import parse_variants
from mergestream.data.streams import in_order
from mergestream.methods import Method
from mergestream.pool.execution import Execution
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import MergestreamError

# One forward of a model that stays; it needs no batches of the stream's size.
STATIC_BATCH = 256


class Sheet:
    """Rows of one unit, with resamples where the data set's bars need them."""

    def __init__(self, opened: OpenPool, data: TargetData, draws: Tensor, *, keep_resamples: bool) -> None:
        self._metrics = recipes.METRICS[opened.spec.dataset] if keep_resamples else ()
        self._data, self._draws = data, draws
        self._labels = torch.from_numpy(data.labels).to(draws.device)
        self.rows: list[dict[str, Any]] = []
        self.resamples: dict[str, dict[str, Tensor]] = {}
        self.left_out: dict[str, str] = {}

    def add(self, method: str, stream: str, answers: Answers, condition: str = "", **more: Any) -> None:
        found = scores(answers.logits, self._labels, self._draws, self._metrics)
        said = answers.logits.argmax(dim=-1).bincount(minlength=len(self._data.classes))
        row = {"method": method, "stream": stream, "condition": condition, "target": self._data.name}
        row |= {"images": len(self._data), "said": said.tolist(), "seconds": round(answers.seconds, 4), **more}
        self.rows.append(row | {name: _number(values[0]) for name, values in found.items()})
        if self._metrics:
            key = "|".join((method, stream, condition))
            self.resamples[key] = {name: found[name][1:].cpu() for name in self._metrics}


def _number(value: Tensor) -> float | None:
    return None if bool(value.isnan()) else round(float(value), 6)


class Case:
    """One unit, opened: sources, target, known logits, and where rows go."""

    def __init__(self, place: Place, unit: Unit, *, keep_resamples: bool = True, images: int | None = None) -> None:
        self.opened, self.unit, self.place = open_pool(place, unit.pool), unit, place
        self.pool = self.opened.sources(unit.targets)
        self.data, draws = _target(self, images)
        self.known = KnownLogits(self.pool, self.data.images)
        self.sheet = Sheet(self.opened, self.data, draws, keep_resamples=keep_resamples)

    def method(self, spec: str, pool: ExpertPool | None = None) -> Method:
        """A method on the pool that it needs. What answers all batches with one model gains nothing by a graph."""
        own = pool or self._pool_for(parse_variants(spec)[0].method)
        plain = self.captured(spec, self._eager if own is self.pool else own.to(execution=Execution(capture=False)))
        return plain if plain.static else self.captured(spec, own)

    @cached_property
    def _eager(self) -> ExpertPool:
        return self.pool.to(execution=Execution(capture=False))

    def captured(self, spec: str, pool: ExpertPool | None = None) -> Method:
        """A method as it is served: its steps are replayed from graphs where the device has them."""
        variant = parse_variants(spec)[0]
        return method_of(variant, pool or self._pool_for(variant.method), self.opened.dataset)

    def _pool_for(self, method: str) -> ExpertPool:
        if method in ("fisher", "regmean"):
            return self.opened.measured(self.unit.targets)
        return self.opened.measured_by_blocks(self.unit.targets) if method == "regmean_pp" else self.pool

    def answer(self, spec: str, streams: Iterable[str], *, name: str | None = None) -> None:
        """A method on several streams of the unit's batch size."""
        self.answer_batches(spec, [(s, "", self.place.profile.batch_size) for s in streams], name=name)

    def answer_batches(self, spec: str, wanted: Iterable[tuple[str, str, int]], *, name: str | None = None) -> None:
        """A method on streams, each with its condition and batch size; a static one answers once for all."""
        label, once = name or spec, None
        try:
            method = self.method(spec)
            known = self.known.for_method(method)
            if method.static:
                once = answer(method, self.data.images, known, in_order(len(self.data), STATIC_BATCH))
            for stream, condition, size in wanted:
                batches = self.data.stream(stream, batch_size=size, seed=self.unit.pool.seed)
                found = once or answer(method, self.data.images, known, batches)
                self.sheet.add(label, stream, found, condition)
        except MergestreamError as error:
            self.sheet.left_out[label] = str(error)

    def finished(self, **more: Any) -> dict[str, Any]:
        """All that is written down of the unit."""
        count = len(self.data.classes)
        said = {name: row.bincount(minlength=count).tolist() for name, row in self._said()}
        return {
            "fingerprint": self.opened.fingerprint,
            "classes": list(self.data.classes),
            "rows": self.sheet.rows,
            "resamples": self.sheet.resamples,
            "left_out": self.sheet.left_out,
            "experts": said,
            **more,
        }

    def _said(self) -> Iterable[tuple[str, Tensor]]:
        return zip(self.pool.names, self.known.said(), strict=True)


def _target(case: Case, images: int | None) -> tuple[TargetData, Tensor]:
    """A target's images on the device and its resamples; pools of one data set share both."""
    place, unit = case.place, case.unit
    key = (unit.pool.dataset, unit.targets, images)
    if key not in place.kept:
        data = TargetData.of([case.opened.dataset[target] for target in unit.targets], place.device)
        data = data if images is None else data.some(images)
        draws = resampled(data.labels, data.units, place.profile.resamples, f"{unit.pool.dataset}/{data.name}")
        place.kept[key] = data, torch.from_numpy(draws).to(place.device)
    return place.kept[key]


def main(place: Place, unit: Unit, ours: str) -> dict[str, Any]:
    """All methods on the two main streams; every expert alone, too."""
    case = Case(place, unit)
    for spec in recipes.main_methods(ours):
        alone = spec == "single_expert"
        for each in [f"{spec}(expert={name})" for name in case.pool.names] if alone else [spec]:
            case.answer(each, recipes.MAIN_STREAMS)
    return case.finished()


def streams(place: Place, unit: Unit, ours: str) -> dict[str, Any]:
    case = Case(place, unit)
    for spec in recipes.compared_methods(ours):
        case.answer(spec, recipes.MIXTURES if len(unit.targets) > 1 else recipes.OTHER_STREAMS)
    return case.finished()


def batches(place: Place, unit: Unit, ours: str) -> dict[str, Any]:
    """The same images of every target in batches of all sizes."""
    case = Case(place, unit, keep_resamples=False, images=place.profile.fixed_images)
    for spec in recipes.compared_methods(ours):
        case.answer_batches(spec, [("iid", f"batch {size}", size) for size in place.profile.batch_sizes])
    return case.finished()


def ablation(place: Place, unit: Unit, ours: str) -> dict[str, Any]:  # noqa: ARG001
    case = Case(place, unit)
    specs = recipes.ABLATION | recipes.OURS_ABLATION
    for name, spec in specs.items():
        case.answer(spec, recipes.MAIN_STREAMS, name=name)
    return case.finished(specs=specs)


def costs(place: Place, unit: Unit, ours: str) -> dict[str, Any]:
    """Milliseconds of a step and forwards of an image, nothing known beforehand."""
    case, found = Case(place, unit, keep_resamples=False), []
    for spec in recipes.main_methods(ours):
        named = f"{spec}(expert={case.pool.names[0]})" if spec == "single_expert" else spec
        try:
            found.append({"method": spec, **cost_of(case.captured(named), case.data, place.profile)})
        except MergestreamError as error:
            case.sheet.left_out[spec] = str(error)
    return case.finished(costs=found)


def hostile(place: Place, unit: Unit, ours: str) -> dict[str, Any]:
    """The first expert's head multiplied: scores, and how often an answer is that expert's own, before and after."""
    case = Case(place, unit, keep_resamples=False)
    loud = with_loud_head(case.pool, 0)
    own = case.known.said()[0]
    for pool, known, condition in (
        (case.pool, case.known, "head x1"),
        (loud, KnownLogits(loud, case.data.images), f"head x{recipes.LOUDNESS:g}"),
    ):
        for spec in recipes.compared_methods(ours):
            try:
                method = case.method(spec, pool)
                stream = case.data.stream("iid", batch_size=place.profile.batch_size, seed=unit.pool.seed)
                found = answer(method, case.data.images, known.for_method(method), stream)
            except MergestreamError as error:
                case.sheet.left_out[spec] = str(error)
                continue
            agreed = float((found.logits.argmax(dim=-1) == own).double().mean())
            case.sheet.add(spec, "iid", found, condition, agrees_with_loud=round(agreed, 6))
    return case.finished(loud=case.pool.names[0])


BENCHES: Mapping[str, Callable[[Place, Unit, str], dict[str, Any]]] = {
    "main": main,
    "streams": streams,
    "batches": batches,
    "ablation": ablation,
    "costs": costs,
    "hostile": hostile,
}
