"""Methods that merge by statistics of the experts: shipped by their sites, or measured on the stream so far."""

import hashlib
from abc import abstractmethod
from dataclasses import dataclass

from mergestream.methods.base import option
from mergestream.methods.merged_model import MergedModel
from mergestream.methods.state import S
from mergestream.pool.checkpoint import Statistics
from mergestream.runtime.errors import PoolError
from mergestream.runtime.option_checks import one_of, whole_number


@dataclass(kw_only=True, eq=False, repr=False)
class StatisticsModel(MergedModel[S]):
    """statistics='source': each site measured its expert on its own images and shipped the result with it; 'target':
    each expert is measured on the unlabelled stream, this batch included."""

    statistics: str = option("source", one_of, ("source", "target"))
    examples: int = option(1600, whole_number, low=1)  # images of the target to measure; then the model is settled

    def __post_init__(self) -> None:
        self.learns = self.statistics == "target"
        super().__post_init__()
        if not self.learns:
            self.needs, self._shipped = ("statistics",), self._shipped_by_sites()

    @property
    @abstractmethod
    def _kind(self) -> str:
        """The kind of statistics that sites ship for it."""

    def _how_to_measure(self) -> str:
        return f"measure_statistics(pool, {{'{self.pool.names[0]}': its_images, ...}}, ['{self._kind}'])"

    def _shipped_by_sites(self) -> dict[str, Statistics]:
        """Every expert's statistics by its name; refused where one has none of this kind."""
        own = {name: each for name, each in zip(self.pool.names, self.pool.statistics, strict=True) if each is not None}
        lacking = [name for name in self.pool.names if name not in own or self._kind not in own[name].kinds]
        if lacking:
            family = self._kind.split("-")[0]
            others = lacking[0] in own and any(kind.split("-")[0] == family for kind in own[lacking[0]].kinds)
            shipped = "shipped those of another pool or of other options" if others else "shipped none"
            raise PoolError(
                f"'{self.name}' needs statistics measured on the experts' own images ('{family}'); "
                f"{', '.join(lacking)} {shipped}. Measure them: pool = mergestream.{self._how_to_measure()}, "
                f"then pool.save(folder). Or use statistics='target', which measures on the stream."
            )
        return own

    def source_hashes(self) -> dict[str, str]:
        if self.learns:
            return {}
        digests = [own.fingerprint(self._kind) for own in self._shipped.values()]
        return {"statistics": hashlib.sha256("".join(digests).encode()).hexdigest()}
