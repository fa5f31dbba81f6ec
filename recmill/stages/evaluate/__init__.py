"""Stage: Checkpoint + Table -> numbers, report, gate."""
