"""Small pictures for stand-ins, and their files. The class is a pattern, the domain a colour, the number a shade."""

import io
import tomllib
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

TABLES = tomllib.loads(Path(__file__).with_name("tables.toml").read_text(encoding="utf-8"))
Content = np.ndarray | bytes | Sequence[str]  # a picture uint8 [H,W] or [H,W,3], bytes, or lines of text


def picture(domain: str, label: int, number: int, pixels: int = 24) -> np.ndarray:
    """uint8 [H,W,3]; the same arguments give the same picture."""
    random = np.random.RandomState([zlib.crc32(domain.encode()), label, number])
    colour = np.random.RandomState(zlib.crc32(domain.encode())).uniform(0.3, 1, size=3)
    y, x = np.mgrid[:pixels, :pixels] / pixels
    angle, waves = np.pi * label / 7, 2 + label % 4
    pattern = 0.5 + 0.4 * np.sin(2 * np.pi * waves * (x * np.cos(angle) + y * np.sin(angle)) + random.uniform(0, 6))
    noisy = pattern[..., None] * colour + random.normal(0, 0.05, size=(pixels, pixels, 3))
    return np.round(255 * noisy.clip(0, 1)).astype(np.uint8)


def grey(domain: str, label: int, number: int, pixels: int = 24) -> np.ndarray:
    """uint8 [H,W]."""
    return picture(domain, label, number, pixels).mean(axis=-1).astype(np.uint8)


def encoded(pixels: np.ndarray, suffix: str) -> bytes:
    """Encode a picture in the format of an ending such as '.png'."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, Image.registered_extensions()[suffix.lower()])
    return buffer.getvalue()


def write_files(folder: Path, files: Mapping[str, Content]) -> None:
    """Write files by their path relative to a folder; 'a.zip/b.png' goes into a zip."""
    for name, content in files.items():
        archive, _, member = name.rpartition(".zip/")
        if isinstance(content, np.ndarray):
            content = encoded(content, Path(name).suffix)
        elif not isinstance(content, bytes):
            content = "".join(f"{line}\n" for line in content).encode()
        path = folder / (f"{archive}.zip" if archive else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        if archive:
            with zipfile.ZipFile(path, "a") as zipped:  # a fixed date: the same stand-in has the same bytes
                zipped.writestr(zipfile.ZipInfo(member, (2005, 10, 19, 0, 0, 0)), content)
        else:
            path.write_bytes(content)


def write_picture(path: Path, pixels: np.ndarray) -> None:
    write_files(path.parent, {path.name: pixels})
