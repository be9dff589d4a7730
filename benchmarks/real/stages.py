"""Stages run unit by unit: what is done is skipped, what is finished is written at once, time is told."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benches import BENCHES
from crew import side_by_side
from pools import Place, known_note, open_pool, train
from records import Asked, Group, group_of, read_unit, training_group, unit_path, write_unit
from units import TRAIN, Stage, Unit

Say = Callable[[str], None]


@dataclass
class Runner:
    """One call of the benchmark. `elsewhere`: (stage, pool) that other runs' records hold already."""

    place: Place
    asked: Asked
    say: Say
    minutes: float | None = None
    elsewhere: frozenset[tuple[str, str]] = frozenset()
    _began: float = field(default_factory=time.monotonic)

    def run(self, stages: Sequence[Stage], jobs: int) -> bool:
        """Whether all of it is done, by so many processes on one GPU; pools that are missing are trained first.

        Starts no unit that is not expected to end in time.
        """
        left = [unit for stage in stages for unit in stage.units if not self.is_done(unit)]
        missing = [pool for pool in dict.fromkeys(u.pool for u in left) if known_note(self.place, pool) is None]
        first = [Unit(TRAIN, TRAIN, pool) for pool in missing]
        then = [unit for unit in left if unit.kind != TRAIN]
        done = all(self._run_units(units, jobs) for units in (first, then))
        for stage in stages:
            remain = sum(not self.is_done(unit) for unit in stage.units)
            over = f"the time is over, {remain} units are left. Run it again."
            self.say(f"{stage.name}: {over if remain else f'done, {self.seconds(stage):.0f} s in all'}")
        return done

    def _run_units(self, units: Sequence[Unit], jobs: int) -> bool:
        began, longest, done = time.monotonic(), 0.0, 0

        def may_start() -> bool:
            return self.minutes is None or time.monotonic() - self._began + longest <= 60 * self.minutes

        for unit, seconds in self._worked(units, jobs, may_start):
            longest, done = max(longest, seconds), done + 1
            passed = time.monotonic() - began
            self.say(f"[{unit.stage} {done}/{len(units)}] {unit.name}: {seconds:.1f} s ({passed:.0f} s since it began)")
        return done == len(units)

    def _worked(self, units: Sequence[Unit], jobs: int, may_start: Callable[[], bool]) -> Iterator[tuple[Unit, float]]:
        if jobs > 1 and len(units) > 1:
            yield from side_by_side(work, units, jobs, (self.place, self.asked), key=_pool, may_start=may_start)
            return
        for unit in units:
            if not may_start():
                return
            yield unit, work((self.place, self.asked), unit)

    def is_done(self, unit: Unit) -> bool:
        return (unit.stage, unit.pool.name) in self.elsewhere or self._found(unit) is not None

    def seconds(self, stage: Stage) -> float:
        return sum(found["seconds"] for unit in stage.units if (found := self._found(unit)) is not None)

    def _found(self, unit: Unit) -> dict[str, Any] | None:
        """What is written down of a unit, if it is of the pool that lies there now."""
        note = known_note(self.place, unit.pool)
        if unit.kind == TRAIN:
            return note
        found = read_unit(unit_path(self.place.out, unit, self.asked))
        return found if found and note and found["fingerprint"] == note["fingerprint"] else None

    def groups(self, stages: Iterable[Stage]) -> list[Group]:
        """What goes into the record: every pool of a stage whose targets are all done."""
        gathered = []
        for stage in stages:
            for pool in dict.fromkeys(unit.pool for unit in stage.units):
                units = [(unit, self._found(unit)) for unit in stage.units if unit.pool == pool]
                if any(found is None for _, found in units):
                    continue
                known = [(unit, found) for unit, found in units if found is not None]
                training = stage.kind == TRAIN
                gathered.append(training_group(*known[0]) if training else group_of(stage, known, self.asked))
        return gathered


def work(given: tuple[Place, Asked], unit: Unit) -> float:
    """Train or bench, and write down what was found; the seconds that it took, with the opening of the pool."""
    place, asked = given
    began = time.perf_counter()
    if unit.kind == TRAIN:
        train(place, unit.pool)
        return time.perf_counter() - began
    open_pool(place, unit.pool)
    opened = time.perf_counter()
    found = BENCHES[unit.kind](place, unit, asked.ours)
    seconds = round(time.perf_counter() - opened, 3)
    write_unit(unit_path(place.out, unit, asked), {**found, "seconds": seconds})
    return time.perf_counter() - began


def _pool(unit: Unit) -> str:
    return unit.pool.name


def listed(runner: Runner, stages: Sequence[Stage]) -> list[str]:
    """A line a stage: what is done of it, and the seconds that took."""
    lines = []
    for stage in stages:
        done = sum(runner.is_done(unit) for unit in stage.units)
        state = "done" if done == len(stage.units) else "not begun" if done == 0 else "begun"
        lines.append(f"{stage.name:24} {state:10} {done:3}/{len(stage.units):<3} {runner.seconds(stage):7.1f} s")
    return lines


def held_elsewhere(groups: Iterable[Group], asked: Asked, *, later: bool) -> frozenset[tuple[str, str]]:
    """Stages of pools in other runs' records that this run would only repeat."""
    same = json.loads(json.dumps(asdict(asked)))
    return frozenset((g["stage"], g["pool"]) for g in groups if g["asked"] == same and g["later"] == later)
