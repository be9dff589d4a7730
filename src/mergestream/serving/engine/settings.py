"""Settings of the engine, chosen by an administrator."""

from dataclasses import dataclass, field

from mergestream.runtime.option_checks import one_of, whole_number
from mergestream.serving.engine.service_step import RECIPE, WEIGHTS
from mergestream.serving.guards.findings import GuardSettings


@dataclass(frozen=True)
class EngineSettings:
    """most_streams    streams at a time
    most_images     pictures in one batch
    weights_hash    'weights': sha-256 of the merged weights in use; 'recipe': of pool, method and coefficients, for
                    networks so large that hashing their weights takes longer than the step
    """

    guards: GuardSettings = field(default_factory=GuardSettings)
    most_streams: int = 64
    most_images: int = 256
    weights_hash: str = WEIGHTS

    def __post_init__(self) -> None:
        for limit in ("most_streams", "most_images"):
            whole_number(limit, getattr(self, limit), low=1)
        one_of("weights_hash", self.weights_hash, (WEIGHTS, RECIPE))
