"""A logged step computed again from its line and its files: what `audit replay` compares, bit by bit."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from mergestream.data.intake.input_files import read_upload
from mergestream.data.intake.limits import Limits
from mergestream.data.intake.pictures import Picture
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import InputError
from mergestream.runtime.seeding import cpu_threads
from mergestream.serving.engine.lineup import Lineup
from mergestream.serving.engine.service_step import take_step
from mergestream.serving.engine.stream_state import StreamState, is_whole
from mergestream.serving.guards.findings import GuardSettings

# For files that a service has accepted once, whatever its limits were.
WIDE = Limits(file_bytes=2**33, frames=2**20, images=2**20, decoded_bytes=2**36, seconds=600)
LastStates = dict[str, StreamState]  # of every stream, as computed: a line holds a large state as its hash only


class Reproducer:
    """A `Recompute` over a pool, which is moved to the device and the type of numbers that each line names.

    `others`: the pool as it was before or after experts were replaced or removed; one that only had fewer experts is
    a part of this one.
    """

    def __init__(self, pool: ExpertPool, *others: ExpertPool) -> None:
        self._last: LastStates = {}
        self._pools = (pool, *others)
        self._moved = cache(self._part)

    def __call__(self, body: Mapping[str, Any], files: Mapping[str, bytes], /) -> dict[str, Any]:
        """Every field of a step's line that follows from its files (bytes by sha-256), its state and the experts."""
        try:
            pictures = _pictures(body["inputs"], files)
            return recompute_step(body, pictures, self._pool_for(body), self._last)
        except (KeyError, TypeError, AttributeError) as error:
            raise InputError(f"This is not the line of a step of this version of mergestream: {error!r}.") from error

    def _pool_for(self, body: Mapping[str, Any]) -> ExpertPool:
        dtype = getattr(torch, str(body.get("dtype")), None)
        if not isinstance(dtype, torch.dtype):
            raise InputError("The line does not say in which numbers the step was computed.")
        # A step of a GPU is computed on the CPU where there is none: near, and reported as not exact.
        device = "cuda" if str(body.get("device")).startswith("cuda") and torch.cuda.is_available() else "cpu"
        experts = tuple(body["experts"])
        parts = [self._moved(k, experts, device, dtype) for k, pool in enumerate(self._pools)]
        fitting = (part for part in parts if part is not None and part.fingerprint() == body["pool_sha256"])
        return next(fitting, None) or self._pools[0].to(device, dtype)

    def _part(self, number: int, experts: tuple[str, ...], device: str, dtype: torch.dtype) -> ExpertPool | None:
        """One of the pools with only these experts; None if it lacks one or has them in another order."""
        pool = self._pools[number]
        rest = [name for name in pool.names if name not in experts]
        if tuple(name for name in pool.names if name in experts) != experts:
            return None
        return (pool.without(*rest) if rest else pool).to(device, dtype)


def recompute_step(
    body: Mapping[str, Any], pictures: Sequence[Picture], pool: ExpertPool, last: LastStates | None = None
) -> dict[str, Any]:
    """The same from pictures that are decoded already, in the line's order. `last` is updated."""
    last = {} if last is None else last
    lineup = _lineup(body, pool)
    before = _state_before(body, lineup, last.get(body["stream"]))
    settings = GuardSettings(**body["guards"])
    lineup.active_method.repeat(body["graph"])
    with cpu_threads(int(body["threads"])):
        outcome = take_step(lineup, before, pictures, settings, body["weights_hash"])
    last[body["stream"]] = outcome.state
    return {**outcome.numbers, "state_after": outcome.state.as_logged(body["state_after"])}


def _pictures(inputs: Sequence[Mapping[str, Any]], files: Mapping[str, bytes]) -> list[Picture]:
    """The step's pictures in its order; each file is decoded once."""
    decoded = {sha256: read_upload(files[sha256], WIDE) for sha256 in {image["sha256"] for image in inputs}}
    pictures = []
    for image in inputs:
        frame = image.get("frame")
        chosen = [picture for picture in decoded[image["sha256"]] if picture.frame == frame]
        if len(chosen) != 1:
            raise InputError(f"A file of this step holds no image {frame or 1}, as it did then.")
        pictures += chosen
    return pictures


def _lineup(body: Mapping[str, Any], pool: ExpertPool) -> Lineup:
    if pool.fingerprint() != body["pool_sha256"]:
        raise InputError(
            f"The line is about the pool {body['pool_sha256'][:12]}…, and this is {pool.fingerprint()[:12]}…. "
            "Give the folder of the pool as it was then."
        )
    lineup = Lineup(pool, body["method"], body["options"], body["switched_off"])
    if body["provenance"] != lineup.identity["provenance"]:
        raise InputError(
            "The experts' weights are those of the line, but their cards or the method have changed since, and answers "
            "depend on them. Give the folder of the pool as it was then, and use the version in the line."
        )
    return lineup


def _state_before(body: Mapping[str, Any], lineup: Lineup, last: StreamState | None) -> StreamState:
    before = body["state_before"]
    if is_whole(before):
        return StreamState.from_content(before, lineup)
    # The stream's last state, as it was or on the experts in use since then.
    for state in [] if last is None else [last, last.on(lineup)[0]]:
        if state.as_logged(before) == before:
            return state
    raise InputError(
        "The state before this step was too large for its line, which holds its hash only: such a step can be "
        "computed again only after all steps of its stream before it, by a replay of the whole log."
    )
