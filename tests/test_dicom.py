"""DICOM as it should be seen: against the formulas of the standard, written out here."""

import io
import logging
import math
import os
import shutil
import signal
import subprocess
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pydicom
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pydicom.uid import (
    JPEG2000,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    RLELossless,
)

import mergestream as ms
from dicoms import SECRET, UIDS, compressed, dataset, dicom, item, written
from mergestream.data.datasets.decoding import read_pixels
from mergestream.data.intake import decoder_pool, input_files
from mergestream.data.intake.dicom import frames
from mergestream.data.intake.dicom.rendering import decode_file
from mergestream.data.intake.input_files import read_upload
from mergestream.data.intake.limits import Allowance, IntakeError, Limits
from mergestream.data.intake.pictures import DicomSource, Picture, stack
from mergestream.runtime.errors import DataError

LIMITS = Limits()
FILES = Path(pydicom.__file__).parent / "data" / "test_files"


def read(data: bytes, limits: Limits = LIMITS) -> list[Picture]:
    return read_upload(data, limits)


def grey(data: bytes) -> np.ndarray:
    (picture,) = read(data)
    assert (picture.pixels == picture.pixels[:1]).all()
    return picture.pixels[0]


def numbers(dtype: str = "u2", low: int = 0, high: int = 4096, size: tuple[int, ...] = (9, 14)) -> np.ndarray:
    return np.random.default_rng(0).integers(low, high, size).astype(dtype)


# --- grey: PS3.3 C.11.1 and C.11.2 --------------------------------------------------------------------------


def window_of_the_standard(x: float, c: float, w: float, function: str) -> float:
    """C.11.2.1.2.1 and C.11.2.1.3, as pseudo-code there, with an output from 0 to 255."""
    if function == "LINEAR":
        if x <= c - 0.5 - (w - 1) / 2:
            return 0
        if x > c - 0.5 + (w - 1) / 2:
            return 255
        return ((x - (c - 0.5)) / (w - 1) + 0.5) * 255
    if function == "LINEAR_EXACT":
        if x <= c - w / 2:
            return 0
        if x > c + w / 2:
            return 255
        return ((x - c) / w + 0.5) * 255
    return 255 / (1 + math.exp(min(-4 * (x - c) / w, 700)))


@given(
    st.sampled_from(["LINEAR", "LINEAR_EXACT", "SIGMOID"]),
    st.integers(-2000, 5000),
    st.integers(1, 6000),
    st.sampled_from([0.5, 1.0, 2.25, -1.0]),
    st.integers(-1500, 1500),
    st.booleans(),
)
def test_windows_follow_the_standard(
    function: str, centre: int, width: int, slope: float, intercept: int, inverted: bool
) -> None:
    stored = numbers()
    shown = grey(
        dicom(
            stored,
            WindowCenter=centre,
            WindowWidth=width,
            VOILUTFunction=function,
            RescaleSlope=slope,
            RescaleIntercept=intercept,
            PhotometricInterpretation="MONOCHROME1" if inverted else "MONOCHROME2",
        )
    )
    for value, grey_value in zip(stored.ravel(), shown.ravel(), strict=True):
        expected = window_of_the_standard(float(value) * slope + intercept, centre, width, function)
        assert abs(float(grey_value) - (255 - expected if inverted else expected)) <= 0.5 + 1e-6


def test_the_first_of_several_windows_counts_and_its_function_is_linear_if_not_said() -> None:
    stored = numbers()
    several = dicom(stored, WindowCenter=[1000, 3000], WindowWidth=[500, 20])
    assert (grey(several) == grey(dicom(stored, WindowCenter=1000, WindowWidth=500, VOILUTFunction="LINEAR"))).all()


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian])
def test_a_table_of_values_of_interest(syntax: str) -> None:
    stored = numbers(high=300)
    entries = (np.arange(200) ** 2 % 1024).astype("<u2")
    table = item(LUTDescriptor=[200, 50, 10], LUTData=entries.tobytes())
    table["LUTDescriptor"].VR, table["LUTData"].VR = "US", "OW"
    shown = grey(dicom(stored, syntax, VOILUTSequence=[table], WindowCenter=5, WindowWidth=5))
    expected = entries[np.clip(stored.astype(int) - 50, 0, 199)].astype(float) * 255 / 1023
    assert np.abs(shown - expected).max() <= 0.5 + 1e-9


def test_a_table_of_eight_bits_may_have_more_than_256_entries() -> None:
    """pydicom's apply_voi counts its entries in eight bits, and gives other shades."""
    stored = numbers()
    entries = (np.arange(4096) // 16).astype("<u2")
    table = item(LUTDescriptor=[4096, 0, 8], LUTData=entries.tobytes())
    table["LUTDescriptor"].VR, table["LUTData"].VR = "US", "OW"
    assert (grey(dicom(stored, VOILUTSequence=[table])) == stored // 16).all()


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian])
def test_a_modality_table_comes_before_the_window(syntax: str) -> None:
    stored = numbers("i2", -40, 40)
    entries = (np.arange(60) * 7 % 101).astype("<u2")
    table = item(LUTDescriptor=[60, -30, 16], LUTData=entries.tobytes())
    table["LUTDescriptor"].VR, table["LUTData"].VR = "SS", "OW"
    shown = grey(dicom(stored, syntax, ModalityLUTSequence=[table], WindowCenter=50, WindowWidth=80))
    rescaled = entries[np.clip(stored.astype(int) + 30, 0, 59)]
    expected = np.vectorize(lambda x: window_of_the_standard(float(x), 50, 80, "LINEAR"), otypes=[float])(rescaled)
    assert np.abs(shown - expected).max() <= 0.5 + 1e-9


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4"])
@pytest.mark.parametrize("inverted", [False, True])
def test_without_a_window_the_frame_is_stretched_over_what_it_holds(dtype: str, inverted: bool) -> None:
    limits = np.iinfo(dtype)
    stored = np.array([[limits.min, 0, 5], [limits.max, limits.max // 2, 1]], dtype)
    shown = grey(dicom(stored, PhotometricInterpretation="MONOCHROME1" if inverted else "MONOCHROME2"))
    expected = (stored.astype(float) - limits.min) / (float(limits.max) - limits.min) * 255
    assert np.abs(shown - (255 - expected if inverted else expected)).max() <= 0.5 + 1e-6


def test_a_negative_slope_turns_the_picture_round_and_a_constant_one_is_black() -> None:
    stored = numbers()
    turned = grey(dicom(stored, RescaleSlope=-2, RescaleIntercept=7))
    assert np.abs(turned.astype(int) + grey(dicom(stored)) - 255).max() <= 1
    assert not grey(dicom(np.full((4, 4), 77, "u2"))).any()


@pytest.mark.parametrize("signed", [False, True])
def test_bits_above_those_stored_are_not_looked_at(signed: bool) -> None:
    values = numbers("i2", -2048, 2048) if signed else numbers()
    rubbish = (values.astype("u2") & 0x0FFF) | 0xA000
    header = {"BitsStored": 12, "PixelRepresentation": int(signed), "WindowCenter": 100, "WindowWidth": 3000}
    assert (grey(dicom(rubbish, **header)) == grey(dicom(values, **header | {"BitsStored": 16}))).all()


# --- colour -------------------------------------------------------------------------------------------------


def test_rgb_by_pixel_and_by_plane() -> None:
    pixels = numbers("u1", high=256, size=(5, 7, 3))
    by_plane = np.ascontiguousarray(pixels.transpose(2, 0, 1)).tobytes()
    made = dataset(pixels)
    made.PixelData, made.PlanarConfiguration = by_plane + b"\0", 1
    for data in (dicom(pixels), written(made), dicom(pixels, ExplicitVRBigEndian)):
        assert (read(data)[0].pixels == pixels.transpose(2, 0, 1)).all()


def test_rgb_of_sixteen_bits_keeps_its_range() -> None:
    pixels = numbers("u2", high=60_000, size=(5, 7, 3))
    shown = read(dicom(pixels))[0].pixels
    assert np.abs(shown - pixels.transpose(2, 0, 1) / 65535 * 255).max() <= 0.5 + 1e-9


def rgb_of_the_standard(ybr: np.ndarray) -> np.ndarray:
    """C.7.6.3.1.2 solved for red, green and blue."""
    forward = np.array([[0.2990, 0.5870, 0.1140], [-0.1687, -0.3313, 0.5000], [0.5000, -0.4187, -0.0813]])
    return np.clip((ybr.astype(float) - [0, 128, 128]) @ np.linalg.inv(forward).T, 0, 255)


def test_luminance_and_chrominance() -> None:
    pixels = numbers("u1", high=256, size=(6, 8, 3))
    shown = read(dicom(pixels, PhotometricInterpretation="YBR_FULL"))[0].pixels.transpose(1, 2, 0)
    assert np.abs(shown - rgb_of_the_standard(pixels)).max() <= 1.1


def test_chrominance_shared_by_two_pixels() -> None:
    pixels = numbers("u1", high=256, size=(6, 8, 3))
    pixels[:, 1::2, 1:] = pixels[:, ::2, 1:]
    pairs = np.stack([pixels[:, ::2, 0], pixels[:, 1::2, 0], pixels[:, ::2, 1], pixels[:, ::2, 2]], axis=-1)
    made = dataset(pixels, PhotometricInterpretation="YBR_FULL_422")
    made.PixelData = pairs.tobytes()
    shown = read(written(made))[0].pixels.transpose(1, 2, 0)
    assert np.abs(shown - rgb_of_the_standard(pixels)).max() <= 1.1


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian])
def test_palettes(bits: int, syntax: str) -> None:
    stored = numbers("u1", high=80)
    dtype = "u1" if bits == 8 else "<u2"
    tables = np.random.default_rng(1).integers(0, 1 << bits, (3, 50)).astype(dtype)
    header = {"PhotometricInterpretation": "PALETTE COLOR"}
    for name, table in zip(("Red", "Green", "Blue"), tables, strict=True):
        header[f"{name}PaletteColorLookupTableDescriptor"] = [50, 10, bits]
        header[f"{name}PaletteColorLookupTableData"] = table.tobytes()
    made = dataset(stored, syntax, **header)
    for name in ("Red", "Green", "Blue"):
        made[f"{name}PaletteColorLookupTableDescriptor"].VR = "US"
    expected = tables[:, np.clip(stored.astype(int) - 10, 0, 49)] >> (bits - 8)
    assert (read(written(made))[0].pixels == expected).all()


# --- data sets ----------------------------------------------------------------------------------------------


def compressed_without_loss(syntax: str) -> bytes:
    made = dataset(numbers(size=(40, 33)), WindowCenter=1200, WindowWidth=900)
    made.compress(syntax, generate_instance_uid=False)
    return written(made)


SHOWN = {
    "windowed": dicom(numbers(), WindowCenter=1000, WindowWidth=700),
    "rescaled": dicom(numbers(), RescaleSlope=2, RescaleIntercept=-1024, WindowCenter=40, WindowWidth=400),
    "inverted": dicom(numbers(), PhotometricInterpretation="MONOCHROME1", WindowCenter=900, WindowWidth=3000),
    "stretched": dicom(numbers("i2", -500, 900)),
    "colour": dicom(numbers("u1", high=256, size=(12, 9, 3))),
    "runs": compressed_without_loss(RLELossless),
    "wavelets": compressed_without_loss(JPEG2000Lossless),
    "tomography": (FILES / "CT_small.dcm").read_bytes(),
    "resonance": (FILES / "MR_small_jp2klossless.dcm").read_bytes(),
    "jpeg": (FILES / "SC_rgb_jpeg_gdcm.dcm").read_bytes(),
}


def test_a_data_set_shows_dicom_as_the_service_does(tmp_path: Path) -> None:
    """What an expert learns from and what it is asked about are the same pixels, resized by the same rule."""
    for number, (kind, data) in enumerate(SHOWN.items()):
        file = tmp_path / "lyon" / "ab"[number % 2] / f"{kind}.dcm"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    domain = ms.load_dataset("folder", root=tmp_path, size=24)["lyon"]
    learnt = dict(zip((Path(name).stem for name in domain.ids), domain.images, strict=True))
    assert learnt.keys() == SHOWN.keys()
    for kind, data in SHOWN.items():
        (picture,) = read(data)
        assert (read_pixels(data, "a.dcm").numpy() == picture.pixels).all(), kind
        (asked,) = stack([picture], ms.Preprocessing(size=(24, 24)))
        assert torch.equal(learnt[kind], asked), kind


def test_what_a_data_set_cannot_take_of_dicom_is_told() -> None:
    several = dataset(numbers("u1", high=256), NumberOfFrames=3)
    several.PixelData = 3 * several.PixelData
    with pytest.raises(DataError, match="3 frames; a data set has one image per file"):
        read_pixels(written(several), "a.dcm")
    with pytest.raises(DataError, match="damaged or cut off"):
        read_pixels(SHOWN["windowed"][:-9], "a.dcm")


# --- frames and transfer syntaxes ---------------------------------------------------------------------------


def test_each_frame_is_a_picture_with_a_number_and_hashes() -> None:
    stack = numbers("u1", high=256, size=(3, 6, 4))
    stack[:, 0, :2] = (0, 255)  # so that stretching changes nothing
    pictures = read(dicom(stack.tobytes(), **header_of(stack[0]), NumberOfFrames=3))
    assert [picture.frame for picture in pictures] == [1, 2, 3]
    assert [(picture.pixels[0] == frame).all() for picture, frame in zip(pictures, stack, strict=True)] == [True] * 3
    assert len({picture.sha256 for picture in pictures}) == 1
    assert len({picture.pixels_sha256 for picture in pictures}) == 3
    assert pictures[0].source == DicomSource(*UIDS.values())


def header_of(pixels: np.ndarray) -> dict[str, object]:
    made = dataset(pixels)
    names = (
        "Rows", "Columns", "SamplesPerPixel", "PhotometricInterpretation", "BitsAllocated", "BitsStored", "HighBit",
        "PixelRepresentation",
    )  # fmt: skip
    return {name: made[name].value for name in names}


def test_frames_may_have_windows_of_their_own() -> None:
    stack = numbers(size=(2, 6, 4))
    windows = [item(FrameVOILUTSequence=[item(WindowCenter=c, WindowWidth=w)]) for c, w in ((100, 200), (2000, 900))]
    shared = item(PixelValueTransformationSequence=[item(RescaleSlope=0.5, RescaleIntercept=3)])
    sequences = {"PerFrameFunctionalGroupsSequence": windows, "SharedFunctionalGroupsSequence": [shared]}
    pictures = read(dicom(stack.tobytes(), **header_of(stack[0]), NumberOfFrames=2, **sequences))
    for picture, frame, (c, w) in zip(pictures, stack, ((100, 200), (2000, 900)), strict=True):
        alone = dicom(frame, WindowCenter=c, WindowWidth=w, RescaleSlope=0.5, RescaleIntercept=3)
        assert (picture.pixels[0] == grey(alone)).all()


@pytest.mark.parametrize(
    "syntax",
    [ImplicitVRLittleEndian, ExplicitVRBigEndian, DeflatedExplicitVRLittleEndian, RLELossless, JPEG2000Lossless],
)
@pytest.mark.parametrize("dtype", ["u1", "i2", "u2"])
def test_transfer_syntaxes_without_loss_show_the_same(syntax: str, dtype: str) -> None:
    limits = np.iinfo(dtype)
    stored = numbers(dtype, max(limits.min, -3000), min(limits.max, 3000), size=(40, 33))
    plain = dataset(stored, WindowCenter=50, WindowWidth=300)
    expected = grey(written(plain))
    if syntax in (RLELossless, JPEG2000Lossless):
        plain.compress(syntax, generate_instance_uid=False)
        shown = grey(written(plain))
    else:
        shown = grey(dicom(stored.astype(f">{dtype}") if syntax == ExplicitVRBigEndian else stored, syntax,
                           WindowCenter=50, WindowWidth=300))  # fmt: skip
    assert (shown == expected).all()


@pytest.mark.parametrize("syntax", [RLELossless, JPEG2000Lossless])
def test_colour_and_frames_compressed_without_loss(syntax: str) -> None:
    stack = numbers("u1", high=256, size=(3, 35, 40, 3))
    made = dataset(stack[0], NumberOfFrames=3)
    made.PixelData = stack.tobytes()
    made.compress(syntax, generate_instance_uid=False)
    pictures = read(written(made))
    assert (np.stack([picture.pixels for picture in pictures]) == stack.transpose(0, 3, 1, 2)).all()


def smooth(channels: int = 3) -> np.ndarray:
    rows, columns = np.mgrid[0:48, 0:64]
    return np.stack([rows * 5, columns * 3, 255 - rows * 2], axis=-1)[..., :channels].squeeze().astype("u1")


def test_jpeg_and_jpeg_2000_with_loss_come_close() -> None:
    pixels = smooth()
    photograph, codestream = io.BytesIO(), io.BytesIO()
    Image.fromarray(pixels).save(photograph, "JPEG", quality=95, subsampling=0)
    Image.fromarray(pixels).save(codestream, "JPEG2000", irreversible=True, no_jp2=True, quality_layers=[10], mct=1)
    lossy = compressed([photograph.getvalue()], JPEGBaseline8Bit, pixels, PhotometricInterpretation="YBR_FULL_422")
    wavelet = compressed([codestream.getvalue()], JPEG2000, pixels, PhotometricInterpretation="YBR_ICT")
    for data in (lossy, wavelet):
        assert np.abs(read(data)[0].pixels.astype(int) - pixels.transpose(2, 0, 1)).max() <= 6


ALIKE = {
    "MR_small.dcm": (
        "MR_small_RLE.dcm", "MR_small_bigendian.dcm", "MR_small_implicit.dcm", "MR_small_jp2klossless.dcm",
        "MR_small_jpeg_ls_lossless.dcm", "MR_small_padded.dcm",
    ),
    "SC_rgb_rle.dcm": ("SC_rgb_jpeg_gdcm.dcm", "SC_rgb_rle_16bit.dcm", "SC_rgb_rle_32bit.dcm", "SC_rgb_gdcm_KY.dcm"),
    "SC_rgb_small_odd.dcm": ("SC_rgb_small_odd_big_endian.dcm",),
    "rtdose.dcm": ("rtdose_expb.dcm", "rtdose_rle.dcm"),
}  # fmt: skip


@pytest.mark.parametrize(("plain", "others"), ALIKE.items())
def test_pydicoms_own_files_of_one_image_show_the_same(plain: str, others: tuple[str, ...]) -> None:
    expected = [picture.pixels for picture in read((FILES / plain).read_bytes())]
    for other in others:
        shown = [picture.pixels for picture in read((FILES / other).read_bytes())]
        assert np.abs(np.stack(shown).astype(int) - np.stack(expected)).max() <= (1 if "KY" in other else 0), other


def test_every_file_that_pydicom_ships_is_read_or_refused() -> None:
    outcomes = {}
    for path in sorted(FILES.glob("*.dcm")):
        try:
            outcomes[path.name] = len(read(path.read_bytes()))
        except IntakeError as error:
            outcomes[path.name] = error.code
    assert sum(isinstance(outcome, int) for outcome in outcomes.values()) >= 50
    assert outcomes["examples_ybr_color.dcm"] == 30
    assert outcomes["rtplan.dcm"] == outcomes["test-SR.dcm"] == "not_an_image"
    assert outcomes["MR_truncated.dcm"] == "damaged"
    assert outcomes["ExplVR_LitEndNoMeta.dcm"] == "unsupported_format"


# --- what is refused ----------------------------------------------------------------------------------------


def refusal(data: bytes, limits: Limits = LIMITS) -> IntakeError:
    with pytest.raises(IntakeError) as caught:
        read(data, limits)
    return caught.value


@pytest.mark.parametrize(
    ("elements", "code"),
    [
        ({"Rows": 10}, "damaged"),
        ({"Rows": 4}, "damaged"),
        ({"Rows": 0}, "damaged"),
        ({"Rows": None}, "damaged"),
        ({"NumberOfFrames": 0}, "damaged"),
        ({"NumberOfFrames": 10}, "damaged"),
        ({"NumberOfFrames": 1_000_000, "Rows": 60_000, "Columns": 60_000}, "too_many"),
        ({"Rows": 60_000, "Columns": 60_000}, "too_large"),
        ({"SamplesPerPixel": 3}, "damaged"),
        ({"PhotometricInterpretation": "CMYK"}, "unsupported_format"),
        ({"PhotometricInterpretation": "PALETTE COLOR"}, "unsupported_format"),
        ({"BitsStored": 17, "HighBit": 16}, "damaged"),
        ({"BitsStored": 12, "HighBit": 15}, "unsupported_format"),
        ({"BitsAllocated": 1}, "unsupported_format"),
        ({"RescaleSlope": 0, "RescaleIntercept": 0}, "damaged"),
        ({"WindowCenter": 5, "WindowWidth": 0}, "damaged"),
        ({"WindowCenter": 5, "WindowWidth": -3}, "damaged"),
        ({"WindowCenter": 5, "WindowWidth": 3, "VOILUTFunction": "CUBIC"}, "unsupported_format"),
        ({"WindowWidth": 3}, "damaged"),
        ({"VOILUTSequence": [item()]}, "damaged"),
    ],
)
def test_headers_that_contradict_themselves(elements: dict[str, object], code: str) -> None:
    assert refusal(dicom(numbers(size=(9, 14)), **elements)).code == code


def test_a_compressed_frame_must_be_of_the_size_that_the_header_says() -> None:
    large = io.BytesIO()
    Image.new("RGB", (2000, 1500)).save(large, "JPEG2000", no_jp2=True)
    photograph = io.BytesIO()
    Image.new("RGB", (2000, 1500)).save(photograph, "JPEG")
    for frame, syntax in ((large, JPEG2000), (photograph, JPEGBaseline8Bit)):
        data = compressed([frame.getvalue()], syntax, smooth(), PhotometricInterpretation="RGB")
        assert refusal(data).code == "damaged"
    assert refusal(compressed([b"\0" * 100], RLELossless, smooth())).code == "damaged"


def test_frames_that_are_missing_or_too_many_are_not_guessed() -> None:
    made = dataset(smooth())
    made.compress(RLELossless, generate_instance_uid=False)
    (frame,) = pydicom.encaps.generate_frames(made.PixelData, number_of_frames=1)
    for given_frames, stated_frames in ((2, 3), (3, 2)):
        assert (
            refusal(compressed([frame] * given_frames, RLELossless, smooth(), NumberOfFrames=stated_frames)).code
            == "damaged"
        )
    assert len(read(compressed([frame] * 3, RLELossless, smooth(), NumberOfFrames=3))) == 3


COMPRESSED = (
    "JPGExtended.dcm", "SC_rgb_jpeg_gdcm.dcm", "SC_rgb_dcmtk_+eb+cr.dcm", "SC_rgb_dcmtk_+eb+cy+np.dcm",
    "SC_rgb_jpeg_dcmtk.dcm", "SC_rgb_small_odd_jpeg.dcm", "MR_small_jpeg_ls_lossless.dcm", "JPEGLSNearLossless_16.dcm",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("dcmdjpeg") is None, reason="needs dcmtk: scripts/install_dicom_tools.sh")
@pytest.mark.parametrize("name", COMPRESSED)
def test_decoded_jpeg_is_near_that_of_dcmtk(name: str, tmp_path: Path) -> None:
    """Lossless: the same. With loss: decoders may round and interpolate colours otherwise."""
    program = "dcmdjpls" if "jpeg_ls" in name or "JPEGLS" in name else "dcmdjpeg"
    subprocess.run([program, FILES / name, tmp_path / "plain.dcm"], check=True, capture_output=True)
    ours, theirs = (read(path.read_bytes())[0].pixels.astype(int) for path in (FILES / name, tmp_path / "plain.dcm"))
    is_lossless = name in ("SC_rgb_jpeg_gdcm.dcm", "MR_small_jpeg_ls_lossless.dcm")
    assert np.abs(ours - theirs).max() <= (0 if is_lossless else 2)


def test_a_missing_decoder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "find_spec", lambda name: None if name == "openjpeg" else name)
    with pytest.raises(IntakeError, match=r"pip install 'mergestream\[serve\]'") as caught:
        decoded_here((FILES / "MR_small_jp2klossless.dcm").read_bytes())
    assert caught.value.code == "decoder_missing"
    monkeypatch.setattr(frames, "find_spec", lambda name: None if name == "gdcm" else name)
    for file in ("SC_rgb_jpeg_gdcm.dcm", "MR_small_jpeg_ls_lossless.dcm", "JPGExtended.dcm"):
        with pytest.raises(IntakeError, match=r"pip install 'mergestream\[serve\]'") as caught:
            decoded_here((FILES / file).read_bytes())
        assert caught.value.code == "decoder_missing"


def decoded_here(data: bytes) -> list[np.ndarray]:
    """Decoded in this process, where names can be patched."""
    return list(decode_file(data, Allowance.of(LIMITS))[1])


def test_without_pydicom_the_extra_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_files, "find_spec", lambda name: None)
    error = refusal(SHOWN["windowed"])
    assert error.code == "decoder_missing"
    assert "pip install 'mergestream[serve]'" in error.sentence


def test_a_patient_turns_up_in_no_error_log_warning_or_picture(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    made = dataset(numbers())
    made.add_new("WindowWidth", "LO", SECRET)
    made.add_new("WindowCenter", "LO", SECRET)
    made.add_new("SOPInstanceUID", "LO", SECRET)
    files = written(made), dicom(numbers()), dicom(numbers(), PhotometricInterpretation=SECRET)
    caplog.clear()  # of what pydicom says when it writes such a file
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for data in files:
            try:
                texts += [repr(picture) for picture in read(data)]
            except IntakeError as error:
                texts += [str(error), repr(error), repr(error.__cause__), repr(error.__dict__)]
    out = capfd.readouterr()
    texts += [caplog.text, out.out, out.err, *(str(warning.message) for warning in caught)]
    assert len(texts) > 5
    assert not [text for text in texts if SECRET in text or UIDS["StudyInstanceUID"] in text]


# --- the processes that decode ------------------------------------------------------------------------------


@pytest.fixture
def wavelet() -> bytes:
    return (FILES / "MR_small_jp2klossless.dcm").read_bytes()


def idle_process(limits: Limits) -> int:
    (process,) = decoder_pool.pool_for(limits)._idle
    return process._process.pid


def test_a_decoder_that_hangs_is_ended_and_replaced(wavelet: bytes) -> None:
    limits = Limits(seconds=1.0, pixels=5_000_001)
    read(wavelet, Limits(pixels=limits.pixels))
    hung = idle_process(limits)
    os.kill(hung, signal.SIGSTOP)
    started = time.monotonic()
    assert refusal(wavelet, limits).code == "too_slow"
    assert time.monotonic() - started < 5
    assert len(read(wavelet, Limits(pixels=limits.pixels))) == 1
    assert idle_process(limits) != hung


def test_a_decoder_that_dies_costs_one_refusal_or_none(wavelet: bytes) -> None:
    limits = Limits(pixels=5_000_002)
    read(wavelet, limits)
    crashing = idle_process(limits)
    os.kill(crashing, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (crashing, signal.SIGKILL)).start()
    assert refusal(wavelet, limits).code == "damaged"
    read(wavelet, limits)
    os.kill(idle_process(limits), signal.SIGKILL)
    time.sleep(0.2)
    assert len(read(wavelet, limits)) == 1


def test_a_decoder_may_not_take_more_memory_than_its_images_need(wavelet: bytes) -> None:
    limits = Limits(pixels=5_000_003)
    read(wavelet, limits)
    limit_lines = Path(f"/proc/{idle_process(limits)}/limits").read_text()
    most = decoder_pool.OWN_BYTES + 3 * limits.file_bytes + 40 * limits.pixels
    assert [line.split()[3] for line in limit_lines.splitlines() if line.startswith("Max address space")] == [str(most)]
    assert [line.split()[3] for line in limit_lines.splitlines() if line.startswith("Max file size")] == ["0"]


def test_many_threads_share_the_decoders(wavelet: bytes) -> None:
    expected, hashes = read(wavelet)[0].pixels_sha256, list[str]()
    threads = [threading.Thread(target=lambda: hashes.append(read(wavelet)[0].pixels_sha256)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert hashes == [expected] * 12
