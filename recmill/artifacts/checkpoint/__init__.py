"""Checkpoints of models on disk: full ones and deltas, written atomically."""
