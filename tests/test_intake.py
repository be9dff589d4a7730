"""Bytes of an untrusted client: pictures within limits, or one refusal that quotes nothing."""

import io
import json
import pickle
import re
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pydicom
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin
from pydicom.uid import JPEG2000, DeflatedExplicitVRLittleEndian, JPEGBaseline8Bit, RLELossless

import mergestream as ms
from conftest import PREPROCESSING, make_pool
from dicoms import compressed, dataset, dicom, item, written
from mergestream.data.datasets.decoding import read_pixels
from mergestream.data.intake.input_files import read_upload, read_uploads
from mergestream.data.intake.limits import REFUSALS, Allowance, IntakeError, Limits
from mergestream.data.intake.pictures import Picture, sha256_of_pixels, stack
from mergestream.data.intake.shades import by_levels
from mergestream.runtime.errors import InputError

LIMITS = Limits()
ROOT = Path(__file__).parents[1]
FILES = Path(pydicom.__file__).parent / "data" / "test_files"


def drawn(size: tuple[int, ...] = (20, 30, 3), seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def saved(pixels: np.ndarray, format_name: str, **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format_name, **options)
    return file.getvalue()


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def refusal(data: bytes, limits: Limits = LIMITS) -> IntakeError:
    with pytest.raises(IntakeError) as caught:
        read_upload(data, limits)
    return caught.value


# --- what is read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format_name", ["PNG", "TIFF", "BMP"])
@pytest.mark.parametrize("shape", [(20, 30), (20, 30, 3), (20, 30, 4), (1, 1, 3)])
def test_photographs_without_loss(format_name: str, shape: tuple[int, ...]) -> None:
    pixels = drawn(shape)
    (picture,) = read_upload(saved(pixels, format_name), LIMITS)
    expected = np.repeat(pixels[..., None], 3, axis=-1) if pixels.ndim == 2 else pixels[..., :3]
    assert picture.pixels.dtype == np.uint8
    assert (picture.pixels == expected.transpose(2, 0, 1)).all()


@pytest.mark.parametrize("format_name", ["PNG", "JPEG", "TIFF", "BMP", "WEBP"])
def test_a_photograph_has_the_pixels_that_the_data_sets_read(format_name: str) -> None:
    data = saved(drawn(), format_name)
    (picture,) = read_upload(data, LIMITS)
    assert (picture.pixels == read_pixels(data, "image").numpy()).all()


def test_a_webp_without_loss_and_a_deep_png() -> None:
    pixels = drawn()
    (picture,) = read_upload(saved(pixels, "WEBP", lossless=True), LIMITS)
    assert (picture.pixels == pixels.transpose(2, 0, 1)).all()
    deep = np.arange(600, dtype=np.uint16).reshape(20, 30) * 7
    (picture,) = read_upload(saved(deep, "PNG"), LIMITS)
    assert np.abs(picture.pixels[0] - deep / deep.max() * 255).max() <= 0.5


LAYOUTS: dict[tuple[int, ...], Callable[[np.ndarray], np.ndarray]] = {
    (8, 9): lambda a: np.stack([a] * 3)[None],
    (3, 8, 9): lambda a: a[None],
    (8, 9, 3): lambda a: a.transpose(2, 0, 1)[None],
    (1, 8, 9): lambda a: np.repeat(a, 3, axis=0)[None],
    (8, 9, 1): lambda a: np.repeat(a.transpose(2, 0, 1), 3, axis=0)[None],
    (4, 3, 8, 9): lambda a: a,
    (4, 8, 9, 3): lambda a: a.transpose(0, 3, 1, 2),
    (4, 1, 8, 9): lambda a: np.repeat(a, 3, axis=1),
    (4, 8, 9, 1): lambda a: np.repeat(a.transpose(0, 3, 1, 2), 3, axis=1),
    (3, 8, 3): lambda a: a[None],
}


@pytest.mark.parametrize("shape", LAYOUTS)
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_every_layout(shape: tuple[int, ...], order: str) -> None:
    array = np.asarray(drawn(shape), order=order)
    pictures = read_upload(npy(array), LIMITS)
    assert (np.stack([picture.pixels for picture in pictures]) == LAYOUTS[shape](array)).all()
    assert [picture.frame for picture in pictures] == ([1, 2, 3, 4] if len(pictures) > 1 else [None])


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_arrays_of_every_version(version: tuple[int, int]) -> None:
    file = io.BytesIO()
    np.lib.format.write_array(file, drawn((8, 9)), version=version)
    assert (read_upload(file.getvalue(), LIMITS)[0].pixels[0] == drawn((8, 9))).all()


@pytest.mark.parametrize(
    ("array", "code"),
    [
        (np.zeros((8, 9), np.uint16), "wrong_type"),
        (np.zeros((8, 9), np.float32), "wrong_type"),
        (np.zeros((8, 9), np.bool_), "wrong_type"),
        (np.array([{"a": 1}], dtype=object), "wrong_type"),
        (np.zeros((8, 9), [("a", "u1")]), "wrong_type"),
        (np.zeros(8, np.uint8), "wrong_shape"),
        (np.zeros((5, 8, 9), np.uint8), "wrong_shape"),
        (np.zeros((2, 5, 8, 9), np.uint8), "wrong_shape"),
        (np.zeros((1, 2, 3, 8, 9), np.uint8), "wrong_shape"),
        (np.uint8(3), "wrong_shape"),
        (np.zeros((0, 3, 8, 9), np.uint8), "empty"),
    ],
)
def test_other_arrays_are_refused_by_type_and_shape(array: np.ndarray, code: str) -> None:
    assert refusal(npy(array)).code == code


def test_the_hashes_are_of_the_bytes_and_of_the_pixels_with_their_shape() -> None:
    pixels = drawn((1, 3, 4, 6))
    one, other = (read_upload(npy(array), LIMITS)[0] for array in (pixels, pixels.reshape(1, 3, 6, 4)))
    assert one.pixels_sha256 != other.pixels_sha256
    again = read_upload(saved(pixels[0].transpose(1, 2, 0), "PNG"), LIMITS)[0]
    assert again.pixels_sha256 == one.pixels_sha256 == sha256_of_pixels(pixels[0])
    assert again.sha256 != one.sha256


def test_a_request_is_read_in_order_and_an_error_says_which_file_it_was() -> None:
    files = [saved(drawn(seed=1), "PNG"), npy(drawn((2, 3, 8, 9))), saved(drawn(seed=2), "BMP")]
    assert [picture.pixels.shape[1] for picture in read_uploads(files, LIMITS)] == [20, 8, 8, 20]
    with pytest.raises(IntakeError) as caught:
        read_uploads([*files, b"nonsense"], LIMITS)
    assert caught.value.position == 3
    with pytest.raises(IntakeError, match="no file"):
        read_uploads([], LIMITS)


# --- one batch for the pool ---------------------------------------------------------------------------------


def pictures_of_all_sizes() -> list[Picture]:
    sizes = [(16, 16), (20, 30), (300, 200), (7, 9), (16, 16)]
    return [read_upload(saved(drawn((*size, 3), n), "PNG"), LIMITS)[0] for n, size in enumerate(sizes)]


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
def test_a_stack_is_what_the_pool_makes_of_each_picture_alone(interpolation: str) -> None:
    pictures = pictures_of_all_sizes()
    preprocessing = ms.Preprocessing(size=(16, 16), interpolation=interpolation)
    alone = torch.cat([preprocessing(torch.from_numpy(picture.pixels)[None]) for picture in pictures])
    assert torch.equal(preprocessing(stack(pictures, preprocessing)), alone)


def test_the_answers_are_those_of_the_python_interface() -> None:
    pool, pictures = make_pool("hand_written"), pictures_of_all_sizes()
    prepared = torch.cat([pool.prepare(torch.from_numpy(picture.pixels)[None]) for picture in pictures])
    served = ms.EntropyAdaptive(pool).step(stack(pictures, pool.preprocessing, pool.device))
    direct = ms.EntropyAdaptive(pool).step(prepared)
    assert torch.equal(served.logits, direct.logits)


def test_a_stack_needs_pictures_and_a_pool_that_takes_pixels() -> None:
    with pytest.raises(InputError, match="empty"):
        stack([], PREPROCESSING)
    with pytest.raises(InputError, match="preprocessing"):
        stack(pictures_of_all_sizes(), None)


# --- limits -------------------------------------------------------------------------------------------------


def test_limits_are_for_the_whole_request() -> None:
    file = npy(drawn((4, 3, 8, 9)))
    for limits, code in (
        (Limits(images=7), "too_many"),
        (Limits(decoded_bytes=7 * 3 * 72), "too_large"),
        (Limits(file_bytes=len(file) - 1), "too_large"),
        (Limits(pixels=71), "too_large"),
    ):
        with pytest.raises(IntakeError) as caught:
            read_uploads([file, file], limits)
        assert caught.value.code == code
    assert len(read_uploads([file, file], Limits(images=8, decoded_bytes=8 * 3 * 72, pixels=72))) == 8


def test_limits_are_above_zero() -> None:
    with pytest.raises(InputError, match="frames"):
        Limits(frames=0)


def test_frames_are_limited() -> None:
    data = dicom(drawn((8, 9)).tobytes() * 3, Rows=8, Columns=9, SamplesPerPixel=1, BitsAllocated=8, BitsStored=8,
                 PhotometricInterpretation="MONOCHROME2", NumberOfFrames=3)  # fmt: skip
    assert refusal(data, Limits(frames=2)).code == "too_many"
    assert len(read_upload(data, Limits(frames=3))) == 3


def test_an_allowance_is_not_given_back() -> None:
    allowance = Allowance.of(Limits(images=2))
    allowance.take(1, 5, 5)
    with pytest.raises(IntakeError, match="2 images"):
        allowance.take(2, 5, 5)


# --- what is refused, and that it costs little --------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (b"", "empty", ""),
        (b"GIF89a" + bytes(50), "unsupported_format", "Send PNG"),
        (b"PK\x03\x04" + bytes(50), "unsupported_format", "Archives"),
        (b"\x1f\x8b" + bytes(50), "unsupported_format", "gzip"),
        (pickle.dumps([1], protocol=4), "unsupported_format", "Pickles"),
        (b"\x08\0\x05\0CS\x0a\0ISO_IR 100" + bytes(200), "unsupported_format", "preamble"),
        (b"\0" * 128 + b"DICM", "damaged", ""),
        (b"\x93NUMPY", "damaged", ""),
        (b"\xff\xd8\xff", "damaged", ""),
        (b"hello", "unsupported_format", ""),
    ],
)
def test_other_bytes(data: bytes, code: str, words: str) -> None:
    error = refusal(data)
    assert error.code == code
    assert words in error.sentence


def test_a_file_of_several_images_is_not_guessed_at() -> None:
    first, second = Image.fromarray(drawn()), Image.fromarray(drawn(seed=1))
    for format_name in ("TIFF", "PNG", "WEBP"):
        file = io.BytesIO()
        first.save(file, format_name, save_all=True, append_images=[second])
        assert "several images" in refusal(file.getvalue()).sentence


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">L", len(body)) + kind + body + struct.pack(">L", zlib.crc32(kind + body))


def png(width: int, height: int, *, more: bytes = b"") -> bytes:
    head = struct.pack(">LLBBBBB", width, height, 8, 2, 0, 0, 0)
    idat = zlib.compress(bytes(100))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + more + chunk(b"IDAT", idat) + chunk(b"IEND", b"")


def tiff_with_huge_tiles() -> bytes:
    tags = [(256, 4, 16), (257, 4, 16), (258, 3, 8), (259, 3, 8), (262, 3, 1), (277, 3, 1)]
    tags += [(322, 4, 60_000), (323, 4, 60_000), (324, 4, 8), (325, 4, 8)]
    entries = b"".join(struct.pack("<HHLL", tag, kind, 1, value) for tag, kind, value in tags)
    return struct.pack("<2sHLQ", b"II", 42, 16, 0) + struct.pack("<H", len(tags)) + entries + bytes(8)


def webp(width: int, height: int) -> bytes:
    body = b"\0" * 4 + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return b"RIFF" + struct.pack("<L", 30) + b"WEBPVP8X" + struct.pack("<L", 10) + body + b"VP8 " + bytes(4)


def jpeg_of_many_scans() -> bytes:
    whole = saved(np.zeros((4000, 4000, 3), np.uint8), "JPEG", progressive=True)
    last = whole.rindex(b"\xff\xda")
    return whole[:-2] + whole[last:-2] * 200 + b"\xff\xd9"


def deflated_bomb() -> bytes:
    made = dicom(drawn((8, 9)), DeflatedExplicitVRLittleEndian)
    start = made.index(b"1.2.840.10008.1.2.1.99") + 22
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
    head = b"\x09\x00\x10\x00OB\0\0" + struct.pack("<L", 2**31)
    return made[:start] + squeeze.compress(head) + b"".join(squeeze.compress(bytes(1 << 20)) for _ in range(500)) + (
        squeeze.flush()
    )  # fmt: skip


def lying_jpeg() -> bytes:
    frame = bytearray(saved(drawn((8, 16, 3)), "JPEG"))
    place = frame.index(b"\xff\xc0") + 5
    frame[place : place + 4] = struct.pack(">HH", 60_000, 60_000)
    return compressed([bytes(frame)], JPEGBaseline8Bit, drawn((8, 16, 3)))


def lying_jpeg_2000() -> bytes:
    frame = bytearray(saved(drawn((8, 16, 3)), "JPEG2000", no_jp2=True))
    for place in (8, 12, 24, 28):
        frame[place : place + 4] = struct.pack(">L", 60_000)
    return compressed([bytes(frame)], JPEG2000, drawn((8, 16, 3)))


def bomb_of_runs() -> bytes:
    segment = b"\x81\0" * 4_000_000
    head = struct.pack("<16L", 1, 64, *[0] * 14)
    return compressed([head + segment], RLELossless, drawn((8, 16)))


def sequence_of_empty_items(tag: bytes, count: int = 1_000_000) -> bytes:
    """Before the pixels; each item would become an object."""
    made = written(dataset(drawn((8, 9))))
    place = made.index(b"\xe0\x7f\x10\x00")
    items = b"\xfe\xff\x00\xe0\0\0\0\0" * count
    end = b"\xfe\xff\xdd\xe0\0\0\0\0"
    return made[:place] + tag + b"SQ\0\0\xff\xff\xff\xff" + items + end + made[place:]


def nested_sequences(depth: int = 90_000) -> bytes:
    made = written(dataset(drawn((8, 9))))
    place = made.index(b"\xe0\x7f\x10\x00")
    opened = b"\x28\x00\x10\x30SQ\0\0\xff\xff\xff\xff" + b"\xfe\xff\x00\xe0\xff\xff\xff\xff"
    closed = b"\xfe\xff\x0d\xe0\0\0\0\0" + b"\xfe\xff\xdd\xe0\0\0\0\0"
    return made[:place] + opened * depth + closed * depth + made[place:]


def array_header(text: str) -> bytes:
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(text)) + text.encode()


def text_bomb() -> bytes:
    note = PngImagePlugin.PngInfo()
    note.add_text("note", "0" * 200_000_000, zip=True)
    return saved(drawn(), "PNG", pnginfo=note)


BOMBS: dict[str, Callable[[], bytes]] = {
    "png too large": lambda: png(60_000, 60_000),
    "png without its pixels": lambda: png(5_000, 5_000),
    "png text": text_bomb,
    "png profile": lambda: png(9, 9, more=chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(200_000_000)))),
    "tiff tiles": tiff_with_huge_tiles,
    "webp": lambda: webp(16_000, 16_000),
    "jpeg scans": jpeg_of_many_scans,
    "frames": lambda: dicom(drawn((8, 9)), NumberOfFrames=1_000_000, Rows=60_000, Columns=60_000),
    "deflated": deflated_bomb,
    "dicom jpeg": lying_jpeg,
    "dicom jpeg 2000": lying_jpeg_2000,
    "dicom runs": bomb_of_runs,
    "items": lambda: sequence_of_empty_items(b"\x28\x00\x10\x30"),
    "fewer items": lambda: sequence_of_empty_items(b"\x28\x00\x10\x30", 190_000),
    "private items": lambda: sequence_of_empty_items(b"\x29\x00\x10\x10"),
    "nested": nested_sequences,
    "array shape": lambda: array_header("{'descr': '|u1', 'fortran_order': False, 'shape': (100000, 3, 99999, 99999)}"),
    "array header": lambda: b"\x93NUMPY\x02\0\xff\xff\xff\xff" + b"{" * 100_000,
    "array nesting": lambda: array_header("(" * 900),
}
# Runs in a process of its own, so that memory taken by C libraries is seen too.
MEASURE = """
import json, sys, time
from pathlib import Path
from mergestream.data.intake.input_files import read_upload
from mergestream.data.intake.limits import IntakeError, Limits

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

limits, results = Limits(), {}
read_upload(Path(sys.argv[1], "warm up").read_bytes(), limits)
for path in sorted(Path(sys.argv[1]).iterdir()):
    data = path.read_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is in use
    before, start = peak(), time.monotonic()
    try:
        code = len(read_upload(data, limits))
    except IntakeError as error:
        code = error.code
    results[path.name] = [code, peak() - before, time.monotonic() - start, len(data) / 2**20]
print(json.dumps(results))
"""


@pytest.mark.slow
def test_bombs_are_refused_fast_and_in_little_memory(tmp_path: Path) -> None:
    (tmp_path / "warm up").write_bytes(dicom(drawn((8, 9))))
    for name, make in BOMBS.items():
        (tmp_path / name).write_bytes(make())
    done = subprocess.run([sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, check=True)
    results = json.loads(done.stdout)
    codes = {name: results[name][0] for name in BOMBS}
    assert all(code in ("damaged", "too_large", "too_many") for code in codes.values()), codes
    assert {name: mib for name, (_, mib, _, size) in results.items() if mib > 40 + 3 * size} == {}
    assert max(seconds for _, _, seconds, _ in results.values()) < 3


# --- nothing but pictures and refusals ----------------------------------------------------------------------


def small_dicom(syntax: str | None = None) -> bytes:
    if syntax is not None:
        made = dataset(drawn((34, 33)), WindowCenter=100, WindowWidth=80)
        made.compress(syntax, generate_instance_uid=False)
        return written(made)
    table = item(LUTDescriptor=[4, 0, 8], LUTData=b"\1\2\3\4")
    table["LUTDescriptor"].VR, table["LUTData"].VR = "US", "OW"
    return dicom(drawn((12, 10)), WindowCenter=100, WindowWidth=80, VOILUTSequence=[table])


VALID = {
    "png": saved(drawn((12, 10, 3)), "PNG"),
    "palette png": saved(drawn((12, 10, 3)), "PNG", bits=8),
    "jpeg": saved(drawn((12, 10, 3)), "JPEG"),
    "progressive": saved(drawn((12, 10, 3)), "JPEG", progressive=True),
    "tiff": saved(drawn((12, 10, 3)), "TIFF", compression="tiff_lzw"),
    "bmp": saved(drawn((12, 10, 3)), "BMP"),
    "webp": saved(drawn((12, 10, 3)), "WEBP"),
    "npy": npy(drawn((2, 3, 12, 10))),
    "dicom": small_dicom(),
    "dicom runs": small_dicom(RLELossless),
    "dicom jpeg 2000": small_dicom(pydicom.uid.JPEG2000Lossless),
    "dicom deflated": dicom(drawn((12, 10)), DeflatedExplicitVRLittleEndian),
    "dicom jpeg lossless": (FILES / "SC_rgb_jpeg_gdcm.dcm").read_bytes(),
    "dicom jpeg-ls": (FILES / "MR_small_jpeg_ls_lossless.dcm").read_bytes(),
    "dicom jpeg": (FILES / "SC_rgb_small_odd_jpeg.dcm").read_bytes(),
}
STARTS = [b"", *sorted({data[:12] for data in VALID.values()}), bytes(128) + b"DICM", VALID["dicom"][:340]]
TIGHT = Limits(pixels=1 << 20, file_bytes=1 << 20, decoded_bytes=1 << 24, seconds=5)


def outcome(data: bytes) -> list[Picture] | str:
    try:
        return read_upload(data, TIGHT)
    except IntakeError as error:
        return error.code


def read_or_refused(data: bytes) -> None:
    result = outcome(data)
    if isinstance(result, str):
        assert result in REFUSALS
    else:
        assert result
        assert all(picture.pixels.dtype == np.uint8 and picture.pixels.shape[0] == 3 for picture in result)


def anything(examples: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return settings(max_examples=examples, suppress_health_check=list(HealthCheck))


any_bytes = st.builds(bytes.__add__, st.sampled_from(STARTS), st.binary(max_size=400))
valid = st.sampled_from(sorted(VALID))


@st.composite
def spoilt(draw: st.DrawFn) -> bytes:
    """A valid file cut off, with a byte changed, or with a piece of another in it."""
    data = bytearray(VALID[draw(valid)])
    place = draw(st.integers(0, len(data) - 1))
    kind = draw(st.sampled_from(["cut", "flip", "flip", "graft", "twice"]))
    if kind == "cut":
        return bytes(data[:place])
    if kind == "graft":
        other = VALID[draw(valid)]
        start = draw(st.integers(0, len(other) - 1))
        data[place : place + draw(st.integers(0, 30))] = other[start : start + draw(st.integers(0, 60))]
        return bytes(data)
    for _ in range(2 if kind == "twice" else 1):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


@anything(200)
@given(any_bytes)
@example(b"")
def test_any_bytes(data: bytes) -> None:
    read_or_refused(data)


@anything(400)
@given(spoilt())
def test_spoilt_files(data: bytes) -> None:
    read_or_refused(data)


@pytest.mark.slow
@anything(4000)
@given(any_bytes)
def test_any_bytes_many(data: bytes) -> None:
    read_or_refused(data)


@pytest.mark.slow
@anything(12_000)
@given(spoilt())
def test_spoilt_files_many(data: bytes) -> None:
    read_or_refused(data)


@pytest.mark.slow
@pytest.mark.parametrize("name", VALID)
def test_every_truncation_and_every_byte_turned_over(name: str) -> None:
    whole = VALID[name]
    for place in range(len(whole)):
        read_or_refused(whole[:place])
        read_or_refused(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])


def test_every_valid_file_is_valid() -> None:
    assert all(len(read_upload(data, TIGHT)) == (2 if name == "npy" else 1) for name, data in VALID.items())


# --- the helper that is shared with the data sets, and the documents ----------------------------------------


@given(st.sampled_from(["i1", "u1", "i2", "u2", "i4", "u4", ">i2", ">u2"]), st.data())
def test_shading_by_levels_is_shading_each_value(dtype: str, data: st.DataObject) -> None:
    limits = np.iinfo(dtype)
    values = data.draw(st.lists(st.integers(int(limits.min), int(limits.max)), min_size=1, max_size=50))
    array = np.array([values], dtype)
    assert (by_levels(array, lambda levels: levels * 2.5 + 1) == array.astype(float) * 2.5 + 1).all()


def test_the_documents_list_every_code_and_every_limit() -> None:
    text = (ROOT / "docs" / "dicom.md").read_text()
    groups = re.findall(r"((?:`\w+`(?:, )?)+) \((\d{3})\)", text.split("## Refusals")[1])
    documented = {code: int(status) for codes, status in groups for code in re.findall(r"\w+", codes)}
    assert documented == {code: kind.status for code, kind in REFUSALS.items()}
    for name in Limits.__dataclass_fields__:
        assert f"| `{name}` |" in text


def test_errors_survive_a_process_border() -> None:
    error = pickle.loads(pickle.dumps(IntakeError("damaged", "A sentence.")))
    assert (error.code, error.status, str(error)) == ("damaged", 422, "A sentence.")
