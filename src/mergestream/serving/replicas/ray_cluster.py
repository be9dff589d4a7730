"""Start replicas on a Ray cluster: that of RAY_ADDRESS, or a local one that ends with this process.

Each replica is a Ray Serve deployment with a number, a state folder and an audit log of its own. Serve restarts it
if it dies, and it continues from its folder.
"""

import logging
import os
import secrets
from collections.abc import Callable
from typing import Any

import torch

from mergestream.runtime.errors import InputError, WorkerError
from mergestream.runtime.parallel import require_reachable
from mergestream.serving.open_engine import with_device
from mergestream.serving.options import ServeOptions
from mergestream.serving.replicas.replica import Replica, ReplicaGone, Reply
from mergestream.serving.replicas.replicated_engine import ReplicatedEngine

APPLICATION = "mergestream-{number}"
MOST_CALLS = 64  # in progress per replica; its locks put them in order


class RayHandle:
    """A replica behind Ray Serve; `seconds`: time limit of a call."""

    def __init__(self, handle: Any, seconds: float) -> None:
        self._handle, self._seconds = handle, seconds

    def call(self, method: str, *arguments: Any, **options: Any) -> Reply:
        import ray

        try:
            reply: Reply = self._handle.call.remote(method, *arguments, **options).result(timeout_s=self._seconds)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise ReplicaGone(type(error).__name__) from error
        return reply


def require_ray_serve() -> None:
    try:
        from ray import serve  # noqa: F401
    except ImportError as error:
        raise InputError("Scale-out needs Ray Serve: pip install 'mergestream[scale-out]'.") from error


def start_replicas(
    options: ServeOptions, seconds: float = 600.0, *, on_append: Callable[[bool], None] = lambda _: None
) -> ReplicatedEngine:
    """Start replicas on the cluster of RAY_ADDRESS, or on this machine, and wait until they are ready."""
    require_ray_serve()
    options = with_device(options)
    disconnect = _connect(options)
    try:
        handles = _deploy(options.absolute())
        return ReplicatedEngine(
            [RayHandle(each, seconds) for each in handles], on_append=on_append, on_close=disconnect
        )
    except BaseException:
        disconnect()
        raise


def _deploy(options: ServeOptions) -> list[Any]:
    from ray import serve

    # Serve's own HTTP proxy would not ask for tokens.
    serve.start(proxy_location="Disabled")
    deployment = serve.deployment(
        Replica,
        num_replicas=1,
        max_ongoing_requests=MOST_CALLS,
        max_constructor_retry_count=3,
        logging_config={"log_level": "WARNING", "enable_access_log": False},
        ray_actor_options={"num_cpus": _cores(options), "num_gpus": 0 if options.device == "cpu" else 1},
    )
    targets = [
        serve.RunTarget(deployment.bind(options, number), APPLICATION.format(number=number), route_prefix=None)
        for number in range(options.replicas)
    ]
    try:
        handles: list[Any] = serve.run_many(targets)
    except RuntimeError as error:
        hint = "Ray's own logs, in /tmp/ray/session_latest/logs/serve, say more."
        raise WorkerError(f"The replicas did not start: {error} {hint}") from error
    return handles


def _connect(options: ServeOptions) -> Callable[[], None]:
    """Connect to the cluster or start one. Return the function that disconnects, or ends the started one."""
    import ray

    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if ray.is_initialized():
        return lambda: None
    address = os.environ.get("RAY_ADDRESS", "")
    if not address:
        _start_cluster(options)
        return ray.shutdown
    require_reachable(address)
    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except ConnectionError as error:
        raise WorkerError(
            f"The Ray cluster at RAY_ADDRESS={address} refuses the connection: {error}. If it asks for a token, set "
            "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH."
        ) from error
    return ray.shutdown


def _start_cluster(options: ServeOptions) -> None:
    """Start a cluster for these replicas only. It needs a token and stores no image on disk."""
    import ray

    replicas = options.replicas
    if options.device != "cpu" and torch.cuda.device_count() < replicas:
        raise InputError(
            f"Each of {replicas} replicas needs a GPU, and this machine has {torch.cuda.device_count()}. Start "
            "fewer, give --device cpu, or name a larger cluster in RAY_ADDRESS."
        )
    # Ray listens on all addresses of the machine, and would store a token of its own in a readable file.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    ray.init(
        address="local",
        num_cpus=replicas * _cores(options),
        num_gpus=0 if options.device == "cpu" else replicas,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        _system_config={"automatic_object_spilling_enabled": False},
    )


def _cores(options: ServeOptions) -> int:
    """CPU cores per replica."""
    return max(1, torch.get_num_threads() // options.replicas)
