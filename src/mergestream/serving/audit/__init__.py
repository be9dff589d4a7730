"""The tamper-evident audit log: one JSON line per event, chained by hashes and signed."""
