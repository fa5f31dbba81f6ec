"""Stage: log -> Table."""
