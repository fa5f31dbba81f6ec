"""Stage: Checkpoint or bundle + log or Table -> scores, vectors, recommendations."""
