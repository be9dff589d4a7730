"""A log that shows when it was changed: one JSON line an event, chained by hashes, signed."""
