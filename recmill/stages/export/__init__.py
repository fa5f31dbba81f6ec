"""Stage: Checkpoint -> bundle."""
