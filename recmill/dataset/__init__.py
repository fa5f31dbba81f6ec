"""Prepared rows and raw logs as batches: the Table, its shards, and which rows come when."""
