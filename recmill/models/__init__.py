"""Models: one file each, single-device code. They see numbers and pooled embeddings, never keys.

Shapes: B rows of a batch, F number features, T embedded features, D embedding size, W wide features.
"""
