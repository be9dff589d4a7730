"""Everything that a benchmark's tables and reports show, as one record."""

from dataclasses import asdict, dataclass, field
from typing import Any

from mergestream.bench.analysis.collapse import Collapse, describe_collapses
from mergestream.bench.analysis.comparison import Duel, ResultRow
from mergestream.bench.analysis.group_intervals import GroupedRow
from mergestream.bench.analysis.standings import Standing
from mergestream.bench.analysis.subgroups import SubgroupRow
from mergestream.pool.expert_card import library_versions

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class BenchFindings:
    """Results of a benchmark with the plan and command that gave them."""

    plan: dict[str, Any]
    command: str
    rows: list[ResultRow]
    duels: list[Duel]
    standings: list[Standing]
    majority_shares: dict[str, float]
    subgroups: list[SubgroupRow]
    collapses: list[Collapse]
    left_out: list[tuple[str, str]]
    warnings: list[str]
    runs: list[dict[str, Any]]
    dataset: str
    synthetic: bool
    network: str
    grouped: list[GroupedRow] = field(default_factory=list)  # where the data name slides or patients

    @property
    def sentences(self) -> list[str]:
        """Warnings to read beside the tables."""
        left_out = [f"Left out: {label}. {reason}" for label, reason in self.left_out]
        return [*self.warnings, *left_out, *describe_collapses(self.collapses)]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "dataset": self.dataset,
            "synthetic": self.synthetic,
            "network": self.network,
            "command": self.command,
            "plan": self.plan,
            "results": [row.to_json() for row in self.rows],
            "duels": [asdict(each) for each in self.duels],
            "majority_shares": self.majority_shares,
            "standings": [asdict(each) for each in self.standings],
            "subgroups": [asdict(each) for each in self.subgroups],
            "collapses": [asdict(each) for each in self.collapses],
            "left_out": [{"method": label, "why": reason} for label, reason in self.left_out],
            "warnings": self.warnings,
            "environment": library_versions(),
            **({"grouped": [asdict(row) for row in self.grouped]} if self.grouped else {}),
        }
