"""Data sets, streams, and the decoding of images and DICOM files."""
