"""Prepared rows and raw logs as batches: the Table, its shards, and the schedule of their rows."""
