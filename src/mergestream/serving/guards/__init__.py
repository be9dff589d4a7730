"""Checks of batches and streams: findings, drift alarms and abstention."""
