"""DICOM files -> uint8 pixels as a radiologist would see them. Nothing else in them is read."""
