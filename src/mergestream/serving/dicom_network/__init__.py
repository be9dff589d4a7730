"""The DICOM node: images in by C-STORE and DICOMweb, routing rules, the inbox on disk, and reports out."""
