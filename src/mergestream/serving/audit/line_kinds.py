"""Kinds of audit lines."""

OPENED, ROTATION, RECOVERED, RESUMED = "opened", "rotation", "recovered", "resumed"
OWN_KINDS = (OPENED, ROTATION, RECOVERED, RESUMED)  # written by the log itself
STARTED, STOPPED, CHECKED, CHANGE = "service_started", "service_stopped", "log_checked", "change_asked"
STEP, RESET, DELETED, ACKNOWLEDGED = "step", "stream_reset", "stream_deleted", "alarms_acknowledged"
SWITCHED, RELOADED = "expert_switched", "pool_reloaded"
REVOKED, LIST_REFUSED = "experts_revoked", "revocations_refused"
