"""Mammography: lesions of CBIS-DDSM, benign or malignant, from TCIA, Kaggle or MedIMeta."""

from dataclasses import replace

from mergestream.data.datasets.cbis_ddsm import (
    FINDINGS,
    PARTS,
    crop_of,
    files_by_subject,
    mammogram,
    read_lesions,
    subgroups,
    table_name,
)
from mergestream.data.datasets.index import CARDS, Index, LeftOut, Sample
from mergestream.data.datasets.medimeta import find_medimeta, read_medimeta
from mergestream.data.datasets.roots import Root
from mergestream.runtime.errors import DataError, unknown_name

CLASSES = ("benign", "malignant")
DOMAINS = {
    "finding_view": ("mass_cc", "mass_mlo", "calc_cc", "calc_mlo"),
    "finding": ("mass", "calc"),
    "density": ("density_1", "density_2", "density_3", "density_4"),
}
NAMES = {"finding_view": "{finding}_{view}", "finding": "{finding}", "density": "density_{density}"}
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
    expected = f"{table_name('mass', 'train')} and the images, or MedIMeta's mammo_mass and mammo_calc"
    raise root.refused("mammo", expected)


def _from_medimeta(root: Root, domain: str | None, image: str) -> Index:
    if image != "crop":
        raise DataError(f"{root.location} is MedIMeta's copy, which has crops only: image='crop'.")
    samples = []
    for finding in FINDINGS:
        for each in read_medimeta(root, f"mammo_{finding}", "pathology", classes=CLASSES):
            of = {name.lower().replace(" ", "_"): value for name, value in each.annotations.items()}
            of = subgroups(of.get("breast_density", ""), finding, of.get("image_view", ""))
            samples.append(replace(each.sample, group=each.subject, subgroups=of))
    viewed = all(sample.subgroups["view"] != "unknown" for sample in samples)
    return _placed(Index(CARD, samples), domain or ("finding_view" if viewed else "finding"))


def _from_cbis_ddsm(root: Root, domain: str, image: str) -> Index:
    lesions, files = read_lesions(root), files_by_subject(root)
    samples, missing, left_out = [], [], _unused(lesions, files, image)
    images: dict[str, list[Sample]] = {}
    for lesion in lesions:
        images.setdefault(lesion.id if image == "crop" else mammogram(lesion.id), []).append(lesion)
    for subject, shown in images.items():
        there = files.get(subject, [])
        file = crop_of(root, there) if image == "crop" else next(iter(there), None)
        if file is None:
            missing.append(f"{subject} ({image})")
            continue
        samples.append(replace(shown[0], id=subject, file=file, label=max(each.label for each in shown)))
        if image == "full":
            left_out += [LeftOut(other, f"a second file of {subject}") for other in there if other != file]
    card = replace(CARD, parts=tuple(PARTS), total=CARD.total if image == "crop" else None)
    return _placed(Index(card, samples, left_out, missing), domain)


def _unused(lesions: list[Sample], files: dict[str, list[str]], image: str) -> list[LeftOut]:
    """Files that are not images of a lesion, one line per kind since there are thousands."""
    crops, mammograms = {each.id for each in lesions}, {mammogram(each.id) for each in lesions}
    unnamed = [subject for subject in files if subject not in crops | mammograms]
    what, others, option = ("mammograms", mammograms, "full") if image == "crop" else ("lesions", crops, "crop")
    unused = []
    if there := len(others & files.keys()):
        unused.append(LeftOut(f"{there} {what}", f"image='{option}' reads them"))
    if unnamed:
        unused.append(LeftOut(f"{len(unnamed)} other subjects", f"no case table names them, such as {unnamed[0]}"))
    return unused


def _placed(index: Index, domain: str) -> Index:
    """Put samples into their domains; those without one, such as a density outside 1 to 4, are left out."""
    placed = [replace(sample, domain=NAMES[domain].format(**sample.subgroups)) for sample in index.samples]
    used = [sample for sample in placed if sample.domain in DOMAINS[domain]]
    strangers = [LeftOut(s.file, f"its {domain} is {s.domain}") for s in placed if s.domain not in DOMAINS[domain]]
    domains = tuple(name for name in DOMAINS[domain] if any(sample.domain == name for sample in used))
    counts = {name: PUBLISHED[name] for name in domains} if domain == "finding" and index.card.total else {}
    card = replace(index.card, domains=domains, counts=counts)
    return replace(index, card=card, samples=used, left_out=(*index.left_out, *strangers))
