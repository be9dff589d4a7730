"""Results for other systems: DICOM reports of answers, the outbox that keeps them, and the programs that send them."""
