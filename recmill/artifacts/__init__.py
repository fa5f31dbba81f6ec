"""What stages leave on disk, whole once its manifest is there: checkpoints, bundles, feature stores, indexes."""
