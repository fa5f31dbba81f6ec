"""Models: one file each, single-device code. They read numbers, pooled embeddings and unpooled lists, never keys.

Shapes: B rows of a batch, F number features, T embedded features, D embedding size, W wide features, X and Y units of
layers.
"""
