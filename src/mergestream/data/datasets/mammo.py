"""Mammography: lesions of CBIS-DDSM, benign or malignant, from TCIA, Kaggle or MedIMeta."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from mergestream.data.datasets.cbis_ddsm import (
    FINDINGS,
    PARTS,
    CbisLesion,
    crop_of,
    files_by_subject,
    read_cases,
    table_name,
)
from mergestream.data.datasets.index import CARDS, DatasetCard, Index, LeftOut, Sample
from mergestream.data.datasets.medimeta import MedimetaImage, find_medimeta, read_medimeta
from mergestream.data.datasets.roots import Root
from mergestream.runtime.errors import DataError, unknown_name

CLASSES = ("benign", "malignant")
DOMAINS = {
    "finding_view": ("mass_cc", "mass_mlo", "calc_cc", "calc_mlo"),
    "finding": ("mass", "calc"),
    "density": ("density_1", "density_2", "density_3", "density_4"),
}
NAME: dict[str, Callable[[dict[str, str]], str]] = {
    "finding_view": lambda of: f"{of['finding']}_{of['view']}",
    "finding": lambda of: of["finding"],
    "density": lambda of: f"density_{of['density']}",
}
PUBLISHED = {"mass": 1696, "calc": 1872}  # lesions

CARD = CARDS["mammo"]


def read(root: Root, *, domain: str | None = None, image: str = "crop") -> Index:
    if domain is not None and domain not in DOMAINS:
        raise unknown_name("domain= of 'mammo'", domain, DOMAINS)
    if image not in ("crop", "full"):
        raise unknown_name("image= of 'mammo'", image, ("crop", "full"))
    packed = [name for name in FINDINGS if find_medimeta(root, f"mammo_{name}")]
    tables = [name for name in FINDINGS for part in PARTS if root.named(table_name(name, part))]
    if packed and tables:
        raise DataError(f"{root.location} holds both CBIS-DDSM and MedIMeta's copy of it. Give the folder of one.")
    if packed:
        return _from_medimeta(root, domain, image)
    if tables:
        return _from_cbis_ddsm(root, domain or "finding_view", image)
    raise DataError(
        f"{root.location} is not a root of 'mammo': it should hold {table_name('mass', 'train')} and the images, or "
        f"MedIMeta's mammo_mass and mammo_calc; it holds {root.glance()}."
    )


def _from_medimeta(root: Root, domain: str | None, image: str) -> Index:
    if image != "crop":
        raise DataError(f"{root.location} is MedIMeta's copy, which has crops only: image='crop'.")
    samples = [
        image.sample("", image.subject, subgroups=_subgroups(finding, image))  # _index sets the domain
        for finding in FINDINGS
        for image in read_medimeta(root, f"mammo_{finding}", "pathology", classes=CLASSES)
    ]
    viewed = all(sample.subgroups["view"] != "unknown" for sample in samples)
    return _index(CARD, domain or ("finding_view" if viewed else "finding"), samples)


def _subgroups(finding: str, image: MedimetaImage) -> dict[str, str]:
    of = {name.lower().replace(" ", "_"): value for name, value in image.annotations.items()}
    view, density = of.get("image_view", "").lower(), of.get("breast_density", "")
    return {"density": density or "unknown", "finding": finding, "view": view or "unknown"}


def _from_cbis_ddsm(root: Root, domain: str, image: str) -> Index:
    cases, files = read_cases(root), files_by_subject(root)
    samples, missing, left_out = [], [], _unused(cases, files, image)
    for subject, lesions in _by_subject(cases, image).items():
        there = files.get(subject, [])
        file = crop_of(root, there) if image == "crop" else next(iter(there), None)
        if file is None:
            missing.append(f"{subject} ({image})")
            continue
        samples.append(_sample(subject, file, lesions))
        if image == "full":
            left_out += [LeftOut(other, f"a second file of {subject}") for other in there if other != file]
    return _index(replace(CARD, parts=tuple(PARTS)), domain, samples, left_out, missing, whole=image == "crop")


def _by_subject(cases: Iterable[CbisLesion], image: str) -> dict[str, list[CbisLesion]]:
    """The lesions of each image: one for a crop, one or more for a mammogram."""
    by_subject: dict[str, list[CbisLesion]] = {}
    for case in cases:
        lesions = by_subject.setdefault(case.lesion if image == "crop" else case.mammogram, [])
        if any(each.lesion == case.lesion for each in lesions):
            raise DataError(f"The case tables name {case.lesion} twice. Keep one row of it.")
        lesions.append(case)
    return by_subject


def _sample(subject: str, file: str, lesions: list[CbisLesion]) -> Sample:
    first, malignant = lesions[0], any(case.malignant for case in lesions)
    subgroups = {"density": first.density or "unknown", "finding": first.finding, "view": first.view}
    return Sample(subject, file, "", int(malignant), group=first.patient, part=first.part, subgroups=subgroups)


def _unused(cases: list[CbisLesion], files: dict[str, list[str]], image: str) -> list[LeftOut]:
    """Files that are not images of a lesion, one line per kind since there are thousands."""
    lesions, mammograms = {case.lesion for case in cases}, {case.mammogram for case in cases}
    unnamed = [subject for subject in files if subject not in lesions | mammograms]
    other = mammograms if image == "crop" else lesions
    kind, why = ("mammograms", "image='full' reads them") if image == "crop" else ("lesions", "image='crop' reads them")
    counts = {
        f"{len(other & files.keys())} {kind}": why if other & files.keys() else "",
        f"{len(unnamed)} other subjects": f"no case table names them, such as {unnamed[0]}" if unnamed else "",
    }
    return [LeftOut(what, reason) for what, reason in counts.items() if reason]


def _index(
    card: DatasetCard,
    domain: str,
    samples: list[Sample],
    left_out: Iterable[LeftOut] = (),
    missing: Iterable[str] = (),
    *,
    whole: bool = True,
) -> Index:
    """Put samples into their domains; those without one, such as a density outside 1 to 4, are left out."""
    placed = [replace(sample, domain=NAME[domain](dict(sample.subgroups))) for sample in samples]
    used = tuple(sample for sample in placed if sample.domain in DOMAINS[domain])
    strangers = [LeftOut(s.file, f"its {domain} is {s.domain}") for s in placed if s.domain not in DOMAINS[domain]]
    domains = tuple(name for name in DOMAINS[domain] if any(sample.domain == name for sample in used))
    total = card.total if whole else None
    counts = {name: PUBLISHED[name] for name in domains} if whole and domain == "finding" else {}
    return Index(
        replace(card, domains=domains, counts=counts, total=total), used, (*left_out, *strangers), list(missing)
    )
