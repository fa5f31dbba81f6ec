"""Stage: Table or log -> Checkpoint; the loop is in trainer.py."""
