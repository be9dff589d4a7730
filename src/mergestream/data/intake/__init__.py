"""Bytes from untrusted clients -> uint8 pictures, within limits."""

from mergestream.data.intake.input_files import read_upload, read_uploads
from mergestream.data.intake.limits import REFUSALS, Allowance, IntakeError, Limits, Refusal
from mergestream.data.intake.pictures import DicomSource, Picture, sha256_of_pixels, stack

__all__ = [
    "REFUSALS",
    "Allowance",
    "DicomSource",
    "IntakeError",
    "Limits",
    "Picture",
    "Refusal",
    "read_upload",
    "read_uploads",
    "sha256_of_pixels",
    "stack",
]
