"""The artifacts of stages, complete once they have a manifest: checkpoints, bundles, feature stores, indexes."""
