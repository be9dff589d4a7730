"""What methods share that merge by statistics: shipped by the experts' sites, or measured on the stream so far."""

import hashlib
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from mergestream.methods.merged import MergedModel
from mergestream.pool.expert_pool import ExpertPool
from mergestream.runtime.errors import PoolError
from mergestream.runtime.option_checks import one_of, whole_number


class MeasuredModel(MergedModel):
    """Options of all of them:

    statistics   'source': each site measured its expert on its own images and shipped the result with it;
                 'target': each expert is measured on the unlabelled stream, this batch included
    examples     how many images of the target are measured; the merged model is settled after them
    """

    def __init__(
        self, pool: ExpertPool, *, statistics: str, examples: int, head_rows: str, recalibrate_bn: bool
    ) -> None:
        self.statistics = one_of("statistics", statistics, ("source", "target"))
        self.examples = whole_number("examples", examples, low=1)
        super().__init__(pool, head_rows=head_rows, recalibrate_bn=recalibrate_bn)
        if not self._learns:
            self.needs = ("statistics",)  # type: ignore[misc]
            self._require_shipped()
        self._seen = 0

    @property
    def _learns(self) -> bool:
        return self.statistics == "target"

    @property
    @abstractmethod
    def _kind(self) -> str:
        """The kind of statistics that sites ship for it."""

    @abstractmethod
    def _measure(self, images: Tensor) -> bool:
        """Add a prepared batch of the target to the statistics, whose tensors are never changed in place.

        Returns whether the merged weights are stale after it.
        """

    def _how_to_measure(self) -> str:
        return f"measure_statistics(pool, {{'{self.pool.names[0]}': its_images, ...}}, ['{self._kind}'])"

    def _observe(self, images: Tensor) -> None:
        if self._learns and self._seen < self.examples:
            self._stale = self._measure(images)
            self._seen += len(images)

    def _require_shipped(self) -> None:
        lacking = [
            name
            for name, own in zip(self.pool.names, self.pool.statistics, strict=True)
            if own is None or self._kind not in own.kinds
        ]
        if lacking:
            own = self.pool.statistics[self.pool.index(lacking[0])]
            family = self._kind.split("-")[0]
            others = own is not None and any(kind.split("-")[0] == family for kind in own.kinds)
            state = "shipped those of another pool or of other options" if others else "shipped none"
            raise PoolError(
                f"'{self.name}' needs statistics measured on the experts' own images ('{family}'); "
                f"{', '.join(lacking)} {state}. Measure them: pool = mergestream.{self._how_to_measure()}, "
                f"then pool.save(folder). Or use statistics='target', which measures on the stream."
            )

    def _sources(self) -> dict[str, str | None]:
        if self._learns:
            return super()._sources()
        digests = [own.fingerprint(self._kind) for own in self.pool.statistics if own is not None]
        return {**super()._sources(), "statistics": hashlib.sha256("".join(digests).encode()).hexdigest()}

    def _state(self) -> dict[str, Any]:
        return {"seen": self._seen}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        self._seen = state.get("seen", 0)
