"""All that a report shows, computed before a word of it is written."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from mergestream.bench.analysis.comparison import ORACLE, SINGLES, Duel
from mergestream.bench.analysis.confidence import Reliability, RiskCoverage
from mergestream.bench.analysis.cost import Cost
from mergestream.bench.analysis.provenance import Provenance
from mergestream.bench.analysis.traces import Trace
from mergestream.bench.claims.findings import Finding
from mergestream.bench.drift.weights import Drift
from mergestream.bench.landscape.outcome import Landscape
from mergestream.bench.report.bench_report import BenchFindings
from mergestream.bench.report.page import Section


@dataclass(frozen=True)
class ReportFindings:
    """A benchmark's findings and what only a report shows."""

    title: str
    bench: BenchFindings
    followed: Sequence[Trace]  # the reference method's runs of one seed and pool
    ablation: Sequence[Duel]  # the full method against each of its variants
    costs: Sequence[Cost]
    model_bytes: int | None
    reliabilities: Sequence[Reliability]
    risk_coverages: Sequence[RiskCoverage]
    checked: Sequence[str]  # what was looked for and not found
    provenance: Provenance
    claims: Sequence[Finding] = ()
    drift: Drift | None = None
    landscape: Landscape | None = None
    more: Sequence[Section] = field(default_factory=tuple)  # sections of a command's own

    @property
    def streams(self) -> list[str]:
        return list(dict.fromkeys(row.stream for row in self.bench.rows))

    @property
    def labels(self) -> list[str]:
        """What tables call the methods, bounds among them."""
        return list(dict.fromkeys(row.label for row in self.bench.rows))

    @property
    def methods(self) -> list[str]:
        return [label for label in self.labels if label not in (SINGLES, ORACLE)]

    @property
    def plain_methods(self) -> list[str]:
        """Without variants, which would crowd a figure; all of them where nothing else is there."""
        return [label for label in self.methods if "(" not in label] or self.methods

    @property
    def telling_streams(self) -> list[str]:
        """The first stream, and the one whose batches are the most skewed: what single figures show."""
        skewed = max(self.streams, key=lambda name: self.bench.majority_shares.get(name, 0.0))
        return list(dict.fromkeys([self.streams[0], skewed]))
