"""Guards: checks of batches and streams, drift alarms and abstention."""
