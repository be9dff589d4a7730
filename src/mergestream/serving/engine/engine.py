"""The engine of the service: decoded pictures in, an answer out, and a line in the audit log before it leaves.

Locks, always taken in this order: a stream's own, while one of its batches is answered, so that its steps follow each
other; `_compute`, one for the device, while a batch is computed. Nothing is written to the disk inside the second.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from mergestream.data.intake.pictures import Picture
from mergestream.methods import create_method
from mergestream.pool.expert_card import library_versions
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError, PoolError
from mergestream.serving.audit import line_kinds
from mergestream.serving.audit.lines import Encoded, canonical, link_of, now
from mergestream.serving.audit.log_writer import AuditLog, NoAuditLog
from mergestream.serving.engine.answers import Answer, abstention_of, logged_answer
from mergestream.serving.engine.lineup import Lineup, ready, reloaded
from mergestream.serving.engine.persistence import LoggedAnswer, Recovery, StateFolder
from mergestream.serving.engine.registry import Registry, ServedStream
from mergestream.serving.engine.revocation_watch import (
    NoExpertError,
    RevocationWatch,
    without_revoked,
)
from mergestream.serving.engine.service_step import STATE, WEIGHTS, ComputedStep, environment, take_step
from mergestream.serving.engine.stream_state import OTHER_METHOD, OTHER_POOL, StreamState, restored
from mergestream.serving.guards.findings import GuardSettings, acknowledge, alarms_after, codes_to_acknowledge
from mergestream.serving.quality.quality_monitor import QualityMonitor, QualitySettings
from mergestream.serving.quality.step_sums import Window, with_step
from mergestream.serving.tracing import span

MOST_IMAGES = 256  # in one batch


class Engine:
    """Independent streams over one pool, for any number of threads. `recent`: lines of the log, to restore from."""

    def __init__(
        self,
        pool: ExpertPool,
        method: str,
        options: Mapping[str, Any],
        *,
        audit: AuditLog | NoAuditLog,
        state_folder: Path,
        load_pool: Callable[[], ExpertPool],
        revocations: RevocationWatch,
        guards: GuardSettings | None = None,
        quality: QualitySettings | None = None,
        most_streams: int = 64,
        weights_hash: str | None = None,
        recent: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        self._guards = guards or GuardSettings()
        self._weights_hash = weights_hash or (WEIGHTS if pool.device.type == "cpu" else STATE)
        self._logged_guards = Encoded(canonical(asdict(self._guards)))
        self._require_usable(pool)
        self._quality = QualityMonitor(quality or QualitySettings(), pool)
        self.audit, self._load_pool, self._revocations = audit, load_pool, revocations
        self._stopped: str | None = None  # why nothing is answered any more
        self._compute, self._changing = threading.Lock(), threading.Lock()
        self._versions = library_versions()
        self._registry = Registry(most_streams)
        # With the defaults written out: another version may have others when it replays the log.
        whole = create_method(method, pool, **options).options()
        self._folder = StateFolder(state_folder)
        try:
            earlier = Recovery(self._folder.streams(), recent, pool.classes)
            self._history = [each for answers in earlier.answers.values() for each in answers]
            off = self._folder.switched_off() if earlier.off is None else earlier.off
            # Pool, method and switched-off experts for the next batch; replaced, never changed.
            self.lineup = Lineup(pool, method, whole, self._revocations.off(pool, off))
            about = {
                **self._circumstances(self.lineup),
                "most_streams": most_streams,
                "most_images": MOST_IMAGES,
                "classes": list(pool.classes),
                "streams": self._restore(earlier),
                "revocations": self._revocations.newest.version,
            }
            self.audit.append(line_kinds.STARTED, about)
            self._save_service()
        except BaseException:
            self._folder.close()
            raise

    def answer(self, stream: str, pictures: Sequence[Picture], *, single: bool = False) -> Answer:
        """Answer the next batch of a stream. After an error the stream is as it was before.

        `single`: each picture is a step of its own, in order, answered from the steps before it and itself alone.
        """
        if not 1 <= len(pictures) <= MOST_IMAGES:
            raise InputError(f"A batch holds 1 to {MOST_IMAGES} pictures; got {len(pictures)}.")
        batches = [[picture] for picture in pictures] if single else [pictures]
        self._apply_revocations()
        about = {"stream": stream, "images": len(pictures)}
        with self._registry.held(stream, create=True) as held, span("step", **about):
            steps = self._steps(held, batches)
            started = time.perf_counter()
            self._folder.save_large(stream, steps[-1].outcome.state, held.state)
            lines = self.audit.append_all(line_kinds.STEP, [step.body for step in steps])
            held.state, held.restarted, held.line = steps[-1].outcome.state, None, link_of(lines[-1])
            self._estimate(held, steps[-1].quality)
            held.steps, held.images = held.steps + len(steps), held.images + len(pictures)
            with span("save"):
                self._save(held)
            written = time.perf_counter() - started
            answers = [self._answer(held, *each, written) for each in zip(steps, lines, strict=True)]
            return Answer.of_singles(answers) if single else answers[0]

    def history(self) -> list[LoggedAnswer]:
        """The last answers of an earlier process, as far as the log holds them."""
        return self._history

    def describe(self) -> dict[str, Any]:
        lineup = self.lineup
        return lineup.describe(self._revocations.names(lineup.pool.cards))

    def streams(self) -> list[dict[str, Any]]:
        return [stream.describe() for stream in self._registry.all()]

    def reset(self, stream: str) -> None:
        """Forget a stream's averages and the memory of its guard rails; its steps go on counting."""
        with self._registry.held(stream) as held:
            line = self.audit.append(line_kinds.RESET, {"stream": stream, "steps": held.steps, "images": held.images})
            held.state, held.restarted, held.line = None, None, link_of(line)
            self._estimate(held, ())
            self._save(held)

    def acknowledge(self, stream: str, *, name: str, note: str, by: str) -> None:
        """Log that a person, under the token of `by`, knows of the stream's alarms. They stay until they end."""
        with self._registry.held(stream) as held:
            codes = codes_to_acknowledge(held.alarms)
            body = {"stream": stream, "codes": codes, "name": name, "note": note, "by": by}
            line = self.audit.append(line_kinds.ACKNOWLEDGED, body)
            held.alarms = acknowledge(held.alarms or (), name, line.get("time") or now())

    def delete(self, stream: str) -> None:
        with self._registry.held(stream) as held:
            self.audit.append(line_kinds.DELETED, {"stream": stream, "steps": held.steps, "images": held.images})
            try:
                self._folder.delete(stream)
            finally:  # only now may another stream of that name begin
                self._registry.remove(held)
            self._save_service()

    def switch(self, expert: str, *, on: bool) -> tuple[str, ...]:
        """Switch an expert on or off for every stream's next batch; return the experts that are off."""
        with self._changing:
            if on and (reason := self._revocations.names(self.lineup.pool.cards).get(expert)):
                raise PoolError(f"{reason} It cannot be switched on.")
            lineup = ready(self.lineup.switched(expert, on=on))
            body = {"expert": expert, "on": on, "switched_off": list(lineup.off)}
            self.audit.append(line_kinds.SWITCHED, {**body, "pool_sha256": lineup.identity["pool_sha256"]})
            self._use(lineup)
            return lineup.off

    def reload(self) -> dict[str, Any]:
        """Read the pool again and use it from the next batch on. After an error the old one stays in use."""
        with self._changing:
            old, pool = self.lineup, self._load_pool()
            self._look_at_revocations()
            if pool.classes != old.pool.classes:
                raise PoolError(
                    f"The pool now has the classes {pool.classes}, not {old.pool.classes}: start a new service."
                )
            self._require_usable(pool)
            self._quality.require(pool)
            # A newer version of a revoked expert is another expert.
            switched = [name for name in old.off if name not in self._revocations.names(old.pool.cards)]
            lineup = ready(Lineup(pool, old.method, old.options, self._revocations.off(pool, switched)))
            states = {stream.name: stream.state for stream in self._registry.all()}
            restarted = [name for name, state in states.items() if state is not None and state.on(lineup)[1]]
            body = {**reloaded(old, lineup), "restarted": restarted}
            self.audit.append(line_kinds.RELOADED, body)
            self._use(lineup)
            self._stopped = None
            return body

    def _apply_revocations(self) -> None:
        """Switch newly revoked experts off before the next batch. Looks at the disk every few seconds only."""
        if self._revocations.due and self._changing.acquire(blocking=False):  # a reload looks by itself
            try:
                self._look_at_revocations()
            finally:
                self._changing.release()
        if self._stopped is not None:
            raise NoExpertError(self._stopped)

    def _look_at_revocations(self) -> None:
        if self._stopped is None:
            try:
                lineup = without_revoked(self._revocations, self.lineup, self.audit)
            except NoExpertError as error:
                self._stopped = str(error)
            else:
                if lineup is not self.lineup:
                    self._use(lineup)

    def close(self) -> None:
        """Release the state folder, where every state is already, and the log."""
        self._save_service()
        self._folder.close()
        self.audit.close()

    def _steps(self, stream: ServedStream, batches: Sequence[Sequence[Picture]]) -> list[ComputedStep]:
        """Compute the next steps of a stream. Other streams may compute in between."""
        state, images, window, steps = stream.state, stream.images, stream.window, list[ComputedStep]()
        for number, pictures in enumerate(batches, start=stream.steps):
            started = time.perf_counter()
            with self._compute:
                lineup = self.lineup
                before, reason = (StreamState.start(lineup), stream.restarted) if state is None else state.on(lineup)
                outcome = take_step(lineup, before, pictures, self._guards, self._weights_hash)
            state, images = outcome.state, images + len(pictures)
            sums, sets = self._quality.measure(lineup, outcome.numbers, outcome.logits, window)
            window = with_step(window, sums)
            body = {
                "stream": stream.name,
                "step": number,
                "images_so_far": images,
                **self._circumstances(lineup),
                "graph": outcome.graph,
                "restarted": reason,
                "state_before": before.encoded_in_line,
                "state_after": state.encoded_in_line,
                **outcome.numbers,
                "quality": asdict(sums),
                **({} if sets is None else {"prediction_sets": sets}),
                "seconds": time.perf_counter() - started,
            }
            steps.append(ComputedStep(lineup, outcome, body, window))
        return steps

    def _estimate(self, stream: ServedStream, window: Window) -> None:
        stream.window, stream.quality = window, self._quality.summary(stream.name, window, self.lineup.pool.classes)

    def _answer(self, stream: ServedStream, step: ComputedStep, line: Mapping[str, Any], written: float) -> Answer:
        """The answer to a step whose line is in the log; the stream's alarms after it."""
        pool = step.lineup.pool
        answer = logged_answer(step.body, pool.classes)
        stream.alarms = alarms_after(stream.alarms, answer.findings, answer.step, line.get("time") or now())
        return replace(
            answer,
            probabilities=tuple(map(tuple, torch.softmax(step.outcome.logits, dim=-1).tolist())),
            abstention=abstention_of(len(answer.abstained), pool, self._guards),
            audit=link_of(line),
            seconds=answer.seconds + written,
            begun=tuple(alarm for alarm in stream.alarms if alarm.step == answer.step),
        )

    def _circumstances(self, lineup: Lineup) -> dict[str, Any]:
        """All that a step's numbers depend on beside pictures and state."""
        signers = lineup.pool.signed_by
        signed = {} if signers is None else {"signed_by": list(signers.values())}  # in the order of the experts
        about = {**lineup.identity, **signed, "experts": list(lineup.pool.names), "switched_off": list(lineup.off)}
        about["experts_sha256"] = [card.weights_sha256 for card in lineup.pool.cards]  # for a recall
        settings = {"guards": self._logged_guards, "weights_hash": self._weights_hash}
        return {**about, **settings, "versions": self._versions, **environment(lineup.pool)}

    def _require_usable(self, pool: ExpertPool) -> None:
        self._guards.require_expert(pool.names)
        if len(pool.classes) < 2:
            raise PoolError(f"The pool has one class only, {pool.classes[0]!r}: it cannot tell images apart.")

    def _use(self, lineup: Lineup) -> None:
        with self._compute:
            self.lineup = lineup
        self._save_service()

    def _save(self, stream: ServedStream, *, tidy: bool = True) -> None:
        counts = {"stream": stream.name, "steps": stream.steps, "images": stream.images}
        settings = {"method": self.lineup.method, "options": self.lineup.options}
        self._folder.save({**counts, **settings, "audit": stream.line}, stream.state, tidy=tidy)

    def _save_service(self) -> None:
        self._folder.save_service(self.lineup.off, self.audit.last)

    def _restore(self, earlier: Recovery) -> list[dict[str, Any]]:
        """Restore the streams of an earlier process; return what the log says about them."""
        saved = earlier.streams
        for name in (self._folder.streams().keys() | self._folder.leftovers()) - saved.keys():
            self._folder.delete(name)  # deleted according to the log
        streams = [ServedStream(each["stream"], steps=each["steps"], images=each["images"]) for each in saved.values()]
        for stream, each in zip(streams, saved.values(), strict=True):
            stream.state, stream.restarted = restored(each, self.lineup, self._folder.large_state)
            stream.alarms, stream.line = earlier.alarms.get(stream.name), each.get("audit")
            self._estimate(stream, earlier.quality.get(stream.name, ()))
            self._registry.add(stream)
            # Whoever started with a wrong pool or method can go back until the stream's next step.
            self._save(stream, tidy=stream.restarted not in (OTHER_METHOD, OTHER_POOL))
        return [{"stream": each.name, "steps": each.steps, "restarted": each.restarted} for each in streams]
