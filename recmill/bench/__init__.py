"""Stage: measure, beside peers."""
