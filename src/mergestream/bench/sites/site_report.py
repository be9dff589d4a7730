"""The file that a site sends: what a pool's experts and the candidate methods answered on its own labelled images.

It holds masked counts and rounded means: no image, no identifier, no name of a file, patient or scanner.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from mergestream.functional.masked_counts import Masked, MaskedRow, estimated_scores, estimated_total
from mergestream.methods.recommendation import ChoiceEvidence
from mergestream.methods.site_evidence import SiteEvidence
from mergestream.pool.trust.trusted_signers import TrustedSigners, trusted_signers
from mergestream.runtime.errors import CheckpointError
from mergestream.runtime.files import parse_json, read_json
from mergestream.runtime.json_record import JsonRecord


@dataclass(frozen=True)
class CalibrationBin:
    """Answers of one range of confidence; counts are masked."""

    low: float
    high: float
    images: Masked
    correct: Masked
    confidence: float | None  # mean; None where there are fewer than five images


@dataclass(frozen=True)
class ModelAnswers:
    """Answers of an expert or a method: masked counts, truth by row; a row is None where it would tell too much."""

    confusion: tuple[MaskedRow | None, ...]
    mean_probability: tuple[float, ...]  # per class, rounded
    auroc: float | None  # mean over classes with five images or more on both sides, rounded
    nll: float  # rounded
    calibration: tuple[CalibrationBin, ...] | None  # None where its sums would tell too much
    is_home: bool = False  # trained at this site: the images are those that its training held out


@dataclass(frozen=True)
class PairDistance:
    """How far two experts' probabilities are apart: half of the absolute difference, mean over images, rounded."""

    one: str
    other: str
    distance: float


@dataclass(frozen=True)
class SiteReport(JsonRecord):
    """One site's report. `candidates` were answered by the experts of other sites only."""

    kind: ClassVar[str] = "site report"
    site: str
    dataset: str
    synthetic: bool
    classes: tuple[str, ...]
    class_counts: tuple[Masked, ...]  # 0: the site lacks the class; None: 1 to 4
    experts: dict[str, str]  # sha-256 of the weights by name
    answers: dict[str, ModelAnswers]  # by expert
    candidates: dict[str, ModelAnswers]  # by method
    distances: tuple[PairDistance, ...]
    choice: ChoiceEvidence | None  # the site's part for 'mergestream choose'; None where it has no expert in the pool
    mergestream: str  # version

    def __post_init__(self) -> None:
        size = len(self.classes)
        if len(self.class_counts) != size or set(self.answers) != set(self.experts):
            raise ValueError("classes, counts and experts do not fit together")
        for name, model in {**self.answers, **self.candidates}.items():
            rows = model.confusion
            if len(rows) != size or any(row is not None and len(row) != size for row in rows):
                raise ValueError(f"the confusion of '{name}' is not {size} by {size}")

    @property
    def sizes(self) -> np.ndarray:
        """Estimated images per class [C]."""
        return np.array([estimated_total(count) for count in self.class_counts])

    @property
    def prevalence(self) -> np.ndarray:
        """Estimated shares of the classes [C]."""
        return self.sizes / self.sizes.sum()

    def evidence(self) -> SiteEvidence:
        """What the report says to the correction of answers at other sites."""
        abroad = {name: model for name, model in self.answers.items() if not model.is_home}
        return SiteEvidence(
            self.site,
            self.classes,
            tuple(name for name in self.answers if name not in abroad),
            tuple(self.sizes.tolist()),
            {name: self.experts[name] for name in abroad},
            {name: model.mean_probability for name, model in abroad.items()},
        )

    def scores(self, model: ModelAnswers) -> dict[str, float | None]:
        """Accuracy and balanced accuracy as estimated from the masked counts, and AUROC."""
        return {**estimated_scores(model.confusion, self.class_counts), "auroc": model.auroc}


def read_reports(files: Sequence[Path], require_signed_by: Path | None = None) -> tuple[list[SiteReport], list[str]]:
    """Read reports that can be compared, and who signed them: one class list, one report per site, one pool.

    `require_signed_by`: folder of trusted keys; without it no signature is checked, and no signer returned.
    """
    trusted = trusted_signers(require_signed_by)
    read = [_read_value(file, trusted) for file in files]
    reports = [SiteReport.from_json(value) for _, value in read]
    _require_comparable(reports, files)
    return reports, [signer for signer, _ in read if signer]


def scores_abroad(
    files: Sequence[Path], weights_sha256: str, require_signed_by: Path | None = None
) -> dict[str, dict[str, float]]:
    """Scores of an expert by site, where it was not trained. Reports about other weights are refused."""
    scores = {}
    for report in read_reports(files, require_signed_by)[0] if files else ():
        names = [name for name, sha256 in report.experts.items() if sha256 == weights_sha256]
        if not names:
            raise CheckpointError(f"The report of '{report.site}' is not about these weights.")
        model = report.answers[names[0]]
        if not model.is_home:
            values = {**report.scores(model), "nll": model.nll}
            scores[report.site] = {name: round(value, 3) for name, value in values.items() if value is not None}
    return scores


def _read_value(file: Path, trusted: TrustedSigners | None) -> tuple[str | None, dict[str, Any]]:
    """Who signed a file, where that is checked, and the JSON of the very bytes that were signed."""
    if trusted is None:
        return None, read_json(file, SiteReport.schema_version)
    signer, content = trusted.signed_file(file)
    return signer, parse_json(content, file, SiteReport.schema_version)


def _require_comparable(reports: Sequence[SiteReport], files: Sequence[Path]) -> None:
    first, sites, hashes = reports[0], dict[str, Path](), dict[str, tuple[str, str]]()
    for report, file in zip(reports, files, strict=True):
        if report.classes != first.classes:
            raise CheckpointError(
                f"The reports of '{first.site}' and '{report.site}' are of different classes: "
                f"{', '.join(first.classes)} and {', '.join(report.classes)}. One matrix is of one pool."
            )
        if report.site in sites:
            raise CheckpointError(f"{sites[report.site]} and {file} are both reports of '{report.site}'. Give one.")
        sites[report.site] = file
        for name, sha256 in report.experts.items():
            other, theirs = hashes.setdefault(name, (report.site, sha256))
            if theirs != sha256:
                raise CheckpointError(
                    f"'{other}' and '{report.site}' measured different weights under the name '{name}' "
                    f"({theirs[:12]}… and {sha256[:12]}…). Let both measure the same pool: mergestream site-report."
                )


def read_joined(
    files: Sequence[Path], require_signed_by: Path | None = None
) -> tuple[list[ChoiceEvidence], list[SiteReport]]:
    """The sites' parts for the choice of a method, and the site reports among the files.

    A part is in a file of 'choose --out', or in a site report. A report of a site without an expert has none, but says
    something about sites. `require_signed_by`: folder of trusted keys; without it no signature is checked.
    """
    trusted, parts, reports = trusted_signers(require_signed_by), list[ChoiceEvidence](), dict[Path, SiteReport]()
    for file in files:
        _, value = _read_value(file, trusted)
        if "choice" in value:
            reports[file] = SiteReport.from_json(value)
        else:
            parts.append(ChoiceEvidence.from_json(value))
    if reports:
        _require_comparable([*reports.values()], [*reports])
    parts += [report.choice for report in reports.values() if report.choice is not None]
    if not parts:
        sites = ", ".join(f"'{report.site}'" for report in reports.values())
        raise CheckpointError(f"{sites} has no expert in the pool it measured, so it has no part in a choice.")
    return parts, [*reports.values()]
