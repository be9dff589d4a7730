"""A logged step computed again from its line and its files: what `audit replay` compares, bit by bit."""

from collections.abc import Mapping, Sequence
from typing import Any

from mergestream.data.intake.limits import Limits
from mergestream.data.intake.pictures import Picture
from mergestream.data.intake.reading import read_upload
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError
from mergestream.runtime.seeding import cpu_threads
from mergestream.serving.engine.answers import input_of, measured
from mergestream.serving.engine.encoding import is_whole, state_from_json, state_in_line, state_to_json
from mergestream.serving.engine.registry import State
from mergestream.serving.engine.stepping import take_step
from mergestream.serving.engine.switching import Lineup
from mergestream.serving.guards.findings import GuardSettings


class Remembered:
    """States too large for a line, as they were computed: the last of every stream, found by its hash."""

    def __init__(self) -> None:
        self._states: dict[str, tuple[str, dict[str, Any]]] = {}

    def keep(self, stream: str, state: dict[str, Any] | None) -> dict[str, Any] | None:
        """The state as a line holds it."""
        told = state_in_line(state)
        if state is not None and not is_whole(told):
            self._states[stream] = (told["sha256"], state)  # type: ignore[index]
        return told

    def find(self, stream: str, told: Mapping[str, Any]) -> dict[str, Any] | None:
        sha256, state = self._states.get(stream, (None, None))
        return state if sha256 == told["sha256"] else None


def recompute(
    body: Mapping[str, Any],
    files: Mapping[str, bytes],
    /,
    *,
    pool: ExpertPool,
    limits: Limits | None = None,
    remembered: Remembered | None = None,
) -> dict[str, Any]:
    """Every field of a step's line that follows from its files (bytes by sha-256), its state and the experts."""
    try:
        pictures = _pictures(body["inputs"], files, limits or Limits())
        return recompute_step(body, pictures, pool, remembered)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(f"This is not the line of a step of this version of mergestream: {error!r}.") from error


def recompute_step(
    body: Mapping[str, Any], pictures: Sequence[Picture], pool: ExpertPool, remembered: Remembered | None = None
) -> dict[str, Any]:
    """The same from pictures that are decoded already, in the line's order."""
    remembered = remembered or Remembered()
    lineup, state = _lineup(body, pool), _state_before(body, remembered)
    settings = GuardSettings.from_json(body["guards"])
    method = lineup.create_method()
    method.load_state_dict({**method.identity, "state": state.method})
    if "graph" in body:
        method.repeat(body["graph"])
    with cpu_threads(int(body["threads"])):
        outcome = take_step(lineup, method, state.memory, pictures, settings, body["weights_hash"])
    after = State(state.pool_sha256, state.experts, outcome.method_state, outcome.memory)
    return {
        "inputs": [input_of(picture) for picture in pictures],
        **measured(outcome, lineup, settings),
        "state_after": remembered.keep(body["stream"], state_to_json(after)),
    }


def _pictures(inputs: Sequence[Mapping[str, Any]], files: Mapping[str, bytes], limits: Limits) -> list[Picture]:
    """The step's pictures in its order; each file is decoded once."""
    decoded = {sha256: read_upload(files[sha256], limits) for sha256 in {image["sha256"] for image in inputs}}
    found = []
    for image in inputs:
        frame = image.get("frame")
        chosen = [picture for picture in decoded[image["sha256"]] if picture.frame == frame]
        if len(chosen) != 1:
            raise InputError(f"A file of this step holds no image {frame or 1}, as it did then.")
        found += chosen
    return found


def _lineup(body: Mapping[str, Any], pool: ExpertPool) -> Lineup:
    if pool.fingerprint() != body["pool_sha256"]:
        raise InputError(
            f"The line is about the pool {body['pool_sha256'][:12]}…, and this is {pool.fingerprint()[:12]}…. "
            "Give the folder of the pool as it was then."
        )
    return Lineup(pool, body["method"], body["options"], body["switched_off"])


def _state_before(body: Mapping[str, Any], remembered: Remembered) -> State:
    before = body["state_before"]
    state = state_from_json(before if is_whole(before) else remembered.find(body["stream"], before))
    if state is None:
        raise InputError(
            "The state before this step was too large for its line, which holds its hash only: such a step can be "
            "computed again only after all steps of its stream before it, by a replay of the whole log."
        )
    return state
