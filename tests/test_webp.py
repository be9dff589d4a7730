"""WebP by torchvision's operator: Pillow's pixels to the bit, and Pillow's word on whatever is not a plain picture."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

import mergestream as ms
from mergestream.data.datasets import webp
from mergestream.data.datasets.pixels import read_pixels
from mergestream.data.datasets.webp import decode_webp
from mergestream.data.intake.shades import image_pixels
from mergestream.networks.preprocessing import resize
from mergestream.runtime.errors import DataError

PACS = Path(__file__).parents[2] / "shared" / "data" / "pacs-128.zip"

pytestmark = pytest.mark.skipif(not webp._gives_pillows_pixels(), reason="this torchvision decodes no WebP")


def picture(seed: int, width: int, height: int, mode: str, *, rough: bool) -> Image.Image:
    """Noise, or squares of 8 pixels."""
    block = 1 if rough else 8
    shape = height // block + 1, width // block + 1, 4
    values = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    whole = values.repeat(block, axis=0).repeat(block, axis=1)[:height, :width]
    return Image.fromarray(np.ascontiguousarray(whole), "RGBA").convert(mode)


def written(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "WEBP", **options)
    return file.getvalue()


def by_pillow(content: bytes) -> Tensor | None:
    try:
        with Image.open(io.BytesIO(content)) as image:
            return torch.from_numpy(image_pixels(image))
    except Exception:
        return None


PICTURES = st.builds(
    picture,
    st.integers(0, 2**32),
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from(["RGB", "RGBA", "L"]),
    rough=st.booleans(),
)
OPTIONS = st.fixed_dictionaries(
    {"quality": st.integers(0, 100), "lossless": st.booleans(), "exact": st.booleans(), "method": st.integers(0, 6)}
)


@given(PICTURES, OPTIONS)
@settings(max_examples=150, deadline=None)
def test_pixels_are_pillows(image: Image.Image, options: dict[str, Any]) -> None:
    content = written(image, **options)
    assert torch.equal(read_pixels(content, "a.webp"), by_pillow(content))
    # Only what is extended, by transparency here, is left to Pillow.
    assert (decode_webp(content) is None) == (content[12:16] == b"VP8X")


@given(PICTURES, OPTIONS, st.data())
@settings(max_examples=300, deadline=None)
def test_a_damaged_file_is_what_pillow_says_it_is(
    image: Image.Image, options: dict[str, Any], data: st.DataObject
) -> None:
    content = bytearray(written(image, **options))
    for _ in range(data.draw(st.integers(0, 3))):
        content[data.draw(st.integers(0, min(40, len(content) - 1)))] = data.draw(st.integers(0, 255))
    damaged = bytes(content[: data.draw(st.integers(0, len(content)))]) if data.draw(st.booleans()) else bytes(content)
    decoded = decode_webp(damaged)
    assert decoded is None or torch.equal(decoded, by_pillow(damaged))


@pytest.mark.parametrize(
    "content", [b"", b"RIFF", b"RIFF\0\0\0\0WEBP", b"RIFF\x0c\0\0\0WEBPVP8 \0\0\0\0", b"\xff\xd8\xff"]
)
def test_what_is_no_webp_is_left_to_pillow(content: bytes) -> None:
    assert decode_webp(content) is None


def test_what_moves_is_left_to_pillow() -> None:
    frames = [picture(seed, 20, 20, "RGB", rough=False) for seed in (0, 1)]
    content = written(frames[0], save_all=True, append_images=frames[1:], lossless=True)
    assert decode_webp(content) is None
    assert torch.equal(read_pixels(content, "a.webp"), torch.from_numpy(image_pixels(frames[0])))


@pytest.mark.parametrize("lossless", [False, True])
def test_what_is_too_large_is_left_to_pillow(monkeypatch: pytest.MonkeyPatch, lossless: bool) -> None:
    content = written(picture(0, 40, 30, "RGB", rough=True), lossless=lossless)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40 * 30)
    assert decode_webp(content) is not None
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 40 * 30 - 1)
    with pytest.warns(Image.DecompressionBombWarning):
        read_pixels(content, "a.webp")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert decode_webp(content) is not None


@pytest.mark.parametrize("failure", ["other pixels", "an error", "missing"])
def test_an_operator_of_another_mind_is_not_used(monkeypatch: pytest.MonkeyPatch, failure: str) -> None:
    content = written(picture(0, 40, 30, "RGB", rough=True))
    whole = webp._decoded

    def other(given: bytes) -> Tensor:
        if failure == "an error":
            raise RuntimeError("torchvision was built without WebP")
        if failure == "missing":
            raise AttributeError("'_OpNamespace' 'image' object has no attribute 'decode_webp'")
        return whole(given) ^ 1

    webp._gives_pillows_pixels.cache_clear()
    monkeypatch.setattr(webp, "_decoded", other)
    try:
        assert decode_webp(content) is None
        assert torch.equal(read_pixels(content, "a.webp"), by_pillow(content))
    finally:
        webp._gives_pillows_pixels.cache_clear()


def test_a_zip_of_webp_files_is_decoded_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    images = [written(picture(n, 20 + n, 30, "RGB", rough=False)) for n in range(12)]
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        for number, content in enumerate(images):
            shown = content[:-9] if number == 7 else content
            archive.writestr(f"here/{'ab'[number % 2]}/{number:02d}.webp", shown)
    with pytest.raises(DataError, match=r"07\.webp"):
        ms.load_dataset("folder", tmp_path / "set.zip", size=16, workers=3)["here"]
    data = ms.load_dataset("folder", tmp_path / "set.zip", size=16, workers=3, skip_bad=1)["here"]
    assert data.ids is not None
    assert len(data) == 11
    for name, pixels in zip(data.ids, data.images, strict=True):
        whole = by_pillow(images[int(Path(name).stem)])
        assert whole is not None
        assert torch.equal(pixels, resize(whole[None], (16, 16), "bilinear")[0])


@pytest.mark.slow
@pytest.mark.skipif(not PACS.exists(), reason="PACS is not here")
def test_pixels_of_all_of_pacs_are_pillows() -> None:
    with zipfile.ZipFile(PACS) as archive:
        contents = [archive.read(name) for name in archive.namelist() if name.endswith(".webp")]
    assert len(contents) == 9991
    for content in contents:
        decoded, known = decode_webp(content), by_pillow(content)
        assert decoded is not None
        assert known is not None
        assert torch.equal(decoded, known)
