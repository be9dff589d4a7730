"""Engines started on a Ray cluster: the one that RAY_ADDRESS names, or one on this machine that ends with us.

Each engine is a Ray Serve deployment of one replica with a number, a state folder and an audit log of its own: Serve
starts it again wherever it dies, and it goes on from its folder.
"""

import logging
import os
import secrets
from collections.abc import Callable
from typing import Any

import torch

from mergestream.runtime.errors import InputError, WorkerError
from mergestream.runtime.parallel import require_reachable
from mergestream.serving.engine_request import EngineRequest
from mergestream.serving.replicas.ray_engines import PinnedEngines
from mergestream.serving.replicas.replica import PinnedEngine

APPLICATION = "mergestream-{number}"
MOST_UNDER_WAY = 64  # batches that one engine takes at a time; its locks put them in order


def require_ray_serve() -> None:
    try:
        from ray import serve  # noqa: F401
    except ImportError as error:
        raise InputError("Scale-out needs Ray Serve: pip install 'mergestream[scale-out]'.") from error


def start(
    request: EngineRequest, engines: int, seconds: float = 600.0, *, count: Callable[[bool], None] = lambda _: None
) -> PinnedEngines:
    """Start engines on the cluster that RAY_ADDRESS names, or on this machine, and wait until they are ready."""
    if engines < 1:
        raise InputError(f"At least one engine answers, got {engines}.")
    require_ray_serve()
    leave = _enter(request, engines)
    try:
        return PinnedEngines(_deployed(request.absolute(), engines), seconds, count=count, leave=leave)
    except BaseException:
        leave()
        raise


def _deployed(request: EngineRequest, engines: int) -> list[Any]:
    from ray import serve

    # Serve's own HTTP door would ask nobody for a token.
    serve.start(proxy_location="Disabled")
    deployment = serve.deployment(
        PinnedEngine,
        num_replicas=1,
        max_ongoing_requests=MOST_UNDER_WAY,
        max_constructor_retry_count=3,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
        ray_actor_options={"num_cpus": request.threads, "num_gpus": 0 if request.device == "cpu" else 1},
    )
    targets = [
        serve.RunTarget(deployment.bind(request, number), APPLICATION.format(number=number), route_prefix=None)
        for number in range(engines)
    ]
    try:
        handles: list[Any] = serve.run_many(targets)
    except RuntimeError as error:
        why = "Ray's own logs, in /tmp/ray/session_latest/logs/serve, say more."
        raise WorkerError(f"The engines did not start: {error} {why}") from error
    return handles


def _enter(request: EngineRequest, engines: int) -> Callable[[], None]:
    """Join the cluster or begin one; the function that comes back leaves it, or ends the one that was begun."""
    import ray

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if ray.is_initialized():
        return lambda: None
    address = os.environ.get("RAY_ADDRESS", "")
    if address:
        _join(address)
    else:
        _begin(request, engines)
    return ray.shutdown


def _join(address: str) -> None:
    import ray

    require_reachable(address)
    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except ConnectionError as error:
        raise WorkerError(
            f"The Ray cluster at RAY_ADDRESS={address} lets nobody in: {error}. If it asks for a token, set "
            "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH."
        ) from error


def _begin(request: EngineRequest, engines: int) -> None:
    """A cluster for these engines alone, closed to whoever has not its token, that keeps no picture on a disk."""
    import ray

    if request.device != "cpu" and torch.cuda.device_count() < engines:
        raise InputError(
            f"Each of {engines} engines takes a GPU of its own, and this machine has {torch.cuda.device_count()}. Ask "
            f"for fewer, give --device cpu, or name a larger cluster in RAY_ADDRESS."
        )
    # Ray listens at every address of the machine. Its own token would lie in a file that others may read.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray.init(
        address="local",
        num_cpus=engines * request.threads,
        num_gpus=0 if request.device == "cpu" else engines,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        _system_config={"automatic_object_spilling_enabled": False},
    )
