"""The engine of the service: decoded pictures in, an answer out, and a line in the audit log before it leaves.

Locks, always taken in this order: a stream's own, while one of its batches is answered, so that its steps follow each
other; `_compute`, one for the device, while a batch is computed. The log and the stream's file are written outside of
the second, so that one stream's disk overlaps with another's arithmetic.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from mergestream.data.intake.pictures import Picture
from mergestream.methods import create_method
from mergestream.pool.expert_card import library_versions
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError, OutputError, PoolError
from mergestream.serving.audit.lines import now
from mergestream.serving.engine.answers import Answer, answer_of, input_of, measured
from mergestream.serving.engine.lineup import Lineup
from mergestream.serving.engine.persistence import (
    ACKNOWLEDGED,
    DELETED,
    RELOADED,
    RESET,
    STARTED,
    STEP,
    SWITCHED,
    LoggedAnswer,
    Recovery,
    StateFolder,
)
from mergestream.serving.engine.registry import Registry, ServedStream
from mergestream.serving.engine.service_step import Outcome, environment, take_step
from mergestream.serving.engine.settings import EngineSettings
from mergestream.serving.engine.stream_state import StreamState, restored
from mergestream.serving.guards.alarms import acknowledge, alarms_after

log = logging.getLogger(__name__)


class Audit(Protocol):
    """The audit log: a line is on disk when `append` returns it; AuditError means that it is not."""

    def append(self, kind: str, body: Mapping[str, Any]) -> dict[str, Any]: ...


class Engine:
    """Independent streams over one pool, for any number of threads. `recent`: lines of the log, to restore from."""

    def __init__(
        self,
        pool: ExpertPool,
        method: str,
        options: Mapping[str, Any],
        *,
        audit: Audit,
        state_folder: Path,
        settings: EngineSettings | None = None,
        recent: Iterable[Mapping[str, Any]] = (),
        load_pool: Callable[[], ExpertPool] | None = None,
    ) -> None:
        self.settings = settings or EngineSettings()
        self.settings.guards.require_expert(pool.names)
        self._audit, self._load_pool = audit, load_pool
        self._compute, self._changing = threading.Lock(), threading.Lock()
        self._versions = library_versions()
        self._registry = Registry(self.settings.most_streams)
        # With the defaults written out: another version may have others when it replays the log.
        whole = create_method(method, pool, **options).options()
        self._folder = StateFolder(state_folder)
        try:
            earlier = Recovery(self._folder.streams(), recent, pool.classes)
            self._history = earlier.history
            off = self._folder.switched_off() if earlier.off is None else earlier.off
            self._lineup = Lineup(pool, method, whole, [name for name in off if name in pool.names])
            about = {
                **self._circumstances(self._lineup),
                **self._limits(),
                "classes": list(pool.classes),
                "streams": self._restore(earlier),
            }
            self._audit.append(STARTED, about)
        except BaseException:
            self._folder.close()
            raise

    @property
    def lineup(self) -> Lineup:
        """Pool, method and switched-off experts for the next batch."""
        return self._lineup

    def answer(self, stream: str, pictures: Sequence[Picture]) -> Answer:
        """Answer the next batch of a stream. After an error the stream is as it was before."""
        if not 1 <= len(pictures) <= self.settings.most_images:
            raise InputError(f"A batch holds 1 to {self.settings.most_images} pictures; got {len(pictures)}.")
        with self._registry.held(stream, create=True) as held:
            started = time.perf_counter()
            done = self._step(held, pictures)
            body = self._body(held, done, pictures)
            line = self._audit.append(STEP, {**body, "seconds": time.perf_counter() - started})
            held.answered(done.outcome.state, len(pictures))
            self._save(held)
            guards, seconds = self.settings.guards, time.perf_counter() - started
            answer = answer_of(stream, held.steps - 1, done.lineup, done.outcome, guards, line, seconds, done.restarted)
            held.alarms = alarms_after(held.alarms, answer.findings, answer.step, line.get("time") or now())
            return replace(answer, begun=tuple(alarm for alarm in held.alarms if alarm.step == answer.step))

    def history(self) -> list[LoggedAnswer]:
        """The last answers of an earlier process, as far as the log holds them."""
        return self._history

    def streams(self) -> list[dict[str, Any]]:
        return [stream.describe() for stream in self._registry.all()]

    def reset(self, stream: str) -> None:
        """Forget a stream's averages and the memory of its guard rails; its steps go on counting."""
        with self._registry.held(stream) as held:
            self._audit.append(RESET, {"stream": stream, "steps": held.steps, "images": held.images})
            held.state, held.restarted = None, None
            self._save(held)

    def acknowledge(self, stream: str, *, name: str, note: str, by: str) -> None:
        """Log that a person, under the token of `by`, knows of the stream's alarms. They stay until they end."""
        with self._registry.held(stream) as held:
            if held.alarms is None:
                raise InputError("Its alarms are unknown since the restart: they are known after its next batch.")
            codes = [alarm.code for alarm in held.alarms if alarm.acknowledged_by is None]
            if not codes:
                raise InputError("The stream has no alarm that is not acknowledged.")
            body = {"stream": stream, "codes": codes, "name": name, "note": note, "by": by}
            line = self._audit.append(ACKNOWLEDGED, body)
            held.alarms = acknowledge(held.alarms, name, line.get("time") or now())

    def delete(self, stream: str) -> None:
        with self._registry.held(stream) as held:
            self._audit.append(DELETED, {"stream": stream, "steps": held.steps, "images": held.images})
            self._registry.remove(held)
            self._folder.delete(stream)

    def switch(self, expert: str, *, on: bool) -> tuple[str, ...]:
        """Switch an expert on or off for every stream's next batch; return the experts that are off."""
        with self._changing:
            lineup = _ready(self._lineup.switched(expert, on=on))
            body = {"expert": expert, "on": on, "switched_off": list(lineup.off)}
            self._audit.append(SWITCHED, {**body, "pool_sha256": lineup.identity["pool_sha256"]})
            self._use(lineup)
            self._save_switches()
            return lineup.off

    def reload(self) -> dict[str, Any]:
        """Read the pool again and use it from the next batch on. After an error the old one stays in use."""
        if self._load_pool is None:
            raise InputError("This service was started with a pool in memory: there is nothing to load again.")
        with self._changing:
            old, pool = self._lineup, self._load_pool()
            lineup = self._checked(old, pool)
            before, after = old.identity["pool_sha256"], lineup.identity["pool_sha256"]
            changed = old.identity["provenance"] != lineup.identity["provenance"]
            body = {"before": before, "after": after, "changed": changed, "experts": list(pool.names)}
            names = [stream.name for stream in self._registry.all()] if changed else []
            body = {**body, "switched_off": list(lineup.off), "restarted": names}
            self._audit.append(RELOADED, body)
            self._use(lineup)
            self._save_switches()
            return body

    def close(self) -> None:
        """Release the state folder; every state is in it already."""
        self._folder.close()

    def _step(self, stream: ServedStream, pictures: Sequence[Picture]) -> "_Computed":
        with self._compute:
            lineup = self._lineup
            before, reason = StreamState.start(lineup), stream.restarted
            if stream.state is not None:
                before, reason = stream.state.on(lineup)
            outcome = take_step(lineup, before, pictures, self.settings.guards, self.settings.weights_hash)
        return _Computed(lineup, before, outcome, reason)

    def _body(self, stream: ServedStream, done: "_Computed", pictures: Sequence[Picture]) -> dict[str, Any]:
        """The audit line of a step. It holds pictures as hashes only."""
        lineup = done.lineup
        return {
            "stream": stream.name,
            "step": stream.steps,
            "images_so_far": stream.images + len(pictures),
            "inputs": [input_of(picture) for picture in pictures],
            **self._circumstances(lineup),
            "graph": done.outcome.step.graph,
            "restarted": done.restarted,
            "state_before": done.before.in_line,
            "state_after": done.outcome.state.in_line,
            **measured(done.outcome, lineup, self.settings.guards),
        }

    def _circumstances(self, lineup: Lineup) -> dict[str, Any]:
        """All that a step's numbers depend on beside pictures and state."""
        about = {**lineup.identity, "experts": list(lineup.pool.names), "switched_off": list(lineup.off)}
        settings = {"guards": self.settings.guards.to_json(), "weights_hash": self.settings.weights_hash}
        return {**about, **settings, "versions": self._versions, **environment(lineup.pool)}

    def _limits(self) -> dict[str, Any]:
        return {name: value for name, value in self.settings.to_json().items() if name.startswith("most_")}

    def _use(self, lineup: Lineup) -> None:
        with self._compute:
            self._lineup = lineup

    def _checked(self, old: Lineup, pool: ExpertPool) -> Lineup:
        """The line-up of a pool that was read again; refused where it cannot replace the old one."""
        if pool.classes != old.pool.classes:
            raise PoolError(
                f"The pool now has the classes {pool.classes}, not {old.pool.classes}: start a new service."
            )
        self.settings.guards.require_expert(pool.names)
        return _ready(Lineup(pool, old.method, old.options, [name for name in old.off if name in pool.names]))

    def _save(self, stream: ServedStream) -> None:
        counts = {"stream": stream.name, "steps": stream.steps, "images": stream.images}
        settings = {"method": self._lineup.method, "options": self._lineup.options}
        with _tolerate_unwritten_state():
            self._folder.save({**counts, **settings, "state": stream.state.json if stream.state else None})

    def _save_switches(self) -> None:
        with _tolerate_unwritten_state():
            self._folder.save_switches(self._lineup.off)

    def _restore(self, earlier: Recovery) -> list[dict[str, Any]]:
        """Restore the streams of an earlier process; return what the log says about them."""
        saved = earlier.streams
        for name in self._folder.streams().keys() - saved.keys():
            self._folder.delete(name)  # deleted according to the log
        self._save_switches()
        streams = [ServedStream(each["stream"], steps=each["steps"], images=each["images"]) for each in saved.values()]
        for stream, each in zip(streams, saved.values(), strict=True):
            stream.state, stream.restarted = restored(each, self._lineup)
            stream.alarms = earlier.alarms.get(stream.name)
            self._registry.add(stream)
            self._save(stream)
        return [{"stream": each.name, "steps": each.steps, "restarted": each.restarted} for each in streams]


@dataclass(frozen=True)
class _Computed:
    """A step that was computed and is not in the log yet."""

    lineup: Lineup
    before: StreamState
    outcome: Outcome
    restarted: str | None


def _ready(lineup: Lineup) -> Lineup:
    """Build the method and hash the pool now, not while streams wait; refuse a line-up that the method cannot use."""
    lineup.active_method  # noqa: B018
    lineup.identity  # noqa: B018
    return lineup


@contextmanager
def _tolerate_unwritten_state() -> Iterator[None]:
    """Log a file that cannot be written and go on: its content can be restored from the audit log."""
    try:
        yield
    except OutputError as error:
        log.warning("a state was not written: %s", error)
