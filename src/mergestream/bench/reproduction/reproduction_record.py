"""The record of a reproduction: what was measured, on what, and what was left out. Tables and figures come from it."""

from dataclasses import dataclass
from typing import Any

from mergestream.bench.analysis.comparison import Estimate
from mergestream.bench.claims.claim_finding import ClaimFinding
from mergestream.bench.claims.theory_checks import DriftPoint, ErrorParts
from mergestream.bench.reproduction.dataset_search import DatasetPlace
from mergestream.runtime.json_record import JsonRecord


@dataclass(frozen=True)
class MeasuredRow:
    """One method on one stream of one data set: the mean over its targets and seeds."""

    part: str
    dataset: str
    network: str
    row: str  # the paper's name of the method, or ours where it has none
    label: str  # the method as mergestream spells it
    stream: str
    accuracy: Estimate  # 0 to 1
    per_target: dict[str, float]
    majority: float  # mean share of a batch's commonest class
    forwards: float  # per image, experts and merged models together
    seconds: float | None  # of all steps together, where they were timed
    runs: list[str]


@dataclass(frozen=True)
class TrainedExpert:
    """One expert on its own validation split."""

    dataset: str
    network: str
    domain: str
    seed: int
    accuracy: float
    loss: float
    steps: int
    candidates: int


@dataclass(frozen=True)
class TheoryCheck:
    """The paper's theory on one data set and backbone."""

    dataset: str
    network: str
    parts: ErrorParts
    findings: list[ClaimFinding]
    drift: list[DriftPoint]


@dataclass(frozen=True)
class PoolMemory:
    """Gigabytes (10^9 bytes) of the experts' weights, and the peak of one step on a GPU."""

    experts: int
    weights: float
    peak: float | None
    device: str


@dataclass(frozen=True)
class ReproductionRecord(JsonRecord):
    kind = "reproduction"
    command: str
    smoke: bool
    parts: tuple[str, ...]
    backbones: tuple[str, ...]
    places: tuple[DatasetPlace, ...]
    rows: tuple[MeasuredRow, ...]
    experts: tuple[TrainedExpert, ...]
    theory: tuple[TheoryCheck, ...]
    memory: PoolMemory | None
    recipe: dict[str, Any]
    changes: list[str]  # where training was not the paper's, by request
    environment: dict[str, str]

    def of_part(self, part: str) -> list[MeasuredRow]:
        return [row for row in self.rows if row.part == part]

    def find(self, part: str, dataset: str, network: str, row: str) -> MeasuredRow | None:
        """The first row that matches, of any stream."""
        rows = (
            each for each in self.of_part(part) if (each.dataset, each.network, each.row) == (dataset, network, row)
        )
        return next(rows, None)
