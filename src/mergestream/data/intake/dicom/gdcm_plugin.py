"""A plugin of pydicom's decoders for JPEG Extended, by GDCM: pydicom's own refuses 12 bits, which GDCM 3.2 decodes."""

from importlib.util import find_spec
from typing import Any

LABEL = "gdcm, 12 bits"
DECODER_DEPENDENCIES = {"1.2.840.10008.1.2.4.51": ("gdcm>=3.2",)}  # asked for by pydicom


def is_available(transfer_syntax: str) -> bool:
    return transfer_syntax in DECODER_DEPENDENCIES and find_spec("gdcm") is not None


def decode_frame(frame: bytes, runner: Any) -> bytes:
    """Decode one frame for pydicom, which checks its length."""
    import gdcm

    fragment, fragments = gdcm.Fragment(), gdcm.SequenceOfFragments.New()
    fragment.SetByteStringValue(frame)
    fragments.AddFragment(fragment)
    element = gdcm.DataElement(gdcm.Tag(0x7FE0, 0x0010))
    element.SetValue(fragments.__ref__())
    image = gdcm.Image()
    image.SetNumberOfDimensions(2)
    image.SetDimensions((runner.columns, runner.rows, 1))
    image.SetDataElement(element)
    colours = gdcm.PhotometricInterpretation.GetPIType(runner.photometric_interpretation)
    image.SetPhotometricInterpretation(gdcm.PhotometricInterpretation(colours))
    if runner.samples_per_pixel > 1:
        image.SetPlanarConfiguration(runner.planar_configuration)
    syntax = gdcm.TransferSyntax.GetTSType(str(runner.transfer_syntax))
    image.SetTransferSyntax(gdcm.TransferSyntax(syntax))
    bits = runner.bits_stored
    kind = (runner.samples_per_pixel, runner.bits_allocated, bits, bits - 1, runner.pixel_representation)
    image.SetPixelFormat(gdcm.PixelFormat(*kind))
    return bytes(image.GetBuffer().encode("utf-8", "surrogateescape"))  # GDCM gives char* as text
