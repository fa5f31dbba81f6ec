"""Models as of one step on disk: full and delta, whole or not there."""
