"""Phantom hospitals: generated microscopy of cells. The class is a cell's morphology, the domain its acquisition.

Synthetic and deterministic: it shows how methods behave, and says nothing about patients. The rendering follows the
path of light: stain absorption (Beer-Lambert), things in the way (hair, ruler, dark corner), optics (blur), the
scanner's colour response, sensor noise.
"""

import tomllib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from mergestream.data.datasets.domain_data import Dataset, DomainData
from mergestream.data.datasets.index import CARDS
from mergestream.runtime.errors import InputError
from mergestream.runtime.option_checks import whole_number

CARD = CARDS["phantom"]
CLASSES = CARD.classes
PIXELS = 32
# Shapes of the public archive that the shared encoder is pretrained on: lobes per outline, none of the four classes.
ARCHIVE, ARCHIVE_CLASSES = "archive", ("disc", "two_lobes", "three_lobes", "four_lobes", "bar", "scatter")


@dataclass(frozen=True)
class Acquisition:
    """How one hospital prepares and scans a slide; ranges are standard deviations between slides."""

    nucleus: Sequence[float]  # optical density of the nuclear stain per colour channel
    tissue: Sequence[float]  # the same of the counter-stain
    concentration: float  # how strongly it stains
    batch_effect: float  # how much staining varies from slide to slide
    blur: float  # pixels
    noise: float  # share of full scale
    gamma: float
    gain: Sequence[float]  # white balance
    artefacts: dict[str, float]  # probability of each
    prevalence: Sequence[float]  # of the four classes


_TABLE = tomllib.loads(Path(__file__).with_name("phantom.toml").read_text(encoding="utf-8"))
HOSPITALS = {name: Acquisition(**fields) for name, fields in _TABLE.items()}


def load(*, images: int = 800, seed: int = 0) -> Dataset:
    """The four hospitals, `images` each. Another seed gives other patients at the same hospitals."""
    if whole_number("images", images, low=0) < 2 * len(CLASSES):
        raise InputError(f"A phantom hospital needs at least {2 * len(CLASSES)} images, got {images}.")
    whole_number("seed", seed, low=0)
    render = cache(lambda name: hospital(name, images, seed))
    return Dataset("phantom", CLASSES, CARD.domains, CARD.views, True, render)


def hospital(name: str, images: int, seed: int) -> DomainData:
    """One hospital's images in order of acquisition."""
    acquisition, random = HOSPITALS[name], _random(name, seed)
    labels = _labels(random, acquisition.prevalence, images)
    nuclei = [_nucleus(random, CLASSES[label]) for label in labels]
    return _domain(name, CLASSES, labels, [_photograph(random, nucleus, acquisition) for nucleus in nuclei])


def archive(images: int, seed: int) -> DomainData:
    """A public archive of other shapes under random acquisition, to pretrain the shared encoder on."""
    random = _random(ARCHIVE, seed)
    labels = random.randint(len(ARCHIVE_CLASSES), size=images)
    nuclei = [_archive_shape(random, ARCHIVE_CLASSES[label]) for label in labels]
    acquisitions = [_any_acquisition(random) for _ in labels]
    pixels = [_photograph(random, *each) for each in zip(nuclei, acquisitions, strict=True)]
    return _domain(ARCHIVE, ARCHIVE_CLASSES, labels, pixels)


def _domain(name: str, classes: tuple[str, ...], labels: np.ndarray, pixels: list[np.ndarray]) -> DomainData:
    images = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()
    return DomainData("phantom", name, classes, images, torch.from_numpy(labels.astype(np.int64)), range(len(labels)))


def _random(name: str, seed: int) -> np.random.RandomState:
    return np.random.RandomState([zlib.crc32(name.encode()), seed])


def _labels(random: np.random.RandomState, prevalence: Sequence[float], images: int) -> np.ndarray:
    """Prevalence drifts over the acquisition period, as referrals do; every class occurs."""
    drift = random.dirichlet(np.full(len(CLASSES), 3.0))
    late = np.linspace(0, 0.5, images)[:, None]
    mix = (1 - late) * np.array(prevalence) + late * drift
    labels = np.array([random.choice(len(CLASSES), p=p / p.sum()) for p in mix])
    labels[: len(CLASSES)] = random.permutation(len(CLASSES))
    return labels


# --- morphology: optical thickness of nuclear material [H,W], 0 to about 1 -------------------------------


def _nucleus(random: np.random.RandomState, kind: str) -> np.ndarray:
    x, y = _grid(random.uniform(-2, 2, size=2))
    angle, radius = random.uniform(0, 2 * np.pi), random.uniform(7, 10)
    if kind == "round":
        shape = _outline(x, y, radius, [(2, 0.10), (3, 0.05)], random)
    elif kind == "spiculated":
        shape = _outline(x, y, radius, [(2, 0.08), (random.randint(5, 9), random.uniform(0.18, 0.3))], random)
    elif kind == "ring":
        hole = _outline(x, y, radius * random.uniform(0.35, 0.6), [(2, 0.10)], random)
        shape = _outline(x, y, radius, [(2, 0.10), (3, 0.05)], random) * (1 - random.uniform(0.6, 0.95) * hole)
    else:  # divided: two daughter nuclei, not always fully apart
        gap = radius * random.uniform(0.55, 0.85)
        dx, dy = gap * np.cos(angle), gap * np.sin(angle)
        parts = [_outline(x - s * dx, y - s * dy, radius * 0.6, [(2, 0.15)], random) for s in (-1, 1)]
        shape = np.maximum(*parts)
    return shape * _texture(random)


def _archive_shape(random: np.random.RandomState, kind: str) -> np.ndarray:
    x, y = _grid(random.uniform(-2, 2, size=2))
    radius = random.uniform(7, 11)
    lobes = {"two_lobes": 2, "three_lobes": 3, "four_lobes": 4}.get(kind)
    if lobes:
        return _outline(x, y, radius, [(lobes, random.uniform(0.25, 0.4))], random)
    if kind == "disc":
        return _outline(x, y, radius, [], random)
    if kind == "bar":
        angle = random.uniform(0, np.pi)
        across = abs(x * np.sin(angle) - y * np.cos(angle))
        return _edge(random.uniform(2, 4) - across) * _edge(radius - np.hypot(x, y))
    dots = [_outline(x - u, y - v, 2.5, [], random) for u, v in random.uniform(-8, 8, size=(random.randint(3, 6), 2))]
    return np.max(dots, axis=0)


def _grid(centre: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    axis = np.arange(PIXELS) - (PIXELS - 1) / 2
    y, x = np.meshgrid(axis - centre[1], axis - centre[0], indexing="ij")
    return x, y


def _outline(
    x: np.ndarray, y: np.ndarray, radius: float, waves: list[tuple[int, float]], random: np.random.RandomState
) -> np.ndarray:
    """A closed outline r(theta) = radius * (1 + sum of waves), filled, with a soft edge."""
    theta = np.arctan2(y, x)
    wobble = sum((a * np.cos(m * theta + random.uniform(0, 2 * np.pi)) for m, a in waves), np.zeros_like(x))
    return _edge(radius * (1 + wobble) - np.hypot(x, y))


def _edge(inside: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(2 * inside, -30, 30)))


def _texture(random: np.random.RandomState) -> np.ndarray:
    """Chromatin: smooth clumps between 0.6 and 1.2."""
    clumps = _blur(random.normal(size=(PIXELS, PIXELS)), 1.5)
    return np.clip(0.9 + 0.15 * clumps / clumps.std(), 0.5, 1.3)


# --- acquisition: thickness [H,W] -> uint8 [H,W,3] --------------------------------------------------------


def _photograph(random: np.random.RandomState, nucleus: np.ndarray, acquisition: Acquisition) -> np.ndarray:
    slide = acquisition.concentration * np.exp(acquisition.batch_effect * random.normal(size=2))
    stroma = 0.35 + 0.12 * _blur(random.normal(size=(PIXELS, PIXELS)), 3) * 6
    density = slide[0] * nucleus[..., None] * np.array(acquisition.nucleus)
    density = density + slide[1] * np.clip(stroma, 0.05, 1)[..., None] * np.array(acquisition.tissue)
    light = np.exp(-density)
    for artefact, probability in acquisition.artefacts.items():
        if random.uniform() < probability:
            light = light * ARTEFACTS[artefact](random)[..., None]
    light = _blur(light, acquisition.blur)
    light = np.clip(light * np.array(acquisition.gain), 0, 1) ** acquisition.gamma
    return (np.clip(light + acquisition.noise * random.normal(size=light.shape), 0, 1) * 255).round().astype(np.uint8)


def _any_acquisition(random: np.random.RandomState) -> Acquisition:
    nucleus, tissue = random.uniform(0.1, 1, size=3), random.uniform(0.05, 0.6, size=3)
    gain = random.uniform(0.85, 1.05, size=3)
    return Acquisition(
        tuple(nucleus), tuple(tissue), random.uniform(0.5, 1.3), 0.2, random.uniform(0.3, 1.0),
        random.uniform(0, 0.06), random.uniform(0.8, 1.25), tuple(gain), {}, (1, 0, 0, 0),
    )  # fmt: skip


def _blur(image: np.ndarray, sigma: float) -> np.ndarray:
    """Gaussian blur of the first two axes, mirrored at the edge: two small matrix products."""
    distance = np.arange(-PIXELS, 2 * PIXELS)[:, None] - np.arange(PIXELS)
    kernel = np.exp(-((distance / sigma) ** 2) / 2)
    mirrored = kernel[PIXELS : 2 * PIXELS] + kernel[:PIXELS][::-1] + kernel[2 * PIXELS :][::-1]
    mirrored = (mirrored / mirrored.sum(axis=0)).T
    return np.einsum("ij,jk...,lk->il...", mirrored, image, mirrored, optimize=True)


def _ruler(random: np.random.RandomState) -> np.ndarray:
    """Dark tick marks along one edge."""
    mask = np.ones((PIXELS, PIXELS))
    spacing, length = random.randint(3, 6), random.randint(3, 7)
    mask[random.randint(spacing) :: spacing, :length] = random.uniform(0.15, 0.4)
    return np.rot90(mask, random.randint(4)).copy()


def _hair(random: np.random.RandomState) -> np.ndarray:
    """One to three dark, slightly bent lines across the field."""
    x, y = _grid(np.zeros(2))
    mask = np.ones((PIXELS, PIXELS))
    for _ in range(random.randint(1, 4)):
        angle, offset, bend = random.uniform(0, np.pi), random.uniform(-10, 10), random.uniform(-0.02, 0.02)
        along, across = x * np.cos(angle) + y * np.sin(angle), -x * np.sin(angle) + y * np.cos(angle)
        mask *= 1 - 0.75 * np.exp(-(((across - offset - bend * along**2) / 0.8) ** 2))
    return mask


def _dark_corner(random: np.random.RandomState) -> np.ndarray:
    """The edge of the eyepiece: black beyond a circle that is a little off centre."""
    x, y = _grid(random.uniform(-4, 4, size=2))
    return 0.1 + 0.9 * _edge((random.uniform(15, 19) - np.hypot(x, y)) / 2)


ARTEFACTS = {"ruler": _ruler, "hair": _hair, "dark_corner": _dark_corner}
